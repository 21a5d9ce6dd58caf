"""Block selection by the top-k kernels."""

from __future__ import annotations

import torch

from nsa_layer.call_spec import CallSpec
from nsa_layer.cute.packing import Packing
from nsa_layer.kernels.select_by_tile import kernel as topk_kernel
from nsa_layer.kernels.select_by_token import kernel

Tensor = torch.Tensor


def block_topk(q: Tensor, k_cmp: Tensor, *, spec: CallSpec, packing: Packing | None) -> tuple[Tensor, Tensor]:
    """The blocks listed for each query tile, and their counts.

    Args:
        q: [B, T, Hq, D], or packed [total, Hq, D].
        k_cmp: fp32 [B, Tc, Hkv, D], packed [all, Hkv, D]: projected, not rounded.

    Returns:
        int32 [B, Hkv, M, n], ascending, padded with -1, and [B, Hkv, M]; packed [Hkv, all tiles, n], [Hkv, all tiles].
    """
    where = _options(spec, packing)
    if packing is not None and packing.bounded:
        where["tiles"] = spec.config.num_tiles(q.shape[0]) + len(packing.cu_tiles) - 2
    return topk_kernel.block_topk(q, k_cmp, **where)


def token_topk(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    *,
    spec: CallSpec,
    packing: Packing | None,
    S: int,
    q_offset: Tensor | None,
) -> Tensor:
    """The blocks listed for each token.

    Args:
        q: [B, T, Hq, D], or packed [total, Hq, D].
        k_cmp: [B, Tc, Hkv, D], packed [all, Hkv, D], as the compressed branch reads them.
        lse: fp32 [B, Hq, T], packed [Hq, total], the branch's.
        S: tokens that compressed keys are made of; packed of all.
        q_offset: int32 [B], packed [sequences]: position of the first query among them; None: 0, and there are T.

    Returns:
        int32 [B, T, Hkv, n], packed [total, Hkv, n], ascending, padded with -1.
    """
    where = _options(spec, packing)
    if q_offset is not None:
        where |= dict(q_offset=q_offset, max_seqlen_k=S if packing is None else packing.longest_k)
        where |= {} if packing is None else dict(cu_seqlens_k=packing.cu_seqlens_k)
    return kernel.token_topk(q, k_cmp, lse, **where)


def _options(spec: CallSpec, packing: Packing | None) -> dict:
    options = dict(config=spec.config, causal=spec.causal, softmax_scale=spec.softmax_scale)
    if packing is None:
        return options
    lengths = (packing.longest,) if packing.bounded else spec.lengths
    return options | dict(cu_seqlens=packing.cu_seqlens, cu_blocks=packing.cu_blocks, lengths=lengths)
