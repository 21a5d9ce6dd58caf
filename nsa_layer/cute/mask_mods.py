"""mask_mods of the selected branch, for the fork's kernels.

The kernel cache hashes a mask_mod's own source and the values that it closes over, nothing that it calls: each is
written out in full.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import cutlass
import cutlass.cute as cute

from flash_attn.cute import utils


@lru_cache(maxsize=None)
def causal_mask() -> Callable:
    """Token s is visible to query t iff ``s <= t``: enough where the listed tiles hold nothing but listed blocks."""

    @cute.jit
    def mask(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
        return kv_idx <= q_idx

    return mask


@lru_cache(maxsize=None)
def selected_mask(block_size: int, q_tile: int, G: int, causal: bool, packed: bool = False) -> Callable:
    """Token s is visible to query t iff its block is listed for t's tile, and ``s <= t`` where causal.

    aux_tensors[0]: the bitmap of `torch_block_lists.block_bitmap`, int32 [B, Hkv, M, words]; packed
    [1, Hkv, all rows, words], and aux_tensors[1] says at which row each sequence starts.
    """

    @cute.jit
    def mask(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
        bitmap = aux_tensors[0]
        b = utils.ssa_to_scalar(batch)
        h = utils.ssa_to_scalar(head) // G
        tile = utils.ssa_to_scalar(q_idx) // q_tile
        if cutlass.const_expr(packed):
            tile = tile + aux_tensors[1][b]
            b = 0
        block = utils.ssa_to_scalar(kv_idx) // block_size
        word = bitmap[b, h, tile, block // 32]
        listed = ((word >> (block % 32)) & 1) == 1
        visible = utils.scalar_to_ssa(listed, cutlass.Boolean)
        if cutlass.const_expr(causal):
            visible = visible & (kv_idx <= q_idx)
        return visible

    return mask
