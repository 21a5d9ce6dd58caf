"""Selection of blocks by the top-k kernels, by token or by tile."""

from __future__ import annotations

import torch

from nsa_layer.call import Call
from nsa_layer.cute.varlen import Varlen
from nsa_layer.kernels.select_by_index.kernel import select_by_index
from nsa_layer.kernels.select_by_tile.kernel import block_topk
from nsa_layer.kernels.select_by_token.kernel import token_topk
from nsa_layer.support import reads_unions

Tensor = torch.Tensor


def choose_by_index(call: Call, varlen: Varlen) -> Tensor:
    """int32 [B, T, Hkv, n], packed [total, Hkv, n]: the blocks listed for each token, ascending, padded with -1."""
    packed, options = call.packed, {}
    if packed:
        options = dict(cu_seqlens=varlen.cu_seqlens, max_seqlen=varlen.longest)
    if call.q_offset is not None:
        options |= dict(q_offset=call.q_offset, max_seqlen_k=varlen.longest_k)
        options |= dict(cu_seqlens_k=varlen.cu_seqlens_k) if packed else {}
    return select_by_index(call.q_index, call.k_index, config=call.config, **options)


def select_blocks(call: Call, varlen: Varlen, k_cmp: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The blocks listed for each token or query tile, ascending, padded with -1, and their counts.

    Args:
        k_cmp: [B, Tc, Hkv, D], packed [all, Hkv, D]: by token as the compressed branch reads them; by tile in fp32,
            projected and not rounded.
        lse: by token fp32 [B, Hq, T], packed [Hq, total], the branch's.

    Returns:
        int32 [B, M, Hkv, n] and, where unions are not read, [B, Hkv, M]; packed without B.
    """
    spec, config = call.spec, call.config
    options = dict(config=config, causal=spec.causal, softmax_scale=spec.softmax_scale)
    options |= dict(cu_seqlens=varlen.cu_seqlens, cu_blocks=varlen.cu_compressed)
    options["lengths"] = spec.lengths if spec.lengths_known else (varlen.longest,)
    if config.by_token:
        if call.q_offset is not None:
            of_keys = dict(max_seqlen_k=varlen.longest_k, cu_seqlens_k=varlen.cu_seqlens_k)
            options |= dict(q_offset=call.q_offset, **of_keys)
        return token_topk(call.q, k_cmp, lse, **options), None
    if not spec.lengths_known:
        options["tiles"] = config.num_tiles(call.q.shape[0], len(varlen.cu_tiles) - 1)
    indices, counts = block_topk(call.q, k_cmp, **options)
    return indices.transpose(-3, -2), None if reads_unions(config, listed=False) else counts
