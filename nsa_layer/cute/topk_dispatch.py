"""Block selection on a GPU: by the top-k kernels, or in PyTorch for calls that they do not take."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import pad

from nsa_layer.call_spec import CallSpec
from nsa_layer.cute.packing import Packing
from nsa_layer.kernels.block_topk import topk_kernel
from nsa_layer.kernels.token_topk import kernel
from nsa_layer.select import choose_blocks, choose_blocks_by_token

Tensor = torch.Tensor


def block_topk(q: Tensor, k_cmp: Tensor, *, spec: CallSpec, packing: Packing | None) -> tuple[Tensor, Tensor]:
    """The blocks listed for each query tile, and their counts.

    Args:
        q: [B, T, Hq, D], or packed [total, Hq, D].
        k_cmp: fp32 [B, Tc, Hkv, D], packed [all, Hkv, D]: projected, not rounded.

    Returns:
        int32 [B, Hkv, M, n], ascending, padded with -1, and [B, Hkv, M]; packed [Hkv, all tiles, n], [Hkv, all tiles].
    """
    if not topk_kernel.takes(spec.config, q.shape[-2] // k_cmp.shape[-2]):
        indices = _by_pytorch(choose_blocks, (q, k_cmp), spec, packing)
        return indices, (indices >= 0).sum(-1, dtype=torch.int32)
    return topk_kernel.block_topk(q, k_cmp, **_static(spec), **_starts(spec, packing))


def token_topk(q: Tensor, k_cmp: Tensor, lse: Tensor, *, spec: CallSpec, packing: Packing | None) -> Tensor:
    """The blocks listed for each token.

    Args:
        q: [B, T, Hq, D], or packed [total, Hq, D].
        k_cmp: [B, Tc, Hkv, D], packed [all, Hkv, D], as the compressed branch reads them.
        lse: fp32 [B, Hq, T], packed [Hq, total], the branch's.

    Returns:
        int32 [B, T, Hkv, n], packed [total, Hkv, n], ascending, padded with -1.
    """
    if not kernel.takes(spec.config, q.shape[-2] // k_cmp.shape[-2]):
        return _by_pytorch(choose_blocks_by_token, (q, k_cmp, lse.mT), spec, packing).transpose(-3, -2)
    return kernel.token_topk(q, k_cmp, lse, **_static(spec), **_starts(spec, packing))


def _static(spec: CallSpec) -> dict:
    return dict(config=spec.config, causal=spec.causal, softmax_scale=spec.softmax_scale)


def _starts(spec: CallSpec, packing: Packing | None) -> dict:
    if packing is None:
        return {}
    return dict(cu_seqlens=packing.cu_seqlens, cu_blocks=packing.cu_blocks, lengths=spec.lengths)


def _by_pytorch(choose: Callable, tensors: tuple[Tensor, ...], spec: CallSpec, packing: Packing | None) -> Tensor:
    """Call `choose` for a batch, or for each packed sequence.

    Args:
        tensors: the arguments of `choose`, with the dimension of tokens or compressed keys first in a pack; only the
            second, k_cmp, is of the latter. A log-sum-exp is [B, T, Hq] here.
    """

    def chosen(*given: Tensor) -> Tensor:
        q, k_cmp, *lse = given
        return choose(q, k_cmp, *(x.mT for x in lse), **_static(spec))

    if packing is None:
        return chosen(*tensors)
    config = spec.config
    width, token, block, parts = config.list_width(packing.longest), 0, 0, []
    for length in spec.lengths:
        blocks = config.compressed_length(length)
        if length:
            rows = [
                slice(block, block + blocks) if i == 1 else slice(token, token + length) for i in range(len(tensors))
            ]
            part = chosen(*(x[None, at] for x, at in zip(tensors, rows)))
            parts.append(pad(part, (0, width - part.shape[-1]), value=-1))
        token, block = token + length, block + blocks
    return torch.cat(parts, dim=2).squeeze(0)
