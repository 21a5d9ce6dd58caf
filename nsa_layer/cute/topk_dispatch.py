"""Block selection on a GPU: by the top-k kernel, or in PyTorch for calls that the kernel does not take."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from nsa_layer.call_spec import CallSpec
from nsa_layer.cute.packing import Packing
from nsa_layer.kernels.block_topk import topk_kernel
from nsa_layer.select import choose_blocks

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
        indices = _by_pytorch(q, k_cmp, spec, packing)
        return indices, (indices >= 0).sum(-1, dtype=torch.int32)
    static = dict(config=spec.config, causal=spec.causal, softmax_scale=spec.softmax_scale)
    if packing is not None:
        static |= dict(cu_seqlens=packing.cu_seqlens, cu_blocks=packing.cu_blocks, lengths=spec.lengths)
    return topk_kernel.block_topk(q, k_cmp, **static)


def _by_pytorch(q: Tensor, k_cmp: Tensor, spec: CallSpec, packing: Packing | None) -> Tensor:
    config = spec.config
    static = dict(config=config, causal=spec.causal, softmax_scale=spec.softmax_scale)
    if packing is None:
        return choose_blocks(q, k_cmp, **static)
    width, token, block, parts = config.list_width(packing.longest), 0, 0, []
    for length in spec.lengths:
        blocks = config.compressed_length(length)
        if length:
            chosen = choose_blocks(q[None, token : token + length], k_cmp[None, block : block + blocks], **static)
            parts.append(pad(chosen, (0, width - chosen.shape[-1]), value=-1))
        token, block = token + length, block + blocks
    return torch.cat(parts, dim=2).squeeze(0)
