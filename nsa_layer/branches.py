"""The three attention calls, forward and backward. The only caller of the fork's kernels.

Shapes are those of one batch of equal length, [B, T, H, D]; the compressed branch and the sliding window take packed
input too, [total, H, D]. Every forward returns (o, lse), every backward (dq, dk, dv); lse is [B, Hq, T], packed
[Hq, total], natural, -inf for empty rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nsa_layer.fork import require_patched
from nsa_layer.problem import Problem
from nsa_layer.sparsity import KV_TILE, BlockLists, block_bitmap, selected_lists
from nsa_layer.support import device_arch, kernel_family

require_patched()

from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch  # noqa: E402
from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd, flash_attn_func  # noqa: E402
from nsa_layer.masks import causal_mask, selected_mask  # noqa: E402

Pair = tuple[torch.Tensor, torch.Tensor]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

BACKWARD_TILE = (128, KV_TILE)  # the same in backward: multiples of the kernels' own tiles on both architectures


def forward_tile(device: torch.device, block_size: int = KV_TILE) -> tuple[int, int]:
    """(queries, keys) of a list entry in forward.

    Blackwell's kernel works on two tiles of 128 queries at once; Hopper's takes tiles of 64 keys too.
    """
    if kernel_family(device_arch(device.index)) == 100:
        return 256, KV_TILE
    return 128, 64 if block_size == 64 else KV_TILE


@dataclass(frozen=True)
class Sparsity:
    """What makes a kernel call sparse: the mask inside tiles, the tiles, and what the mask reads."""

    mask_mod: Callable
    lists: BlockLists
    aux_tensors: tuple[torch.Tensor, ...] = ()

    def options(self) -> dict:
        """The keyword arguments that the kernels take."""
        fields = (self.lists.mask_cnt, self.lists.mask_idx, self.lists.full_cnt, self.lists.full_idx)
        tensors = BlockSparseTensorsTorch(*fields, block_size=self.lists.block_size)
        return dict(mask_mod=self.mask_mod, block_sparse_tensors=tensors, aux_tensors=list(self.aux_tensors) or None)

    def to_empty(self, device: torch.device) -> Sparsity:
        """The same shapes with nothing in them: enough to compile."""
        fields = (self.lists.mask_cnt, self.lists.mask_idx, self.lists.full_cnt, self.lists.full_idx)
        empty = [torch.empty(t.shape, dtype=t.dtype, device=device) for t in (*fields, *self.aux_tensors)]
        return Sparsity(self.mask_mod, BlockLists(*empty[:4], self.lists.block_size), tuple(empty[4:]))


def compressed_forward(
    q: torch.Tensor, k_cmp: torch.Tensor, v_cmp: torch.Tensor, *, problem: Problem, packing: dict
) -> Pair:
    """q [B, T, Hq, D] over k_cmp [B, Tc, Hkv, D], v_cmp [B, Tc, Hkv, Dv] under the compressed-causal mask.

    Args:
        packing: what `compressed_packing` gives.
    """
    if k_cmp.shape[-3] == 0:
        return _nothing_seen(q, v_cmp.shape[-1])
    return _forward(q, k_cmp, v_cmp, problem, _compressed_options(problem) | packing)


def compressed_backward(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    v_cmp: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    *,
    problem: Problem,
    packing: dict,
) -> Triple:
    """Gradients of `compressed_forward`."""
    if k_cmp.shape[-3] == 0:
        return torch.zeros_like(q), torch.zeros_like(k_cmp), torch.zeros_like(v_cmp)
    return _backward(q, k_cmp, v_cmp, o, lse, do, problem, _compressed_options(problem) | packing)


def compressed_packing(problem: Problem, cu_seqlens: torch.Tensor | None) -> dict:
    """Where the packed sequences' queries and compressed keys start, as the kernels take it; {} for a batch."""
    if problem.lengths is None:
        return {}
    keys = [problem.config.compressed_length(length) for length in problem.lengths]
    starts = torch.tensor([0, *keys]).cumsum(0).to(cu_seqlens.device, torch.int32)
    longest = dict(max_seqlen_q=max(problem.lengths), max_seqlen_k=max(keys))
    return dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=starts, **longest)


