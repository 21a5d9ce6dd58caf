"""The form of products (`mma.product`) in the kernels that SM90 and SM100 share."""

FORCED = False  # set in tests, so that a Hopper GPU runs what is compiled for SM100


def use_mma_sync(arch: int) -> bool:
    """True if the kernels for sm_`arch` multiply by mma.sync, for want of wgmma."""
    return FORCED or arch // 10 == 10
