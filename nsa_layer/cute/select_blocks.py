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


def select_blocks(
    call: Call, varlen: Varlen, k_cmp: Tensor | None, lse: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The blocks listed for each token or query tile, ascending, padded with -1, their counts, and scores for a loss.

    Args:
        k_cmp: [B, Tc, Hkv, D], packed [all, Hkv, D]: by token as the compressed branch reads them; by tile in fp32,
            projected and not rounded; not read by an index.
        lse: by token fp32 [B, Hq, T], packed [Hq, total], the branch's.

    Returns:
        int32 [B, M, Hkv, n] and, where unions are not read, [B, Hkv, M]; packed without B; and for an index' loss its
        scores, fp32 like the lists, without a scale, written where blocks are not forced.
    """
    spec, config = call.spec, call.config
    options = dict(config=config, causal=spec.causal, softmax_scale=spec.softmax_scale)
    options["cu_blocks"] = varlen.cu_compressed
    if not config.by_token:
        indices, counts = block_topk(call.q, k_cmp, cu_seqlens=varlen.cu_seqlens, **options)
        return indices.transpose(-3, -2), None if reads_unions(config, call.k.shape[-1], listed=False) else counts, None
    by_token = dict(width=config.list_width(max(varlen.longest_k, call.k.shape[-3])))  # on pages or in a tensor
    if call.packed:
        by_token |= dict(cu_seqlens=varlen.cu_seqlens, max_seqlen=varlen.longest)
    if call.q_offset is not None:
        by_token |= dict(q_offset=call.q_offset, cu_seqlens_k=varlen.cu_seqlens_k, max_seqlen_k=varlen.longest_k)
    if config.rule == "index":
        lists, scores = select_by_index(
            call.q_index, call.k_index, config=config, with_scores=spec.index_loss, **by_token
        )
        return lists, None, scores
    return token_topk(call.q, k_cmp, lse, **options, **by_token), None, None
