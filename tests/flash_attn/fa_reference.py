"""What the kernels have to compute: dense attention under the case's mask, in fp64, and the comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from fa_cases import Case, Inputs, backward, block, block_lists, forward, make_inputs


def is_blackwell() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 10


def visible(case: Case, batch: int, x: Inputs, device: torch.device) -> torch.Tensor:
    """Which keys each query of one sequence sees, [heads or 1, queries, keys]."""
    from fa_mask_mods import MASK_MODS

    T_q, T_k = case.lengths[batch]
    q, kv = torch.arange(T_q, device=device)[:, None], torch.arange(T_k, device=device)[None, :]
    allowed = torch.ones(T_q, T_k, dtype=torch.bool, device=device)
    modded = MASK_MODS[case.mask_mod][1](q, kv, x.aux) if case.mask_mod else allowed
    if case.lists is None:
        allowed &= modded
    else:
        lists = block_lists(case)
        partial, full = (_spread(case, lists[kind][batch], T_q, T_k).to(device) for kind in ("partial", "full"))
        allowed = (partial & modded) | full
    # Bottom-right aligned: the last query is the one that sees the last key.
    at = q + T_k - T_q
    left, right = case.window[0], 0 if case.causal else case.window[1]
    if left is not None:
        allowed = allowed & (kv >= at - left)
    if right is not None:
        allowed = allowed & (kv <= at + right)
    return allowed if allowed.ndim == 3 else allowed[None]


def _spread(case: Case, heads: list[list[list[int]]], T_q: int, T_k: int) -> torch.Tensor:
    """The lists of each head as a mask, [heads or 1, queries, keys]."""
    block_q, block_k = block(case)
    # A list that serves longer sequences too names blocks past the end of this one.
    most = max([-1, *(entry for rows in heads for row in rows for entry in row)]) + 1
    listed = torch.zeros(len(heads), len(heads[0]), max(most, -(-T_k // block_k)), dtype=torch.bool)
    for head, rows in enumerate(heads):
        for m, blocks in enumerate(rows):
            listed[head, m, blocks] = True
    seen = listed.repeat_interleave(block_q, 1)[:, :T_q].repeat_interleave(block_k, 2)[:, :, :T_k]
    return seen if len(heads) == 1 else seen.repeat_interleave(case.Hq // len(heads), 0)


def attention(
    case: Case, x: Inputs, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """o, dq, dk and dv; a row that sees nothing gives 0 and takes no gradient."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in (x.q, x.k, x.v)]
    parts = []
    for batch, (q, k, v) in enumerate(_sequences(case, leaves)):
        seen = visible(case, batch, x, q.device)
        k, v = (t.repeat_interleave(case.Hq // case.Hkv, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * case.D**-0.5
        # The softmax of bf16 scores is one in fp32, as eager attention has it. A finite floor, not
        # -inf: its softmax has gradients where a row sees nothing.
        scores = scores.to(torch.promote_types(dtype, torch.float32))
        p = (torch.where(seen, scores, -1e30).softmax(-1) * seen).to(dtype)
        parts.append(torch.einsum("hqk,khd->qhd", p, v))
    o = torch.cat(parts) if case.packed else torch.stack(parts)
    return o.detach(), *torch.autograd.grad(o, leaves, x.do.to(dtype))


def _sequences(case: Case, tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    if not case.packed:
        return [[t[batch] for t in tensors] for batch in range(case.B)]
    split = [t.split([pair[which > 0] for pair in case.packed]) for which, t in enumerate(tensors)]
    return [list(sequence) for sequence in zip(*split)]


def assert_case(case: Case) -> None:
    """Forward and backward on the GPU, within twice the error of plain PyTorch in the same dtype."""
    x = make_inputs(case)
    o, lse = forward(case, x)
    got = (o, *backward(case, x, o, lse))
    exact, plain = attention(case, x, torch.float64), attention(case, x, torch.bfloat16)
    for name, mine, true, rough in zip(("o", "dq", "dk", "dv"), got, exact, plain):
        assert_close(f"{name} of {case}", mine, true, rough)


def assert_bits_repeat(case: Case, runs: int, beside_other_work: bool = False) -> None:
    """Backward gives the same bits, `runs` times."""
    x = make_inputs(case)
    o, lse = forward(case, x)
    assert_call_repeats(lambda: backward(case, x, o, lse), runs, beside_other_work=beside_other_work)


def assert_call_repeats(
    call: Callable[[], Iterable[torch.Tensor]], runs: int, *, beside_other_work: bool = False
) -> None:
    """A call gives the same bits, `runs` times."""
    first = tuple(call())
    other, square = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    for _ in range(runs):
        if beside_other_work:
            with torch.cuda.stream(other):
                square @ square
        assert all(once.equal(again) for once, again in zip(first, call(), strict=True))


def assert_close(name: str, mine: torch.Tensor, true: torch.Tensor, rough: torch.Tensor, rounding: float = 0.0) -> None:
    """Within twice the error of `rough`, or what rounding alone can make, and a rounding."""
    assert mine.isfinite().all(), f"{name}: {int((~mine.isfinite()).sum())} values are not finite"
    error = (mine.double() - true).abs()
    limit = max(2 * float((rough.double() - true).abs().max()), rounding) + 2**-8 * float(true.abs().max()) + 1e-6
    worst = int(error.argmax())
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), error.shape))
    assert error.max() <= limit, (
        f"{name}: off by {error.max():.3e} at {at} (is {mine.flatten()[worst]:.6f}, should be "
        f"{true.flatten()[worst]:.6f}), limit {limit:.3e}"
    )
