"""Sums of rows, rounded once: the kernel compiles, adds what it takes, and gives PyTorch's bits."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from fa_compile import Worker, noted

from nsa_layer.cute.chunked import sum_rounded


@dataclass(frozen=True)
class Case:
    """Parts [T, H, D] of the first H of `heads` heads; `onto`: the sum is written over the first part."""

    parts: int = 3
    T: int = 1000
    H: int = 1
    heads: int = 8
    D: int = 128
    dtype: torch.dtype = torch.bfloat16
    onto: bool = False

    def rows(self) -> torch.Tensor:
        shape, stride = (self.T, self.H, self.D), (self.heads * self.D, self.D, 1)
        return torch.empty_strided(shape, stride, dtype=self.dtype, device="cuda")


TAKEN = [
    Case(),
    Case(parts=4, T=1, dtype=torch.float16),
    Case(parts=5, H=3, D=64),
    Case(parts=16, T=257, H=8, D=72),
    Case(parts=3, T=513, H=2, D=2048),
    Case(parts=4, T=7, H=5, heads=5, onto=True),
    Case(parts=1),
    Case(parts=2),
    Case(parts=3, T=0),
]
OTHERS = [Case(parts=17), Case(D=65), Case(D=2056), Case(dtype=torch.float32)]


def launches() -> list[list[str]]:
    """Kernels of the sum of each case that is taken; in a worker."""
    from nsa_layer.kernels.pooling import rounded_sum

    assert not any(rounded_sum.takes([case.rows()] * case.parts, case.rows()) for case in OTHERS)
    found = []
    for case in TAKEN:
        with noted(rounded_sum, "launch", lambda name, *_: name) as names:
            total = sum_rounded([case.rows() for _ in range(case.parts)], case.dtype, kernels=True)
        assert total.shape == (case.T, case.H, case.D) and total.dtype == case.dtype
        found.append(names)
    return found


def test_kernel_adds_what_it_takes(compiler: Worker) -> None:
    assert compiler.trace(launches) == [["rounded_sum"] * bool(case.T) for case in TAKEN]


def test_rows_of_each_sequence_are_written() -> None:
    """Rows of a batch are no view of one dimension."""
    whole, parts = torch.zeros(2, 8, 3, 4, dtype=torch.bfloat16), torch.randn(3, 2, 4, 3, 4)
    total = sum_rounded(parts, whole.dtype, out=whole[:, 2:6])
    assert total.equal(parts.sum(0).bfloat16()) and whole[:, 2:6].equal(total)
    assert not whole[:, :2].any() and not whole[:, 6:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("case", TAKEN + OTHERS, ids=str)
def test_bits_are_those_of_pytorch(case: Case, filled: None) -> None:
    torch.manual_seed(0)
    parts = [case.rows().normal_().mul_(10.0**i) for i in range(case.parts)]
    if case.T:
        for part in parts:
            part[0, 0, :4] = torch.tensor([-0.0, torch.inf, 1e-7, torch.finfo(case.dtype).max])
    expected = sum_rounded(parts, case.dtype)
    out = parts[0] if case.onto else None
    around = torch.full((case.T, case.heads, case.D), 7.0, dtype=case.dtype, device="cuda")
    got = sum_rounded(parts, case.dtype, out=around[:, : case.H] if out is None else out, kernels=True)
    assert torch.equal(got, expected) and torch.equal(got.signbit(), expected.signbit())
    assert (around[:, case.H :] == 7.0).all()
