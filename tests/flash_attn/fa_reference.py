"""The comparison of attention's kernels with the right results of a case, and of calls with one another."""

from collections.abc import Callable, Iterable
from functools import partial

import torch

from fuzz import oracle
from fuzz.attention import NAMES, Inputs, Tensors, backward, forward, make_inputs
from fuzz.canary import Guarded
from fuzz.case import Attention as Case
from fuzz.oracle import assert_right, reference

assert_close = partial(oracle.assert_close, floor=1e-6)


def is_blackwell() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 10


def wide(x: torch.Tensor) -> torch.Tensor:
    """In fp32, or in fp64 as it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """o in q's dtype, log-sum-exp and probabilities of attention to all keys."""
    k_all, v_all = (wide(x).repeat_interleave(q.shape[-2] // k.shape[-2], -2) for x in (k, v))
    s = torch.einsum("...qhd,...khd->...hqk", wide(q), k_all) * q.shape[-1] ** -0.5
    p = s.softmax(-1)
    return torch.einsum("...hqk,...khd->...qhd", p, v_all).to(q.dtype), s.logsumexp(-1), p


def in_pages(x: torch.Tensor, table: torch.Tensor, page: int) -> torch.Tensor:
    """Keys or values of a batch or a pack, on the pages that a table names for each sequence."""
    pages = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -x.shape[-3] % page)).flatten(0, -3).unflatten(0, (-1, page))
    return torch.empty_like(pages).index_copy_(0, table.flatten().long(), pages)


def one_pass(case: Case, x: Inputs) -> Tensors:
    """The kernels' results, over lists in one pass."""
    o, lse = forward(case, x)
    return dict(zip((*NAMES, "dsink"), (o, lse, *backward(case, x, o, lse))))


def assert_case(case: Case) -> None:
    """Forward and backward on the GPU, within twice the error of plain PyTorch in the same dtype.

    Memory that the kernels get is NaN before, and guarded.
    """
    x = make_inputs(case)
    with Guarded("cuda"):
        got = one_pass(case, x)
    for b, used in enumerate(case.used if case.option == "seqused" else ()):
        got["dk"][b, used:] = got["dv"][b, used:] = 0  # nobody writes there
    # What fp32 sums in different orders leave of gradients that cancel to 0: those of rows that see one key.
    assert_right(case, x, got, floor=2e-4 if case.compress is not None else 1e-6)


def assert_forward(case: Case, x: Inputs, o: torch.Tensor, lse: torch.Tensor | None = None) -> None:
    """o within twice the error of plain PyTorch in the same dtype, and the log-sum-exp."""
    exact, rough = (reference(case, x, dtype) for dtype in (torch.float64, x.q.dtype))
    assert_close(f"o of {case!r}", o, exact["o"], rough["o"])
    if lse is not None:
        seen = ~lse.isneginf()
        assert seen.equal(~exact["lse"].isneginf()), f"{case!r}: lse is -inf in the wrong rows"
        torch.testing.assert_close(lse[seen].double(), exact["lse"][seen], atol=1e-3, rtol=1e-4)


def assert_alike(got: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> None:
    """Up to two roundings to bf16."""
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.isfinite().all()
        apart = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()
        assert apart < 0.01, f"{apart:.2g} of the largest value"


def assert_bits_repeat(case: Case, runs: int) -> None:
    """Backward gives the same bits, `runs` times, beside other work."""
    x = make_inputs(case)
    o, lse = forward(case, x)
    assert_call_repeats(lambda: backward(case, x, o, lse), runs)


def assert_call_repeats(call: Callable[[], Iterable[torch.Tensor]], runs: int) -> None:
    """A call gives the same bits, `runs` times, beside other work."""
    first = tuple(call())
    other, square = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    for _ in range(runs):
        with torch.cuda.stream(other):
            square @ square
        assert all(once.equal(again) for once, again in zip(first, call(), strict=True))
