"""Lists by token, or by tile of tokens, as attention's kernels take them: unions for queries, pairs for keys."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch

from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.bwd_dkdv_sm90.spec import KeyPairs
from nsa_layer.call_spec import CallSpec
from nsa_layer.cute.host_numbers import numbers_on
from nsa_layer.cute.memory_plan import rows_of_item
from nsa_layer.cute.packing import Packing, starts_of
from nsa_layer.kernels.union_lists.key_csr import pairs_by_block
from nsa_layer.kernels.union_lists.sizes import KEYS, ROWS, most_partials
from nsa_layer.kernels.union_lists.unions import union_lists

Tensor = torch.Tensor


class Extents(NamedTuple):
    """Queries, keys and lists of a call's sequences: how many, and where they begin. Tensors are int32 on the GPU.

    Attributes:
        block_size: keys of a block.
        q_tile: queries that share a list.
        tokens: queries of a sequence, packed of all.
        queries, keys: of a sequence, packed of the longest.
        q_offset: [sequences], position of the first query among its sequence's keys; None: 0, or not causal.
        cu_seqlens, cu_seqlens_k, cu_lists, cu_tiles, cu_blocks: [sequences + 1], queries, keys, lists, tiles of 128
            rows and blocks before each packed sequence; None for a batch.
        tiles, blocks: of all packed sequences.
    """

    block_size: int
    q_tile: int
    causal: bool
    tokens: int
    queries: int
    keys: int
    q_offset: Tensor | None = None
    cu_seqlens: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    cu_lists: Tensor | None = None
    cu_tiles: Tensor | None = None
    cu_blocks: Tensor | None = None
    tiles: int = 0
    blocks: int = 0

    @classmethod
    def of_layer(cls, T: int, S: int, spec: CallSpec, packing: Packing | None, q_offset: Tensor | None) -> Extents:
        """Extents of a call of `nsa`. T, S: queries and keys of a sequence, packed of all."""
        static = (spec.config.block_size, spec.config.q_tile, spec.causal)
        q_offset = q_offset if spec.causal else None
        if packing is None:
            return cls(*static, T, T, S, q_offset)
        starts = (packing.cu_tiles, packing.cu_row_tiles, packing.cu_kv_tiles)
        lengths = (packing.longest, packing.longest_k, q_offset, packing.cu_seqlens, packing.cu_seqlens_k)
        totals = (packing.total_row_tiles, packing.total_kv_tiles)
        return cls(*static, T, *lengths, *starts, *totals)

    @classmethod
    def of_lists(
        cls,
        q: Tensor,
        k: Tensor,
        rows: int,
        q_offset: Tensor | int | None,
        spec: CallSpec,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
    ) -> Extents:
        """Extents of a call of `selected_attention`.

        Args:
            rows: of a token in a tile: heads that share a list.
            cu_seqlens, cu_seqlens_k: on the GPU, for a spec with bounds alone; of keys None: the same.
        """
        if spec.bound is not None:
            return cls._bounded(q, k, rows, q_offset, spec, cu_seqlens, cu_seqlens_k)
        of_q, of_k = spec.lengths or (q.shape[1],) * q.shape[0], spec.key_lengths or (k.shape[1],) * q.shape[0]
        numbers, more = {}, {}
        if spec.lengths is not None:
            counts = dict(
                cu_seqlens=of_q,
                cu_seqlens_k=of_k,
                cu_lists=list(map(spec.config.num_tiles, of_q)),
                cu_tiles=[-(-T * rows // ROWS) for T in of_q],
                cu_blocks=list(map(spec.config.num_blocks, of_k)),
            )
            numbers = {name: (*accumulate(count, initial=0),) for name, count in counts.items()}
            more = dict(tiles=numbers["cu_tiles"][-1], blocks=numbers["cu_blocks"][-1])
        if spec.causal and isinstance(q_offset, Tensor):
            more["q_offset"] = q_offset.contiguous()
        elif spec.causal:
            first = tuple(S - T if q_offset is None else q_offset for T, S in zip(of_q, of_k))
            if any(first) or of_q != of_k:
                numbers["q_offset"] = first
        found = dict(zip(numbers, numbers_on(tuple(numbers.values()), q.device))) if numbers else {}
        static = (spec.config.block_size, spec.q_tile, spec.causal)
        return cls(*static, q.shape[-3], max(of_q), max(of_k), **found, **more)

    @classmethod
    def _bounded(
        cls,
        q: Tensor,
        k: Tensor,
        rows: int,
        q_offset: Tensor | int | None,
        spec: CallSpec,
        cu_seqlens: Tensor,
        cu_seqlens_k: Tensor | None,
    ) -> Extents:
        sequences, block_size, q_tile = len(cu_seqlens) - 1, spec.config.block_size, spec.q_tile
        of_keys = (1, 0, 1), (1, block_size - 1, block_size)
        tokens, lists, tiles, keys, blocks = starts_of(
            cu_seqlens, ((1, 0, 1), (1, q_tile - 1, q_tile), (rows, ROWS - 1, ROWS), *of_keys)
        )
        if cu_seqlens_k is not None:
            keys, blocks = starts_of(cu_seqlens_k, of_keys)
        if not spec.causal:
            q_offset = None
        elif isinstance(q_offset, int):
            q_offset = q.new_full((sequences,), q_offset, dtype=torch.int32)
        elif q_offset is None and cu_seqlens_k is not None:
            q_offset = keys.diff() - tokens.diff()
        elif q_offset is not None:
            q_offset = q_offset.contiguous()
        starts = (tokens, keys, lists, tiles, blocks)
        totals = (q.shape[0] * rows // ROWS + sequences, k.shape[0] // block_size + sequences)
        return cls(block_size, q_tile, spec.causal, q.shape[0], spec.bound, k.shape[0], q_offset, *starts, *totals)

    def named(self, *names: str) -> dict[str, object]:
        """These attributes, as keyword arguments."""
        return {name: getattr(self, name) for name in names}


def query_lists(block_indices: Tensor, rows: int, extents: Extents) -> BlockSparseTensorsTorch:
    """Forward lists of tiles of 128 rows, with bits for each token.

    Args:
        block_indices: int32 [B, M, Hs, n], packed [lists of all sequences, Hs, n].
        rows: of a token, one for each of the heads that share a list.
    """
    where = extents.named("block_size", "q_tile", "causal", "queries", "keys", "q_offset")
    where |= extents.named("cu_seqlens", "cu_seqlens_k", "cu_lists", "cu_tiles", "tiles")
    counts, blocks, bits = union_lists(block_indices, G=rows, **where)
    return BlockSparseTensorsTorch(
        counts, blocks, block_size=(ROWS, KEYS), cu_total_m_blocks=extents.cu_tiles, mask_block_bits=bits
    )


def key_pairs(block_indices: Tensor, heads: tuple[int, int], extents: Extents) -> KeyPairs:
    """The tokens that list each block, for the kernel of dk and dv; or with Hs = Hq the heads of tokens that do.

    Args:
        block_indices: as for `query_lists`.
        heads: (Hq, Hkv).
    """
    (Hq, Hkv), (Hs, n) = heads, block_indices.shape[-2:]
    batch, rows = 1 if extents.cu_seqlens is not None else block_indices.shape[0], Hq // Hs
    count = batch * extents.tokens * Hs * n
    cap = max(1, rows_of_item(count * rows) // rows)
    where = extents.named("block_size", "q_tile", "causal", "keys", "q_offset")
    where |= extents.named("cu_seqlens", "cu_lists", "cu_blocks", "blocks")
    pairs = pairs_by_block(block_indices, heads=Hkv, queries=extents.tokens, cap=cap, **where)
    numbers = (most_partials(count, cap), extents.block_size, extents.cu_blocks, Hs > Hkv)
    return KeyPairs(pairs.tokens, pairs.items, pairs.row_items, *numbers)
