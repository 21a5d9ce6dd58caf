"""Tiles of the SM90 and SM100 kernels for the block sizes of lists that the dense kernels' tiles do not fit.

A tile of queries may be a part of a block; on SM90 a tile of keys has to be a block of keys.
"""

from typing import Any, Optional

from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

ROWS = 64  # queries of a warpgroup of SM90
BIT_ROWS = 128  # rows of packed heads to a list with `mask_block_bits`
STEP = 128  # keys of a step of the dq pass, and of forward by `two_block_steps`
STAGES = 6  # of a block of 64 keys that fit beside a tile's queries at head dimension 128, at most
SHARED_BYTES = 226 * 1024  # of tiles of a CTA


def box_columns(head_dim: int) -> int:
    """Head dimensions that one swizzled row of shared memory holds."""
    return 64 if head_dim % 64 == 0 else 32


DENSE_BLOCK = (128, 128)  # of lists that do not say what a block is

NARROW = dict(n_block_size=64, AtomLayoutNdKV=1, num_wg=1)
NARROW_TWICE = NARROW | dict(ctas_per_mp=2)
WIDE = dict(n_block_size=128, AtomLayoutNdKV=2)

# By the largest head dimension, in the order of trying: the first whose tile fits the blocks is taken. Blocks of 64
# keys add twice as much to dq as blocks of 128, which bounds them whatever the tile.
BACKWARD_TILES: dict[int, tuple[dict[str, int], ...]] = {64: (NARROW_TWICE, WIDE), 128: (NARROW,)}

# The same for kernels without dq, which have shared memory for a second CTA, or for more stages of queries.
WITHOUT_DQ: dict[int, tuple[dict[str, int], ...]] = {64: (NARROW_TWICE, WIDE), 128: (NARROW_TWICE, WIDE)}

# What all of them have in common.
TILE: dict[str, int] = dict(
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
    """The interface's BwdConfig for SM90 backward with these lists; None where dense_m x dense_n fits, or nothing does.

    Without dq a tile of the table is taken before the dense one.
    """
    from flash_attn.cute import interface

    if tensors is None:
        return None
    block_q, block_k = tensors.block_size or (DENSE_BLOCK if without_dq else (dense_m, dense_n))
    if not without_dq and block_q % dense_m == 0 and block_k == dense_n:
        return None
    for largest, tiles in (WITHOUT_DQ if without_dq else BACKWARD_TILES).items():
        if max(head_dim, head_dim_v) <= largest:
            fitting = (t for t in tiles if block_q % TILE["m_block_size"] == 0 and block_k == t["n_block_size"])
            tile = next(fitting, None)
            return tile and interface.BwdConfig(**TILE, **tile)
    return None


LIST_DIMS = ((64, 64), (96, 96), (128, 128))  # head dimensions of the kernels' tiles
TOKEN_DIMS = (*LIST_DIMS, (192, 128), (256, 256))  # over lists with a bit for each token


def tile_dims(head_dim: int, head_dim_v: int, heads: int = 1) -> tuple[int, int]:
    """Head dimensions of the tiles that SM90's kernels over lists with bits compute with: the smallest of `TOKEN_DIMS`
    that hold these. TMA fills the tiles' other columns with zeros, and stores none of them.

    heads: query heads that share a list. Where their rows come without TMA, or no tile is so large, the dimensions as
    they are.
    """
    if BIT_ROWS % heads:
        return head_dim, head_dim_v
    fitting = (dims for dims in TOKEN_DIMS if dims[0] >= head_dim and dims[1] >= head_dim_v)
    return next(fitting, (head_dim, head_dim_v))


def forward_parts(
    head_dim: int, head_dim_v: int, tile_n: int, overlaps_products: bool, plain: bool, has_bits: bool = False
) -> int:
    """Blocks of a step of SM90 forward: two by `two_block_steps`, with bits one by `own_blocks`.

    0 where it has its own tile of `tile_n` keys.
    `overlaps_products`: a step's scores are computed while the one before is multiplied with v. `plain`: no score_mod,
    no paged keys but with bits, and no compressed-causal mask, which `masks` does not know.
    """
    fits = (head_dim, head_dim_v) in (TOKEN_DIMS if has_bits else LIST_DIMS)
    parts = 1 if has_bits else 2
    return parts if tile_n == STEP // 2 and fits and overlaps_products and plain else 0


def stages(list_words: int, dims: tuple[int, int] = (128, 128), queries: int = BIT_ROWS) -> int:
    """Stages of keys and values of SM90 forward, with so many words of bits beside an entry of lists.

    dims: head dimensions of q and k, and of v. queries: of a tile.
    """
    if not list_words:
        return 2
    blocks = (SHARED_BYTES // 2 - queries * dims[0]) // (STEP // 2 * sum(dims))
    return min(blocks, STAGES)


def query_stages(stages: int, tile_m: int, tensors: Optional[BlockSparseTensorsTorch]) -> int:
    """Query tiles that an SM100 forward CTA works on: one, where a block holds no whole number of pairs."""
    if tensors is None or tensors.block_size is None:
        return stages
    return stages if tensors.block_size[0] % (stages * tile_m) == 0 else 1
