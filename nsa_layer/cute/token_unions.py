"""Lists by token, or by tile of tokens, as attention's kernels take them: unions for queries, pairs for keys."""

from __future__ import annotations

import torch

from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.bwd_dkdv_sm90.spec import KeyPairs
from nsa_layer.call_spec import CallSpec
from nsa_layer.cute.memory_plan import rows_of_item
from nsa_layer.cute.packing import Packing
from nsa_layer.kernels.union_lists.key_csr import pairs_by_block
from nsa_layer.kernels.union_lists.sizes import KEYS, ROWS, most_partials
from nsa_layer.kernels.union_lists.unions import union_lists

Tensor = torch.Tensor


def query_lists(
    block_indices: Tensor,
    rows: int,
    T: int,
    S: int,
    *,
    spec: CallSpec,
    packing: Packing | None = None,
    q_offset: Tensor | None = None,
) -> BlockSparseTensorsTorch:
    """Forward lists of tiles of 128 rows, with bits for each token.

    Args:
        block_indices: int32 [B, M, Hs, n], packed [lists of all sequences, Hs, n].
        rows: of a token, one for each of the heads that share a list.
        T, S: queries and keys of a sequence of a batch.
        q_offset: int32 [sequences], position of the first query among its sequence's keys; None: 0, or not causal.
    """
    static = dict(G=rows, block_size=spec.config.block_size, q_tile=spec.q_tile, causal=spec.causal, q_offset=q_offset)
    where, row_tiles = dict(queries=T, keys=S), None
    if packing is not None:
        row_tiles = packing.cu_row_tiles
        where = dict(queries=packing.longest, keys=packing.longest_k, tiles=packing.total_row_tiles)
        where |= dict(cu_seqlens=packing.cu_seqlens, cu_seqlens_k=packing.cu_seqlens_k)
        where |= dict(cu_lists=packing.cu_tiles, cu_tiles=row_tiles)
    counts, blocks, bits = union_lists(block_indices, **static, **where)
    return BlockSparseTensorsTorch(
        counts, blocks, block_size=(ROWS, KEYS), cu_total_m_blocks=row_tiles, mask_block_bits=bits
    )


def key_pairs(
    block_indices: Tensor,
    heads: tuple[int, int],
    T: int,
    S: int,
    *,
    spec: CallSpec,
    packing: Packing | None = None,
    q_offset: Tensor | None = None,
) -> KeyPairs:
    """The tokens that list each block, for the kernel of dk and dv; or with Hs = Hq the heads of tokens that do.

    Args:
        heads: (Hq, Hkv); arguments else as for `query_lists`, but that T is of all packed sequences.
    """
    (Hq, Hkv), (Hs, n), block_size = heads, block_indices.shape[-2:], spec.config.block_size
    batch, rows = 1 if packing is not None else block_indices.shape[0], Hq // Hs
    count = batch * T * Hs * n
    cap = max(1, rows_of_item(count * rows) // rows)
    static = dict(block_size=block_size, q_tile=spec.q_tile, causal=spec.causal, q_offset=q_offset)
    where, of_blocks = dict(keys=S), None
    if packing is not None:
        of_blocks = packing.cu_kv_tiles
        where = dict(keys=packing.longest_k, cu_seqlens=packing.cu_seqlens, cu_lists=packing.cu_tiles)
        where |= dict(cu_blocks=of_blocks, blocks=packing.total_kv_tiles)
    pairs = pairs_by_block(block_indices, heads=Hkv, queries=T, cap=cap, **static, **where)
    numbers = (most_partials(count, cap), block_size, of_blocks, Hs > Hkv)
    return KeyPairs(pairs.tokens, pairs.items, pairs.row_items, *numbers)
