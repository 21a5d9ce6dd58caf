"""Block-sparse attention of others on the same lists: FlexAttention and cuDNN, each left out where it does not run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from sparse_variants import Inputs
from tile_lists import BLOCK, HKV, HQ, Case

Calls = dict[str, Callable[[], tuple[torch.Tensor, ...]]]


def offered(case: Case, forward: Any, tensors: Inputs) -> Iterator[tuple[str, Calls]]:
    """(name, {"forward", "backward"}) of each that runs. Lists [1, Hq, M, width] of full blocks, as many in every row.

    Results come as [B, T, H, D]: o first in forward, dq first in backward.
    """
    if forward.full_block_cnt is None or case.heads != HQ or case.kind != "random":
        raise ValueError(f"{case}: expected random full blocks, a list for each query head")
    for name, prepare in (("FlexAttention", _flex), ("cuDNN, key/value heads repeated", _cudnn)):
        try:
            calls = prepare(case, forward, tensors)
            for call in calls.values():
                call()
            torch.cuda.synchronize()
        except Exception as error:  # whatever is missing or fails there, the others are still compared
            lines = str(error).strip().splitlines() or [""]
            print(f"{name} is left out: {type(error).__name__}: {lines[0][:200]}", file=sys.stderr)
            continue
        yield name, calls


def _flex(case: Case, forward: Any, tensors: Inputs) -> Calls:
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    q, k, v, do = tensors
    N = case.T // BLOCK
    # It takes lists as wide as there are key blocks.
    wide = torch.nn.functional.pad(forward.full_block_idx, (0, N - forward.full_block_idx.shape[-1]))
    none = torch.zeros_like(forward.full_block_cnt)
    mask = BlockMask.from_kv_blocks(none, wide, forward.full_block_cnt, wide, BLOCK_SIZE=BLOCK)
    leaves = [t.detach().transpose(1, 2).requires_grad_() for t in (q, k, v)]
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend() -> torch.Tensor:
        return compiled(*leaves, block_mask=mask, enable_gqa=True)

    o = attend()

    def backward() -> tuple[torch.Tensor, ...]:
        gradients = torch.autograd.grad(o, leaves, do.transpose(1, 2), retain_graph=True)
        return tuple(g.transpose(1, 2) for g in gradients)

    return {"forward": lambda: (attend().transpose(1, 2),), "backward": backward}


def _cudnn(case: Case, forward: Any, tensors: Inputs) -> Calls:
    """Its backward wants as many key/value heads as query heads."""
    from cudnn.block_sparse_attention import block_sparse_attention_backward, block_sparse_attention_forward

    q, k, v, do = tensors
    k, v = (t.repeat_interleave(HQ // HKV, dim=2) for t in (k, v))
    options = dict(sparse_block_size=BLOCK, layout="bshd")
    lists = forward.full_block_idx.contiguous()

    def attend() -> Any:
        return block_sparse_attention_forward(q, k, v, lists, **options)

    kept = attend()
    o, lse = kept["o_tensor"], kept["lse_tensor"]

    def backward() -> tuple[torch.Tensor, ...]:
        gradients = block_sparse_attention_backward(do, q, k, v, o, lse, lists, **options)
        return tuple(gradients[name] for name in ("dq_tensor", "dk_tensor", "dv_tensor"))

    return {"forward": lambda: (attend()["o_tensor"],), "backward": backward}
