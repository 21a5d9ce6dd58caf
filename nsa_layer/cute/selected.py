"""The selected branch: the options of its attention calls, and the lists that these read.

By token, and by tile of up to 64 queries: unions of lists with a bit for each token, for queries, and a token-block CSR
for keys. By tile of 128 and 256 on Hopper: lists of key tiles.
"""

from __future__ import annotations

import torch

from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.bwd_dkdv_sm90.spec import KeyPairs
from flash_attn.cute.bwd_sm90 import two_pass
from nsa_layer.call import CallSpec
from nsa_layer.config import NSAConfig
from nsa_layer.cute.branch_options import position_options, token_options
from nsa_layer.cute.varlen import Varlen
from nsa_layer.kernels.block_lists import make as list_kernels
from nsa_layer.kernels.launch import rows_aligned
from nsa_layer.kernels.union_lists.key_csr import pairs_by_block
from nsa_layer.kernels.union_lists.sizes import KEYS, ROWS, longest_work_tile, most_partials
from nsa_layer.kernels.union_lists.unions import union_lists
from nsa_layer.support import device_arch, hopper_kv_tile, kernel_family, reads_unions

Tensor = torch.Tensor


def use_split_dq(q: Tensor, v: Tensor, spec: CallSpec) -> bool:
    """True if backward of lists of key tiles computes dq in a pass of its own, over forward's lists, where that is
    faster; always in deterministic mode, so that lists need no order of adds to dq."""
    config = spec.config
    lists = BlockSparseTensorsTorch(None, None, block_size=(config.q_tile, hopper_kv_tile(config.block_size)))
    return two_pass.takes(None, arch=90, q=q, v=v, forward=lists, backward=lists, deterministic=config.deterministic)


def reads_pages(config: NSAConfig, k_cache: Tensor, v_cache: Tensor, *, listed: bool) -> bool:
    """True if the branch reads keys on pages, [pages, page, Hkv, D]; listed: of the caller's lists."""
    aligned = k_cache.shape[1] % KEYS == 0 and rows_aligned(k_cache) and rows_aligned(v_cache)
    return aligned and reads_unions(config, listed=listed) and _on_hopper(k_cache.device)


def _on_hopper(device: torch.device) -> bool:
    return kernel_family(device_arch(device.index)) == 90


