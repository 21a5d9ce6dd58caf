"""Block selection on a GPU: by the top-k kernels, or in PyTorch for calls that they do not take."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import pad

from nsa_layer.call_spec import CallSpec
from nsa_layer.choose import choose_blocks, choose_blocks_by_token
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
    if not topk_kernel.takes(spec.config, q.shape[-2] // k_cmp.shape[-2]):
        indices = _by_pytorch(choose_blocks, (q, k_cmp), spec, packing)
        return indices, (indices >= 0).sum(-1, dtype=torch.int32)
    where = _starts(spec, packing)
    if packing is not None and packing.bounded:
        where["tiles"] = spec.config.num_tiles(q.shape[0]) + len(packing.cu_tiles) - 2
    return topk_kernel.block_topk(q, k_cmp, **_static(spec), **where)


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
    if not kernel.takes(spec.config, q.shape[-2] // k_cmp.shape[-2]):
        if packing is None and q_offset is not None:
            sequences = zip(*(x.split(1) for x in (q, k_cmp, lse)), q_offset.unbind(), strict=True)
            lists = [choose_blocks_by_token(*x, **_static(spec), first=first, S=S) for *x, first in sequences]
            return torch.cat(lists).transpose(-3, -2)
        return _by_pytorch(choose_blocks_by_token, (q, k_cmp, lse.mT), spec, packing, q_offset).transpose(-3, -2)
    where = _starts(spec, packing)
    if q_offset is not None:
        where |= dict(q_offset=q_offset, max_seqlen_k=S if packing is None else packing.longest_k)
        where |= {} if packing is None else dict(cu_seqlens_k=packing.cu_seqlens_k)
    return kernel.token_topk(q, k_cmp, lse, **_static(spec), **where)


def _static(spec: CallSpec) -> dict:
    return dict(config=spec.config, causal=spec.causal, softmax_scale=spec.softmax_scale)


def _starts(spec: CallSpec, packing: Packing | None) -> dict:
    if packing is None:
        return {}
    lengths = (packing.longest,) if packing.bounded else spec.lengths
    return dict(cu_seqlens=packing.cu_seqlens, cu_blocks=packing.cu_blocks, lengths=lengths)


def _by_pytorch(
    choose: Callable,
    tensors: tuple[Tensor, ...],
    spec: CallSpec,
    packing: Packing | None,
    q_offset: Tensor | None = None,
) -> Tensor:
    """Call `choose` for a batch, or for each packed sequence.

    Args:
        tensors: the arguments of `choose`, with the dimension of tokens or compressed keys first in a pack; only the
            second, k_cmp, is of the latter. A log-sum-exp is [B, T, Hq] here.
        q_offset: of packed queries apart from their keys.
    """

    def chosen(*given: Tensor, **where: object) -> Tensor:
        q, k_cmp, *lse = given
        return choose(q, k_cmp, *(x.mT for x in lse), **_static(spec), **where)

    if packing is None:
        return chosen(*tensors)
    config = spec.config
    width, token, block, parts = config.list_width(packing.longest_k), 0, 0, []
    for number, (length, S) in enumerate(zip(spec.lengths, spec.key_lengths, strict=True)):
        blocks = config.compressed_length(S)
        if length:
            rows = [
                slice(block, block + blocks) if i == 1 else slice(token, token + length) for i in range(len(tensors))
            ]
            where = {} if q_offset is None else dict(first=q_offset[number], S=S)
            part = chosen(*(x[None, at] for x, at in zip(tensors, rows)), **where)
            parts.append(pad(part, (0, width - part.shape[-1]), value=-1))
        token, block = token + length, block + blocks
    return torch.cat(parts, dim=2).squeeze(0)
