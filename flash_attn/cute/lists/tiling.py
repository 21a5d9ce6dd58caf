"""Tiles of the SM90 and SM100 kernels for block sizes of lists that the dense kernels' tiles do not fit.

A query tile may be a part of a block; on SM90 a key tile has to be a block of keys.
"""

from typing import Any, Optional

from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

ROWS = 64  # query rows of a warpgroup on SM90
BIT_ROWS = 128  # rows of packed heads per list with `mask_block_bits`
STEP = 128  # of a step of the dq pass, and of forward by `two_block_steps`
MOST_KEY_STAGES = 6  # most stages of 64 keys: what fits beside a tile's q at head dimension 128
SHARED_BYTES = 226 * 1024  # shared memory of a CTA for tiles of SM90 forward


def box_columns(head_dim: int) -> int:
    """Columns of a TMA box: those that one swizzled row of shared memory holds."""
    return 64 if head_dim % 64 == 0 else 32


DENSE_BLOCK = (128, 128)  # of lists without block_size

NARROW = dict(n_block_size=64, AtomLayoutNdKV=1, num_wg=1)
NARROW_TWICE = NARROW | dict(ctas_per_mp=2)
WIDE = dict(n_block_size=128, AtomLayoutNdKV=2)

# By largest head dimension; the first tile that fits the blocks is taken. With blocks of 64 keys the kernel adds twice
# as much to dq as with 128, and is bound by that whatever the tile.
BACKWARD_TILES: dict[int, tuple[dict[str, int], ...]] = {64: (NARROW_TWICE, WIDE), 128: (NARROW,)}

# BACKWARD_TILES of kernels without dq, which have shared memory for a second CTA or more stages of queries.
WITHOUT_DQ: dict[int, tuple[dict[str, int], ...]] = {64: (NARROW_TWICE, WIDE), 128: (NARROW_TWICE, WIDE)}

# Options that all tiles above share.
COMMON_TILE: dict[str, int] = dict(
    m_block_size=64, num_stages_Q=2, num_stages_dO=2, num_stages_PdS=2, SdP_swapAB=True, dKV_swapAB=False,
    dQ_swapAB=False, AtomLayoutMSdP=1, AtomLayoutMdQ=1,
)  # fmt: skip


def backward_tile(
    head_dim: int,
    head_dim_v: int,
    dense_m: int,
    dense_n: int,
    tensors: Optional[BlockSparseTensorsTorch],
    *,
    without_dq: bool = False,
) -> Any:
    """The interface's BwdConfig for SM90 backward with these lists; None if the dense tile fits, or no tile does.

    Without dq tiles of `WITHOUT_DQ` have precedence over the dense one.
    """
    from flash_attn.cute import interface

    if tensors is None:
        return None
    block_q, block_k = tensors.block_size or (DENSE_BLOCK if without_dq else (dense_m, dense_n))
    if not without_dq and block_q % dense_m == 0 and block_k == dense_n:
        return None
    for largest, tiles in (WITHOUT_DQ if without_dq else BACKWARD_TILES).items():
        if max(head_dim, head_dim_v) <= largest:
            fitting = (t for t in tiles if block_q % COMMON_TILE["m_block_size"] == 0 and block_k == t["n_block_size"])
            tile = next(fitting, None)
            return tile and interface.BwdConfig(**COMMON_TILE, **tile)
    return None


LIST_DIMS = ((64, 64), (96, 96), (128, 128))  # (D, Dv) of the kernels' tiles
TOKEN_DIMS = (*LIST_DIMS, (192, 128), (256, 256))  # over lists with a bit for each token


def tile_dims(head_dim: int, head_dim_v: int, heads: int = 1) -> tuple[int, int]:
    """(D, Dv) of the tiles of SM90's kernels over lists with bits: the smallest of `TOKEN_DIMS` that hold these.

    TMA fills columns past the head dimension with zeros, and does not store them. heads: query heads that share a list.
    If their rows are loaded without TMA, or no tile is large enough, the dimensions unchanged.
    """
    if BIT_ROWS % heads:
        return head_dim, head_dim_v
    fitting = (dims for dims in TOKEN_DIMS if dims[0] >= head_dim and dims[1] >= head_dim_v)
    return next(fitting, (head_dim, head_dim_v))


def forward_parts(
    head_dim: int, head_dim_v: int, tile_n: int, overlaps_products: bool, plain: bool, has_bits: bool = False
) -> int:
    """Blocks per step of SM90 forward: 2 for `two_block_steps`, 1 with bits for `own_blocks`.

    0 for upstream's own loop over tiles of `tile_n` keys.
    `overlaps_products`: a step's scores overlap the product of the one before with v. `plain`: no score_mod, no
    compressed-causal mask, and no paged keys except with bits.
    """
    fits = (head_dim, head_dim_v) in (TOKEN_DIMS if has_bits else LIST_DIMS)
    parts = 1 if has_bits else 2
    return parts if tile_n == STEP // 2 and fits and overlaps_products and plain else 0


def stages(list_words: int, dims: tuple[int, int] = (128, 128), queries: int = BIT_ROWS) -> int:
    """Stages of k and v of SM90 forward over lists with `list_words` words of bits per entry.

    dims: (D, Dv). queries: rows of a tile.
    """
    if not list_words:
        return 2
    blocks = (SHARED_BYTES // 2 - queries * dims[0]) // (STEP // 2 * sum(dims))
    return min(blocks, MOST_KEY_STAGES)


def query_stages(stages: int, tile_m: int, tensors: Optional[BlockSparseTensorsTorch]) -> int:
    """Query tiles per CTA of SM100 forward: `stages`, or 1 where a block is not a multiple of that many tiles."""
    if tensors is None or tensors.block_size is None:
        return stages
    return stages if tensors.block_size[0] % (stages * tile_m) == 0 else 1