def _compressed_options(problem: Problem) -> dict:
    if not problem.causal:
        return {}
    return dict(causal=True, compress_factor=problem.config.stride, compress_offset=problem.config.offset)


def selected_sparsity(
    block_indices: torch.Tensor, T: int, Hq: int, *, problem: Problem, tile: tuple[int, int], backward: bool
) -> Sparsity:
    """How T queries see the tokens of the listed blocks; block_indices [B, Hs, M, n], tile as in `forward_tile`."""
    config, causal, Hs = problem.config, problem.causal, block_indices.shape[1]
    tile_q, kv_tile = math.lcm(config.q_tile, tile[0]), tile[1]
    lists = selected_lists(block_indices, T, config=config, causal=causal, tile_q=tile_q, kv_tile=kv_tile)
    if backward:
        lists = lists.transpose(-(-T // kv_tile))
    if Hs > 1:  # one list for all heads needs no copies, and lets the kernel pack the group
        lists = lists.expand_heads(Hq // Hs)
    if causal and tile_q == config.q_tile and config.block_size % kv_tile == 0:
        return Sparsity(causal_mask(), lists)
    bitmap = block_bitmap(block_indices, T, config=config, tile_q=tile_q)
    return Sparsity(selected_mask(config.block_size, config.q_tile, Hq // Hs, causal), lists, (bitmap,))


def selected_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, problem: Problem, sparsity: Sparsity
) -> Pair:
    """q [B, T, Hq, D] over the tokens of the listed blocks of k, v."""
    return _forward(q, k, v, problem, sparsity.options())


def selected_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    *,
    problem: Problem,
    sparsity: Sparsity,
) -> Triple:
    """Gradients of `selected_forward` for the same choice of blocks."""
    return _backward(q, k, v, o, lse, do, problem, sparsity.options())


def window_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, problem: Problem, cu_seqlens: torch.Tensor | None
) -> Pair:
    """Sliding window of ``config.window_size`` tokens; [B, T, H, D], or packed [total, H, D] with lse [Hq, total]."""
    return _forward(q, k, v, problem, _window_options(problem, cu_seqlens))


def window_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    *,
    problem: Problem,
    cu_seqlens: torch.Tensor | None,
) -> Triple:
    """Gradients of `window_forward`."""
    return _backward(q, k, v, o, lse, do, problem, _window_options(problem, cu_seqlens))


def _window_options(problem: Problem, cu_seqlens: torch.Tensor | None) -> dict:
    reach = problem.config.window_size - 1
    options: dict = dict(window_size_left=reach, window_size_right=0 if problem.causal else reach)
    if cu_seqlens is not None:
        longest = max(problem.lengths)
        options |= dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=longest, max_seqlen_k=longest)
    return options


def dense_causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The fork's dense causal attention [B, T, H, D], differentiable: what the layer is compared with."""
    o, _ = flash_attn_func(q, k, v, causal=True)
    return o


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem, options: dict) -> Pair:
    o, lse, *_ = _flash_attn_fwd(q, k, v, softmax_scale=problem.softmax_scale, return_lse=True, **options)
    return o, lse


def _backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    problem: Problem,
    options: dict,
) -> Triple:
    return _flash_attn_bwd(q, k, v, o, do, lse, softmax_scale=problem.softmax_scale, **options)


def _nothing_seen(q: torch.Tensor, Dv: int) -> Pair:
    lse = q.new_full(q.shape[:-1], float("-inf"), dtype=torch.float32)
    return q.new_zeros(*q.shape[:-1], Dv), lse.mT.contiguous()
