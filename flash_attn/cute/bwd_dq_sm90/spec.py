"""Options of the dq pass's kernel, and the calls that it can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch

from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.lists.query_bits import has_bits
from flash_attn.cute.lists.tiling import ROWS, STEP, box_columns
from flash_attn.cute.multiply.host import DTYPES

WARPGROUPS, THREADS, WARPS = 2, 128, 4  # that multiply, and threads and warps of each
TILE_M = WARPGROUPS * ROWS  # queries of a tile
SHARED_MEMORY = 224 * 1024  # bytes for tiles
MOST_STAGES = 4


@dataclass(frozen=True)
class DqSpec:
    """Options that a kernel is compiled for, lists and mask_mod apart; hashable.

    Attributes:
        group: query heads of a key/value head.
        list_group: of them, how many share a list that is indexed by key/value head; else 1.
        subtiles: tiles of TILE_M queries in a block of the lists.
        edges: whether there is a left and a right end of what a query sees; causal is a right one.
        packed, seqused: whether cu_seqlens, and seqused, are there for queries and keys.
        offset: whether positions of first queries are given.
        from_accum: whether dq starts from what the fp32 accumulator holds, not from 0.
        onto_dq: whether what dq holds is added before rounding.
        sums: whether dpsum and lse_log2 are computed and written, not read.
        start: rows that sequences of dpsum, lse_log2 and the accumulator start at multiples of.
        words: of bits beside each entry of the lists, 0 for lists without.
        packed_heads: query heads that a tile has rows of, alternating: with bits, those that share a list.
        stay: as many CTAs as run at a time loop the tiles; else a CTA to a tile.
        by_warp: how products are made (`multiply.product`).
    """

    dtype: torch.dtype
    head_dim: int
    block_k: int
    group: int
    subtiles: int
    edges: tuple[bool, bool]
    packed: tuple[bool, bool]
    offset: bool
    words: int
    packed_heads: int
    stay: bool
    by_warp: bool
    list_group: int = 1
    seqused: tuple[bool, bool] = (False, False)
    from_accum: bool = False
    onto_dq: bool = False
    sums: bool = False
    start: int = ROWS

    @property
    def stages(self) -> int:
        """Stages of k and v in shared memory, beside q and do."""
        row = 2 * self.head_dim * 2  # bytes of a token's k and v, or q and do
        return min(MOST_STAGES, (SHARED_MEMORY - TILE_M * row) // (STEP * row))

    @property
    def box(self) -> tuple[int, int]:
        """Keys and head dimensions of k or v that are loaded at a time."""
        return self.block_k, box_columns(self.head_dim)


HEAD_DIMS = (64, 96, 128)


def unsupported(
    arch: int, dtype: torch.dtype, head_dim: int, head_dim_v: int, lists: BlockSparseTensorsTorch
) -> Optional[str]:
    """Why `backward_dq` cannot do a call, or None."""
    if arch // 10 != 9 and not (arch // 10 == 10 and has_bits(lists)):
        return f"sm_{arch}: the dq pass is for sm_90, and for sm_100 over lists with mask_block_bits"
    if dtype not in DTYPES:
        return f"q is {dtype}: the dq pass takes float16 and bfloat16"
    if head_dim != head_dim_v or head_dim not in HEAD_DIMS:
        return f"head dimensions {head_dim} and {head_dim_v}: the dq pass takes equal ones of {HEAD_DIMS}"
    block_q, block_k = lists.block_size or (TILE_M, STEP)
    if block_q % TILE_M or block_k not in (STEP // 2, STEP):
        return (
            f"blocks of {block_q} queries and {block_k} keys: the dq pass takes multiples of {TILE_M} queries, and "
            f"{STEP // 2} or {STEP} keys"
        )
    return None
