"""Compile-time options of the dq pass's kernel, and the calls that it supports."""

from dataclasses import dataclass
from typing import Any, Optional

import torch

from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.lists.query_bits import BIT_KEYS, has_bits, rows_of_token
from flash_attn.cute.lists.rows import ListHeads
from flash_attn.cute.lists.tiling import LIST_DIMS, ROWS, STEP, TOKEN_DIMS, box_columns
from flash_attn.cute.mma.form import use_mma_sync
from flash_attn.cute.mma.host import DTYPES, MOST_STAGES, SHARED_MEMORY
from flash_attn.cute.runtime.own_device import dispatch_arch

WARPGROUPS, THREADS, WARPS = 2, 128, 4  # consumer warpgroups, and threads and warps of each
TILE_M = WARPGROUPS * ROWS  # queries of a tile
WIDEST = 128  # largest head dimension with steps of `STEP` keys


@dataclass(frozen=True)
class DqSpec:
    """Options that a kernel is compiled for, lists and mask_mod apart; hashable."""

    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    block_k: int
    group: int  # query heads of a key/value head
    subtiles: int  # tiles of TILE_M queries in a block of the lists
    edges: tuple[bool, bool]  # whether visible keys have a left and a right bound; causal has a right one
    packed: tuple[bool, bool]  # whether there are cu_seqlens of queries and keys
    offset: bool  # whether positions of first queries are given
    words: int  # 32-bit words of `mask_block_bits` per entry, 0 without
    packed_heads: int  # query heads packed into a tile's rows: with bits, those that share a list
    stay: bool  # persistent CTAs loop over the tiles; else one CTA per tile
    use_mma_sync: bool  # instead of wgmma (`mma.product`)
    list_group: int = 1  # query heads per list, where lists are indexed by key/value head; else 1
    seqused: tuple[bool, bool] = (False, False)
    from_accum: bool = False  # whether dq starts from the fp32 accumulator, not from 0
    onto_dq: bool = False  # whether dq's old values are added before rounding
    sums: bool = False  # whether dpsum and lse_log2 are computed and written, not read
    start: int = ROWS  # sequences of row sums and the accumulator start at multiples of this many rows

    @staticmethod
    def of(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lists: BlockSparseTensorsTorch, normalized: Any,
        edges: tuple, starts: tuple, q_offset: Optional[torch.Tensor], *, short_rows: bool = False, **options: Any,
    ) -> "DqSpec":  # fmt: skip
        """The spec of a call. starts: cu_seqlens of queries and keys. short_rows: `has_short_rows` of its lists."""
        words, group = lists.mask_block_bits.shape[-1] if has_bits(lists) else 0, q.shape[-2] // k.shape[-2]
        heads = ListHeads.of(lists, q.shape[-2], k.shape[-2])
        return DqSpec(
            dtype=q.dtype,
            head_dim=q.shape[-1],
            head_dim_v=v.shape[-1],
            block_k=BIT_KEYS if words else STEP if lists.block_size is None else lists.block_size[1],
            group=group,
            subtiles=normalized.q_subtile_factor,
            edges=tuple(edge is not None for edge in edges),
            packed=tuple(start is not None for start in starts),
            offset=q_offset is not None,
            words=words,
            packed_heads=rows_of_token(heads, group) if words else 1,
            stay=words == 1 or short_rows,
            use_mma_sync=use_mma_sync(dispatch_arch()),
            list_group=1 if words else heads.group,
            **options,
        )

    @property
    def dims(self) -> tuple[int, int]:
        """(D, Dv): head dimensions of q and k, and of do and v."""
        return self.head_dim, self.head_dim_v

    @property
    def step(self) -> int:
        """Keys of a step; one block where registers or shared memory do not hold two."""
        return STEP if max(self.dims) <= WIDEST else self.block_k

    @property
    def stages(self) -> int:
        """Stages of k and v in shared memory, beside q and do."""
        row = 2 * sum(self.dims)  # bytes of a token's k and v, or q and do
        return min(MOST_STAGES, (SHARED_MEMORY - TILE_M * row) // (self.step * row))

    def box(self, dim: int) -> tuple[int, int]:
        """(keys, columns) of the TMA box for k or v of `dim` columns."""
        return self.block_k, box_columns(dim)


def unsupported(
    arch: int, dtype: torch.dtype, head_dim: int, head_dim_v: int, lists: BlockSparseTensorsTorch
) -> Optional[str]:
    """Why `backward_dq` does not support a call, or None."""
    if arch // 10 != 9 and not (arch // 10 == 10 and has_bits(lists)):
        return f"sm_{arch}: the dq pass is for sm_90, and for sm_100 over lists with mask_block_bits"
    if dtype not in DTYPES:
        return f"q is {dtype}: the dq pass supports float16 and bfloat16"
    supported = TOKEN_DIMS if has_bits(lists) else LIST_DIMS
    if (head_dim, head_dim_v) not in supported:
        return f"head dimensions {head_dim} and {head_dim_v}: the dq pass supports {', '.join(map(str, supported))}"
    block_q, block_k = lists.block_size or (TILE_M, STEP)
    if block_q % TILE_M or block_k not in (STEP // 2, STEP):
        return (
            f"blocks of {block_q} queries and {block_k} keys: the dq pass supports multiples of {TILE_M} queries, and "
            f"{STEP // 2} or {STEP} keys"
        )
    return None
