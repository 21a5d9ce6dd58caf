"""The choice between wgmma and mma.sync (`mma.product`) in the kernels that SM90 and SM100 share."""

FORCED = False  # set in tests: SM90 runs the mma.sync kernels of SM100


def use_mma_sync(arch: int) -> bool:
    """True if the kernels for sm_`arch` use mma.sync, since it has no wgmma."""
    return FORCED or arch // 10 == 10
