"""The right results of a case, dense attention under its mask in fp64, and the comparison with the kernels'."""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from fa_cases import SOFTCAP, Case, Inputs, backward, forward, make_inputs
from fa_lists import block, tables

from fuzz.attention import NAMES, Tensors, dense, spread
from fuzz.attention import assert_close as close
from fuzz.canary import Guarded
from fuzz.properties.kernels import assert_results

assert_close = partial(close, floor=1e-6)


def is_blackwell() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 10


def visible(case: Case, batch: int, x: Inputs, device: torch.device) -> torch.Tensor:
    """The keys that each query of one sequence sees, [heads or 1, queries, keys]."""
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
    offset = 0 if case.offsets is None else case.offsets[batch]
    at = q + (T_k - T_q if case.offsets is None else offset)
    left, right = case.window[0], 0 if case.causal else case.window[1]
    if left is not None:
        allowed = allowed & (kv >= at - left)
    if right is not None:
        allowed = allowed & (kv <= at + right)
    if case.compress is not None:
        factor, first_seen = case.compress
        allowed = allowed & (kv * factor + first_seen <= q + offset)
    allowed = allowed & (kv < case.used[batch])
    return allowed if allowed.ndim == 3 else allowed[None]


def reference(case: Case, x: Inputs, dtype: torch.dtype) -> Tensors:
    """`fuzz.attention.dense` of a case."""
    scores = {"score_mod": lambda s: s + s, "softcap": lambda s: SOFTCAP * (s / SOFTCAP).tanh()}
    sink = () if x.sink is None else (x.sink,)
    return dense(
        (x.q, x.k, x.v, *sink), x.do, partial(visible, case, x=x, device=x.q.device), dtype,
        lengths=case.packed or None, score=scores.get(case.option, lambda s: s),
    )  # fmt: skip


def attention(case: Case, x: Inputs, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """o, dq, dk and dv of the reference."""
    found = reference(case, x, dtype)
    return tuple(found[name] for name in NAMES)


def results(case: Case, x: Inputs) -> Tensors:
    """The kernels' results."""
    o, lse = forward(case, x)
    return dict(zip(("o", "lse", "dq", "dk", "dv", "dsink"), (o, lse, *backward(case, x, o, lse))))


def assert_case(case: Case) -> None:
    """Forward and backward on the GPU, within twice the error of plain PyTorch in the same dtype.

    Memory that the kernels get is NaN before, and guarded.
    """
    x = make_inputs(case)
    with Guarded("cuda") as guard:
        got = results(case, x)
        torch.cuda.synchronize()
    guard.check()
    assert_right(case, x, got)


def assert_right(case: Case, x: Inputs, got: Tensors) -> None:
    """`got` are the results of a case."""
    for b, used in enumerate(case.used if case.option == "seqused" else ()):
        got["dk"][b, used:] = got["dv"][b, used:] = 0  # nobody writes there
    exact, rough = (reference(case, x, dtype) for dtype in (torch.float64, torch.bfloat16))
    # What fp32 sums in different orders leave of gradients that cancel to 0: those of rows that see one key.
    floor = 2e-4 if case.compress is not None else 1e-6
    try:
        assert_results(
            got, exact, rough, partial(visible, case, x=x, device=x.q.device),
            lambda t, keys: t.split([pair[keys] for pair in case.packed]) if case.packed else t, floor=floor,
        )  # fmt: skip
    except AssertionError as error:
        raise AssertionError(f"{case!r}: {error}") from None


def assert_alike(got: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> None:
    """Up to two roundings to bf16."""
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.isfinite().all()
        apart = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()
        assert apart < 0.01, f"{apart:.2g} of the largest value"


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
