"""Selection of blocks by the top-k kernels, by token or by tile."""

from __future__ import annotations

import torch

from nsa_layer.call import CallSpec
from nsa_layer.cute.varlen import Varlen
from nsa_layer.kernels.select_by_tile.kernel import block_topk
from nsa_layer.kernels.select_by_token.kernel import token_topk
from nsa_layer.support import reads_unions

Tensor = torch.Tensor


def select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor | None,
    *,
    spec: CallSpec,
    varlen: Varlen | None,
    S: int,
    q_offset: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The blocks listed for each token or query tile, ascending, padded with -1, and their counts.

    Args:
        q: [B, T, Hq, D], or packed [total, Hq, D].
        k_cmp: [B, Tc, Hkv, D], packed [all, Hkv, D]: by token as the compressed branch reads them; by tile in fp32,
            projected and not rounded.
        lse: by token fp32 [B, Hq, T], packed [Hq, total], the branch's.
        S: tokens that compressed keys are made of; packed of all.
        q_offset: int32 [B], packed [sequences]: position of the first query among them; None: 0, and there are T.

    Returns:
        int32 [B, M, Hkv, n] and, where unions are not read, [B, Hkv, M]; packed without B.
    """
    options = dict(config=spec.config, causal=spec.causal, softmax_scale=spec.softmax_scale)
    if varlen is not None:
        lengths = spec.lengths if spec.lengths_known else (varlen.longest,)
        options |= dict(cu_seqlens=varlen.cu_seqlens, cu_blocks=varlen.cu_compressed, lengths=lengths)
    if spec.config.by_token:
        if q_offset is not None:
            options |= dict(q_offset=q_offset, max_seqlen_k=S if varlen is None else varlen.longest_k)
            options |= {} if varlen is None else dict(cu_seqlens_k=varlen.cu_seqlens_k)
        return token_topk(q, k_cmp, lse, **options), None
    if not spec.lengths_known:
        options["tiles"] = spec.config.num_tiles(q.shape[0]) + len(varlen.cu_tiles) - 2
    indices, counts = block_topk(q, k_cmp, **options)
    return indices.transpose(-3, -2), None if reads_unions(spec.config, listed=False) else counts
