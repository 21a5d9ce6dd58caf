"""The form of products (`multiply.product`) in the kernels that SM90 and SM100 share."""

FORCED = False  # set in tests, so that a Hopper GPU runs what is compiled for SM100


def by_warp(arch: int) -> bool:
    """True if the kernels for sm_`arch` make products warp by warp, for want of wgmma."""
    return FORCED or arch // 10 == 10
