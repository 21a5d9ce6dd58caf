"""The selected branch: the options of its attention calls, and the lists that these read.

By token, and by tile of up to 64 queries: unions of lists with a bit for each token, for queries, and a token-block CSR
for keys. By tile of 128 and 256 on Hopper: lists of key tiles.
"""

from __future__ import annotations

import torch

from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.bwd_dkdv.spec import KeyPairs
from flash_attn.cute.bwd_sm90 import two_pass
from nsa_layer.call import Call, CallSpec
from nsa_layer.config import NSAConfig
from nsa_layer.cute.branch_options import token_options
from nsa_layer.cute.varlen import Varlen
from nsa_layer.kernels.block_lists import make as list_kernels
from nsa_layer.kernels.launch import rows_aligned
from nsa_layer.kernels.union_lists.key_csr import pairs_by_block
from nsa_layer.kernels.union_lists.sizes import longest_work_tile
from nsa_layer.kernels.union_lists.unions import union_lists
from nsa_layer.support import UNION_BLOCK, UNION_ROWS, device_arch, hopper_kv_tile, kernel_family, reads_unions

Tensor = torch.Tensor


def use_split_dq(q: Tensor, v: Tensor, spec: CallSpec) -> bool:
    """True if backward of lists of key tiles computes dq in a pass of its own, over forward's lists, where that is
    faster; always in deterministic mode, so that lists need no order of adds to dq."""
    config = spec.config
    lists = BlockSparseTensorsTorch(None, None, block_size=(config.q_tile, hopper_kv_tile(config.block_size)))
    return two_pass.use_split_dq(
        None, arch=90, q=q, v=v, forward=lists, backward=lists, deterministic=config.deterministic
    )


def reads_pages(config: NSAConfig, k_cache: Tensor, v_cache: Tensor, *, listed: bool) -> bool:
    """True if the branch reads keys on pages, [pages, page, Hkv, D]; listed: of the caller's lists."""
    aligned = k_cache.shape[1] % UNION_BLOCK == 0 and rows_aligned(k_cache) and rows_aligned(v_cache)
    return aligned and reads_unions(config, k_cache.shape[-1], listed=listed) and _on_hopper(k_cache.device)


def _on_hopper(device: torch.device) -> bool:
    return kernel_family(device_arch(device.index)) == 90


def selected_options(
    call: Call, varlen: Varlen, block_indices: Tensor, block_counts: Tensor | None = None, *, backward: bool
) -> dict:
    """Options of attention to the tokens of the listed blocks.

    Args:
        block_indices: int32 [B, M, Hs, n]; packed [tiles of all sequences, Hs, n].
        block_counts: int32 [B, Hkv, M]; packed [Hkv, tiles of all sequences]: listed blocks; forward lists of key
            tiles need them.
        backward: lists by key tile, not by query tile; unions have none, but `token_block_csr`.

    Raises:
        NotImplementedError: q_offset where unions are not read.
    """
    spec, config, heads = call.spec, call.config, (call.q.shape[-2], call.k.shape[-2])
    options = dict(causal=spec.causal) | token_options(varlen)
    if reads_unions(config, call.k.shape[-1], listed=spec.listed):
        lists = query_lists(call, varlen, block_indices)
        options |= dict(block_sparse_tensors=lists, pack_gqa=block_indices.shape[-2] == heads[1])
        return options | dict(q_offset=call.q_offset if spec.causal else None)
    if call.q_offset is not None:
        raise NotImplementedError(f"q_offset with q_tile={config.q_tile} on the kernels: tiles below 128 queries alone")
    size = config.block_size
    static = dict(block_size=size, q_tile=config.q_tile, kv_tile=hopper_kv_tile(size), causal=spec.causal)
    static |= dict(cu_tiles=varlen.cu_tiles, cu_rows=varlen.cu_key_blocks)
    block_indices = block_indices.transpose(-3, -2).contiguous()  # copies what an operator gave or heads were joined to
    if backward:
        lists = list_kernels.backward_lists(
            block_indices, varlen.longest, heads, rows=varlen.total_key_blocks, **static
        )
    else:
        lists = list_kernels.forward_lists(block_indices, block_counts, varlen.longest, **static)
    return options | dict(block_sparse_tensors=lists)


def dq_options(options: dict) -> dict:
    """`selected_options` of forward, for the dq pass over its lists, and for `forward_unions`."""
    kept = {name: x for name, x in options.items() if name not in ("max_seqlen_k", "pack_gqa", "block_sparse_tensors")}
    return kept | dict(lists=options["block_sparse_tensors"])


def query_lists(call: Call, varlen: Varlen, block_indices: Tensor) -> BlockSparseTensorsTorch:
    """Forward lists of tiles of 128 rows, with bits for each token; block_indices as for `selected_options`."""
    starts = dict(cu_seqlens=varlen.cu_seqlens, cu_seqlens_k=varlen.cu_seqlens_k, cu_lists=varlen.cu_tiles)
    sizes = dict(queries=varlen.longest, keys=varlen.longest_k, tiles=varlen.total_row_tiles)
    rows = call.q.shape[-2] // block_indices.shape[-2]
    static = dict(G=rows, cu_tiles=varlen.cu_row_tiles, **_static(call))
    counts, blocks, bits = union_lists(block_indices, **static, **sizes, **starts)
    return BlockSparseTensorsTorch(
        counts,
        blocks,
        block_size=(UNION_ROWS, UNION_BLOCK),
        cu_total_m_blocks=varlen.cu_row_tiles,
        mask_block_bits=bits,
    )


def token_block_csr(call: Call, varlen: Varlen, block_indices: Tensor) -> KeyPairs:
    """The tokens that list each block, for the kernel of dk and dv; or with Hs = Hq the heads of tokens that do."""
    (Hs, n), Hkv = block_indices.shape[-2:], call.k.shape[-2]
    count = call.q.shape[:-2].numel() * Hs * n
    longest = longest_work_tile(count, call.q.shape[-2] // Hs)
    sizes = dict(heads=Hkv, queries=call.q.shape[-3], keys=varlen.longest_k, blocks=varlen.total_key_blocks)
    starts = dict(cu_seqlens=varlen.cu_seqlens, cu_lists=varlen.cu_tiles, cu_blocks=varlen.cu_key_blocks)
    return pairs_by_block(block_indices, cap=longest, **_static(call), **sizes, **starts)


def _static(call: Call) -> dict:
    """Arguments that the kernels of unions and of the token-block CSR share."""
    spec, config = call.spec, call.config
    q_offset = call.q_offset if spec.causal else None
    return dict(block_size=config.block_size, q_tile=config.q_tile, causal=spec.causal, q_offset=q_offset)
