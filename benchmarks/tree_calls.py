"""The calls that compare_trees.py times: the layer, and lists that upstream takes too.

"layer" is gated, with tiles of 128 queries, packed if there are several sequences; "operator" has it and the default
`NSAConfig` with 32/8 and 64/4 heads; "decoding" has steps of one and of 64 sequences; "lists" has dense and
block-sparse calls that need nothing of the fork: one list of blocks of 128 for all heads, in which every block is a
mask block, a full block, or either of them, backward in one pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

HQ, HKV = 32, 8
LISTED = 128  # keys of a listed block
GROUPS = {
    "layer": ("layer",),
    "operator": ("layer", "layer, 64/4", "by token", "by token, 64/4"),
    "decoding": ("decoding 1", "decoding 64"),
    "lists": ("dense", "random, mask", "random, full", "random, both", "all causal, both"),
}
Call = Callable[[], tuple[torch.Tensor, ...]]
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """Tokens of a call of a kind, in so many sequences of one length: packed if there are more than one."""

    kind: str
    T: int
    sequences: int = 1
    D: int = 128


def calls(case: Case) -> dict[str, Call]:
    """Forward, and backward alone or with it, by whichever packages are imported."""
    torch.manual_seed(case.T)
    if case.kind in GROUPS["decoding"]:
        return decoding_calls(case)
    if case.kind in GROUPS["operator"]:
        return layer_calls(case)
    return list_calls(case)


def tensors(*lead: int, keys: int, D: int, heads: tuple[int, int] = (HQ, HKV)) -> Inputs:
    """q, k, v and the gradient of o."""
    shapes = ((*lead, heads[0]), (*lead[:-1], keys, heads[1]), (*lead[:-1], keys, heads[1]), (*lead, heads[0]))
    return tuple(torch.randn(*shape, D, device="cuda", dtype=torch.bfloat16) for shape in shapes)


def layer_calls(case: Case) -> dict[str, Call]:
    """Forward alone, and a training step's forward and backward."""
    from nsa_layer import NSAConfig, nsa

    lead = (1, case.T) if case.sequences == 1 else (case.T,)
    heads = (64, 4) if case.kind.endswith("64/4") else (HQ, HKV)
    q, k, v, do = tensors(*lead, keys=case.T, D=case.D, heads=heads)
    config = NSAConfig() if case.kind.startswith("by token") else NSAConfig(q_tile=128)
    gate_weight = torch.randn(heads[0], 3, case.D, device="cuda", dtype=torch.bfloat16) * 0.1
    leaves = [x.requires_grad_() for x in (q, k, v, gate_weight)]
    starts = None
    if case.sequences > 1:
        starts = torch.arange(case.sequences + 1, dtype=torch.int32) * (case.T // case.sequences)

    def attend() -> torch.Tensor:
        return nsa(*leaves[:3], gate_weight=leaves[3], cu_seqlens=starts, config=config)

    def forward() -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return (attend(),)

    return {"forward": forward, "forward+backward": lambda: torch.autograd.grad(attend(), leaves[:3], do)}


def decoding_calls(case: Case) -> dict[str, Call]:
    """As many steps as fill a block, each of one token for every sequence, in a CUDA graph."""
    from nsa_layer import NSAConfig, nsa_with_kvcache
    from nsa_tools.measure.decode_steps import captured_steps, make_set
    from nsa_tools.shape import Shape

    config, batch = NSAConfig(), int(case.kind.rpartition(" ")[2])
    sizes = dict(T=case.T, B=batch, Hq=HQ, Hkv=HKV, D=case.D, Dv=case.D)
    shape = Shape(**sizes, dtype=torch.bfloat16, device="cuda", config=config)
    caches = make_set(shape)
    replay = captured_steps(lambda args: nsa_with_kvcache(**args), [caches], config.block_size)

    def steps() -> tuple[torch.Tensor, ...]:
        replay()
        return (caches["k_cmp_cache"],)

    return {"steps": steps}


def attention(inputs: Inputs, forward: dict[str, Any], backward: dict[str, Any]) -> dict[str, Call]:
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    q, k, v, do = inputs
    o, lse, *_ = _flash_attn_fwd(q, k, v, return_lse=True, **forward)
    return {
        "forward": lambda: _flash_attn_fwd(q, k, v, return_lse=True, **forward)[:1],
        "backward": lambda: _flash_attn_bwd(q, k, v, o, do, lse, **backward)[:3],
    }


def list_calls(case: Case) -> dict[str, Call]:
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    options = {} if case.kind.startswith("random") else dict(causal=True)
    forward, backward = {}, {}
    if case.kind != "dense":
        mask, full = halves(case, "cuda")
        size = dict(block_size=(LISTED, LISTED))
        forward = dict(block_sparse_tensors=BlockSparseTensorsTorch(*compact(mask), *compact(full), **size))
        backward = dict(block_sparse_tensors=BlockSparseTensorsTorch(*compact(mask.T), *compact(full.T), **size))
    return attention(tensors(1, case.T, keys=case.T, D=case.D), options | forward, options | backward)


def listed_blocks(case: Case, device: str) -> torch.Tensor:
    """bool [M, N]: the blocks that are listed, 8 in a row or all causal ones."""
    M = case.T // LISTED
    m, n = torch.arange(M, device=device).view(-1, 1), torch.arange(M, device=device)
    if case.kind.startswith("all causal"):
        return n <= m
    score = torch.rand(M, M, device=device, generator=torch.Generator(device).manual_seed(case.T))
    return torch.zeros_like(score, dtype=torch.bool).scatter_(1, score.topk(min(8, M)).indices, True)


def halves(case: Case, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """bool [M, N] twice: mask blocks and full blocks."""
    listed, where = listed_blocks(case, device), case.kind.rpartition(", ")[2]
    m, n = torch.arange(len(listed), device=device).view(-1, 1), torch.arange(len(listed), device=device)
    odd = m == n if case.kind.startswith("all causal") else (m + n) % 2 == 1
    mask = {"mask": listed, "full": torch.zeros_like(listed), "both": listed & odd}[where]
    return mask, listed & ~mask


def compact(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts, int32 [1, 1, rows], and indices, int32 [1, 1, rows, columns], the listed ones first."""
    order = table.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return table.sum(1).int()[None, None], order.int()[None, None].contiguous()