def selected_options(
    block_indices: Tensor,
    T: int,
    heads: tuple[int, int],
    *,
    spec: CallSpec,
    backward: bool,
    varlen: Varlen | None = None,
    block_counts: Tensor | None = None,
    S: int | None = None,
    q_offset: Tensor | None = None,
) -> dict:
    """Options of the call of T queries that attend to the tokens of the listed blocks.

    Args:
        block_indices: int32 [B, M, Hs, n]; packed [tiles of all sequences, Hs, n].
        T: tokens of a sequence, packed of all.
        heads: (Hq, Hkv).
        backward: lists by key tile, not by query tile; unions have none, but `token_block_csr`.
        block_counts: int32 [B, Hkv, M]; packed [Hkv, tiles of all sequences]: listed blocks; forward lists of key
            tiles need them.
        S: tokens of keys, like T; None: T.
        q_offset: int32 [B], packed [sequences]: position of the first query among the keys, where unions are read.

    Raises:
        NotImplementedError: q_offset where unions are not read.
    """
    config, options = spec.config, dict(causal=spec.causal) | token_options(varlen)
    if reads_unions(config, listed=spec.listed):
        Hs, q_offset = block_indices.shape[-2], q_offset if spec.causal else None
        where = dict(spec=spec, varlen=varlen, q_offset=q_offset)
        lists = query_lists(block_indices, heads[0] // Hs, T, T if S is None else S, **where)
        options |= dict(block_sparse_tensors=lists, pack_gqa=Hs == heads[1])
        return options | position_options(q_offset)
    if q_offset is not None:
        raise NotImplementedError(f"q_offset with q_tile={config.q_tile} on the kernels: tiles below 128 queries alone")
    size, rows = config.block_size, None
    static = dict(block_size=size, q_tile=config.q_tile, kv_tile=hopper_kv_tile(size), causal=spec.causal)
    if varlen is not None:
        T, rows = varlen.longest, varlen.total_key_blocks
        static |= dict(cu_tiles=varlen.cu_tiles, cu_rows=varlen.cu_key_blocks)
    block_indices = block_indices.transpose(-3, -2).contiguous()  # copies what an operator gave or heads were joined to
    if backward:
        lists = list_kernels.backward_lists(block_indices, T, heads, rows=rows, **static)
    else:
        lists = list_kernels.forward_lists(block_indices, block_counts, T, **static)
    return options | dict(block_sparse_tensors=lists)


def dq_options(options: dict) -> dict:
    """`selected_options` of forward, for the dq pass over its lists, and for `forward_unions`."""
    kept = {name: x for name, x in options.items() if name not in ("max_seqlen_k", "pack_gqa", "block_sparse_tensors")}
    return kept | dict(lists=options["block_sparse_tensors"])


def query_lists(
    block_indices: Tensor,
    rows: int,
    T: int,
    S: int,
    *,
    spec: CallSpec,
    varlen: Varlen | None = None,
    q_offset: Tensor | None = None,
) -> BlockSparseTensorsTorch:
    """Forward lists of tiles of 128 rows, with bits for each token.

    Args:
        block_indices: int32 [B, M, Hs, n], packed [lists of all sequences, Hs, n].
        rows: of a token, one for each of the heads that share a list.
        T, S: queries and keys of a sequence of a batch.
        q_offset: int32 [sequences], position of the first query among its sequence's keys; None: 0, or not causal.
    """
    static = dict(block_size=spec.config.block_size, q_tile=spec.config.q_tile, causal=spec.causal, q_offset=q_offset)
    where, row_tiles = dict(queries=T, keys=S), None
    if varlen is not None:
        row_tiles = varlen.cu_row_tiles
        where = dict(queries=varlen.longest, keys=varlen.longest_k, tiles=varlen.total_row_tiles)
        where |= dict(cu_seqlens=varlen.cu_seqlens, cu_seqlens_k=varlen.cu_seqlens_k)
        where |= dict(cu_lists=varlen.cu_tiles, cu_tiles=row_tiles)
    counts, blocks, bits = union_lists(block_indices, G=rows, **static, **where)
    return BlockSparseTensorsTorch(
        counts, blocks, block_size=(ROWS, KEYS), cu_total_m_blocks=row_tiles, mask_block_bits=bits
    )


def token_block_csr(
    block_indices: Tensor,
    heads: tuple[int, int],
    T: int,
    S: int,
    *,
    spec: CallSpec,
    varlen: Varlen | None = None,
    q_offset: Tensor | None = None,
) -> KeyPairs:
    """The tokens that list each block, for the kernel of dk and dv; or with Hs = Hq the heads of tokens that do.

    Args:
        heads: (Hq, Hkv); arguments else as for `query_lists`, but that T is of all packed sequences.
    """
    (Hq, Hkv), (Hs, n), block_size = heads, block_indices.shape[-2:], spec.config.block_size
    batch, rows = 1 if varlen is not None else block_indices.shape[0], Hq // Hs
    count = batch * T * Hs * n
    cap = longest_work_tile(count, rows)
    static = dict(block_size=block_size, q_tile=spec.config.q_tile, causal=spec.causal, q_offset=q_offset)
    where, of_blocks = dict(keys=S), None
    if varlen is not None:
        of_blocks = varlen.cu_key_blocks
        where = dict(keys=varlen.longest_k, cu_seqlens=varlen.cu_seqlens, cu_lists=varlen.cu_tiles)
        where |= dict(cu_blocks=of_blocks, blocks=varlen.total_key_blocks)
    pairs = pairs_by_block(block_indices, heads=Hkv, queries=T, cap=cap, **static, **where)
    numbers = (most_partials(count, cap), block_size, of_blocks, Hs > Hkv)
    return KeyPairs(pairs.tokens, pairs.work_tiles, pairs.row_tiles, *numbers)
