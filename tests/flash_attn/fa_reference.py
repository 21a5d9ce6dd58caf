"""What the kernels have to compute: dense attention under the case's mask, in fp64, and the comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from fa_cases import Case, Inputs, backward, forward, make_inputs
from fa_lists import block, tables

from fuzz.attention import NAMES, dense, spread
from fuzz.attention import assert_close as close

assert_close = partial(close, floor=1e-6)


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
        listed, full = (spread(t, block(case), case.Hq)[:, :T_q, :T_k].to(device) for t in tables(case)[batch])
        allowed = listed & (full | modded)
    # Bottom-right aligned: the last query is the one that sees the last key.
    at = q + T_k - T_q
    left, right = case.window[0], 0 if case.causal else case.window[1]
    if left is not None:
        allowed = allowed & (kv >= at - left)
    if right is not None:
        allowed = allowed & (kv <= at + right)
    return allowed if allowed.ndim == 3 else allowed[None]


def attention(
    case: Case, x: Inputs, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """o, dq, dk and dv; a row that sees nothing gives 0 and takes no gradient."""
    seen = partial(visible, case, x=x, device=x.q.device)
    found = dense((x.q, x.k, x.v), x.do, seen, dtype, lengths=case.packed or None)
    return tuple(found[name] for name in NAMES)


def assert_case(case: Case) -> None:
    """Forward and backward on the GPU, within twice the error of plain PyTorch in the same dtype."""
    x = make_inputs(case)
    o, lse = forward(case, x)
    got = (o, *backward(case, x, o, lse))
    exact, plain = attention(case, x, torch.float64), attention(case, x, torch.bfloat16)
    for name, mine, true, rough in zip(NAMES, got, exact, plain):
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
