"""Block means, their transpose, and rounded sums: plans cover every token, kernels compile, numbers are right."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from fa_compile import Worker, noted
from kernel_cases import poison

from nsa_layer.checks import starts_of_lengths
from nsa_layer.config import NSAConfig
from nsa_layer.cute.chunked import sum_rounded
from nsa_layer.eager import pooling
from nsa_layer.kernels.pooling.mean_pool import mean_pool, mean_pool_backward
from nsa_layer.kernels.pooling.tiling import SMEM_FLOATS, Pooling, plan_blocks, plan_segments

POOLINGS = [(64, 64), (64, 16), (32, 16), (16, 16), (128, 64), (7, 7), (12, 3), (96, 96), (512, 512), (64, 1), (512, 1)]


@dataclass(frozen=True)
class Case:
    """Packed lengths, or B sequences of T tokens; the last `H` heads of a tensor with `beside` more."""

    T: int = 1000
    B: int = 2
    lengths: tuple[int, ...] | None = None
    H: int = 3
    beside: int = 0
    D: int = 128
    Dv: int = 128
    pooling: tuple[int, int] = (64, 64)
    dtype: torch.dtype = torch.bfloat16
    k_dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)

    @property
    def config(self) -> NSAConfig:
        l, d = self.pooling
        return NSAConfig(block_size=l, compress_stride=d, q_tile=min(l & -l, 256))  # a power of two that divides l

    @property
    def options(self) -> dict[str, int]:
        return dict(block_size=self.pooling[0], stride=self.pooling[1])

    def shape(self, D: int, rows: int | None = None, heads: int | None = None) -> tuple[int, ...]:
        """Of a tensor of `rows`; None: as many as there are tokens."""
        lead = (self.B, self.T if rows is None else rows)
        if self.lengths is not None:
            lead = (sum(self.lengths) if rows is None else rows,)
        return (*lead, self.H if heads is None else heads, D)

    def tensor(self, D: int, dtype: torch.dtype, rows: int | None = None) -> torch.Tensor:
        wide = torch.randn(self.shape(D, rows, self.beside + self.H), device="cuda")
        return wide.to(dtype)[..., self.beside :, :]

    def starts(self) -> dict[str, torch.Tensor]:
        if self.lengths is None:
            return {}
        blocks = map(self.config.compressed_length, self.lengths)
        return dict(cu_seqlens=starts_of_lengths(self.lengths, "cuda"), cu_blocks=starts_of_lengths(blocks, "cuda"))

    @property
    def blocks(self) -> int:
        if self.lengths is None:
            return self.config.compressed_length(self.T)
        return sum(map(self.config.compressed_length, self.lengths))

    def means(self, x: torch.Tensor) -> torch.Tensor:
        """The definition, in fp64."""
        if self.lengths is None:
            return pooling.mean_pool(x.double(), config=self.config)
        parts = [pooling.mean_pool(part.double()[None], config=self.config) for part in x.split(self.lengths)]
        return torch.cat(parts, 1).squeeze(0)

    def gradients(self, d_means: torch.Tensor, D: int) -> torch.Tensor:
        """The definition's, in fp64."""
        x = torch.zeros_like(self.tensor(D, torch.float64), requires_grad=True)
        means = self.means(x)
        return torch.autograd.grad(means, x, d_means.double())[0] if means.numel() else x.detach()


CASES = [
    Case(),
    *[Case(pooling=pooling, lengths=(130, 0, 1, 700, 63, 64) if n % 2 else None) for n, pooling in enumerate(POOLINGS)],
    Case(lengths=(130, 0, 1, 700, 63, 64)),
    *[Case(T=T) for T in (1, 63, 64, 65, 128)],
    Case(lengths=(5, 0, 63)),
    Case(lengths=(0, 0, 64, 0)),
    Case(lengths=tuple(range(0, 300))),
    Case(D=64, Dv=64),
    Case(D=96, Dv=96, pooling=(32, 16)),
    Case(D=192, Dv=128, lengths=(400, 31, 500)),
    Case(D=256, Dv=80, pooling=(64, 4)),
    Case(D=128, Dv=64, pooling=(32, 16)),
    Case(D=64, Dv=128, pooling=(64, 32), lengths=(400, 31, 500)),
    Case(dtype=torch.float16, k_dtypes=(torch.float32,)),
    Case(beside=5, H=1),
    Case(beside=2, H=2, lengths=(300, 300)),
    Case(H=16, B=1, T=20000, k_dtypes=(torch.float32, torch.bfloat16)),
]
TRACED = [
    replace(case, H=2)
    for case in (
        Case(),
        Case(lengths=(100, 200)),
        Case(D=64, Dv=128, pooling=(32, 16), lengths=(100, 200), dtype=torch.float16),
        Case(D=128, Dv=64, pooling=(12, 3), k_dtypes=(torch.float32,)),
        Case(pooling=(64, 1), D=64, Dv=64),
        Case(D=192, Dv=96),
    )
]


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("pooling", [*POOLINGS, (64, 32), (1, 1), (127, 127), (1024, 16), (4096, 4096)], ids=str)
def test_every_block_of_a_tile_is_whole_segments_in_shared_memory(pooling: tuple[int, int], D: int) -> None:
    """Tokens of overlapping blocks are read little more than once."""
    l, d = pooling
    blocks = plan_blocks(Pooling(l, d), D)
    plan = plan_segments(Pooling(l, d), blocks, D)
    assert l % plan.size == 0 and (blocks == 1 or d % plan.size == 0)
    assert plan.size * plan.count == (blocks - 1) * d + l
    assert plan.count * D <= SMEM_FLOATS
    if pooling in ((64, 16), (32, 16), (64, 32), (128, 64)):
        assert (blocks - 1) * d + l <= 1.15 * blocks * d


def both(case: Case, k: torch.Tensor, v: torch.Tensor, cu: dict) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    static = dict(k_dtypes=case.k_dtypes, v_dtype=case.dtype, **cu, **case.options)
    return mean_pool(k, v, total_blocks=case.blocks if case.lengths else None, **static)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(130, 0, 1, 700, 63, 64), (0, 0, 64, 0), (64,), (5, 3), (1000, 0), (7,) * 100])
@pytest.mark.parametrize("more", [0, 1, 37, 500])
def test_means_behind_the_last_sequence_are_0(lengths: tuple[int, ...], more: int) -> None:
    """And the others what they are without more rows."""
    case = Case(lengths=lengths, pooling=(32, 16))
    k, v, known = case.tensor(case.D, case.dtype), case.tensor(case.Dv, case.dtype), case.blocks
    static = dict(k_dtypes=case.k_dtypes, v_dtype=case.dtype, **case.starts(), **case.options)
    expected, got = [], []
    for rows, means in ((known, expected), (known + more, got)):
        poison(k.device)
        k_means, v_mean = mean_pool(k, v, total_blocks=rows, **static)
        means.extend((*k_means, v_mean))
    for x, right in zip(got, expected, strict=True):
        assert torch.equal(x[:known], right) and x.shape[0] == known + more and not x[known:].any()


def one_alone(case: Case, k: torch.Tensor, v: torch.Tensor, cu: dict) -> list[torch.Tensor]:
    """Means of k alone and of v alone, then dk, dv, and what was handed over beside them."""
    nothing, v_mean = both(case, None, v, cu)
    k_means, none = both(case, k, None, cu)
    assert nothing == () and none is None
    dk, dv, *beside = (torch.full_like(x, 7) for x in (k, v, k, v))
    mean_pool_backward(k_means[0], None, dk, beside[1], **cu, **case.options)
    mean_pool_backward(None, v_mean, beside[0], dv, **cu, **case.options)
    return [*k_means, v_mean, dk, dv, *beside]


def traced(index: int) -> list[list[tuple[tuple[int, ...], torch.dtype]]]:
    """In a worker: means and gradients, of both tensors and of each alone."""
    case = TRACED[index]
    k, v = (torch.empty(case.shape(D), dtype=case.dtype, device="cuda") for D in (case.D, case.Dv))
    names = ("cu_seqlens", "cu_blocks") if case.lengths else ()
    cu = {name: torch.empty(len(case.lengths) + 1, dtype=torch.int32, device="cuda") for name in names}
    k_means, v_mean = both(case, k, v, cu)
    gradients = torch.empty_like(k), torch.empty_like(v)
    mean_pool_backward(k_means[0], v_mean, *gradients, **cu, **case.options)
    alone = one_alone(case, k, v, cu)[: len(k_means) + 3]
    return [[(tuple(x.shape), x.dtype) for x in each] for each in ((*k_means, v_mean, *gradients), alone)]


@pytest.mark.parametrize("index", range(len(TRACED)), ids=lambda i: str(TRACED[i]))
def test_kernels_are_traced(compiler: Worker, index: int) -> None:
    case = TRACED[index]
    means = [(case.shape(case.D, case.blocks), dtype) for dtype in case.k_dtypes]
    means.append((case.shape(case.Dv, case.blocks), case.dtype))
    gradients = [(case.shape(D), case.dtype) for D in (case.D, case.Dv)]
    assert compiler.trace(traced, index) == [means + gradients] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES[4:14], ids=str)
def test_one_alone_has_the_bits_that_it_has_with_the_other(case: Case) -> None:
    k, v = case.tensor(case.D, case.dtype), case.tensor(case.Dv, case.dtype)
    (k_mean, *others), v_mean = both(case, k, v, case.starts())
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    mean_pool_backward(k_mean, v_mean, dk, dv, **case.starts(), **case.options)
    expected = [k_mean, *others, v_mean, dk, dv, torch.full_like(k, 7), torch.full_like(v, 7)]
    for got, right in zip(one_alone(case, k, v, case.starts()), expected, strict=True):
        assert torch.equal(got, right)


def test_without_a_complete_block_nothing_is_launched() -> None:
    k = torch.full((2, 5, 3, 64), float("nan"), dtype=torch.bfloat16)
    (k_mean,), v_mean = mean_pool(k, k, k_dtypes=(torch.float32,), v_dtype=k.dtype, block_size=64, stride=64)
    assert k_mean.shape == v_mean.shape == (2, 0, 3, 64)
    dk, dv = k.clone(), k.clone()
    mean_pool_backward(k_mean, v_mean, dk, dv, block_size=64, stride=64)
    assert torch.equal(dk, torch.zeros_like(k)) and torch.equal(dv, torch.zeros_like(k))


def nan_filled(like: torch.Tensor) -> torch.Tensor:
    return like.fill_(float("nan"))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_means_and_gradients_are_the_definitions(case: Case) -> None:
    torch.manual_seed(0)
    k, v = case.tensor(case.D, case.dtype), case.tensor(case.Dv, case.dtype)
    sizes = [(case.D, dtype) for dtype in case.k_dtypes] + [(case.Dv, case.dtype)]
    poison = [nan_filled(case.tensor(*of, case.blocks)) for of in sizes]
    del poison
    k_means, v_mean = both(case, k, v, case.starts())
    # Products of a sum of l numbers of size one: fp32 rounding of that sum.
    torch.testing.assert_close(k_means[0].double(), case.means(k), rtol=1e-6, atol=1e-6, msg=lambda m: f"{case}: {m}")
    for other in k_means[1:]:
        assert torch.equal(other, k_means[0].to(other.dtype)), case
    half_ulp = torch.finfo(case.dtype).eps / 2
    torch.testing.assert_close(v_mean.double(), case.means(v), rtol=1.01 * half_ulp, atol=1e-6)
    assert all(means.is_contiguous() for means in (*k_means, v_mean))
    for dtype in (torch.float32, case.dtype):
        dk_cmp, dv_cmp = (case.tensor(D, dtype, case.blocks) for D in (case.D, case.Dv))
        dk, dv = nan_filled(torch.empty_like(k)), nan_filled(torch.empty_like(v))
        mean_pool_backward(dk_cmp, dv_cmp, dk, dv, **case.starts(), **case.options)
        for got, d_cmp, D in ((dk, dk_cmp, case.D), (dv, dv_cmp, case.Dv)):
            close = dict(rtol=1.01 * half_ulp, atol=1e-6, msg=lambda m: f"{case}: {m}")
            torch.testing.assert_close(got.double(), case.gradients(d_cmp, D), **close)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES[1 : 2 + len(POOLINGS)], ids=str)
def test_means_and_gradients_are_as_exact_at_the_end_of_the_range(case: Case) -> None:
    """Numbers in [1, 2) times 2**127, the last exponent that bf16 and fp32 have: sums of two are out of range."""
    large = 2.0**127
    torch.manual_seed(0)

    def tensor(dtype: torch.dtype, rows: int | None = None) -> torch.Tensor:
        like = case.tensor(case.D, torch.bfloat16, rows)
        # All of one sign in a column, or sums would cancel.
        sign = torch.where(like.flatten(0, -2)[0] > 0, 1.0, -1.0)
        return (sign * (1 + like.abs() / 8).clamp(max=1.9)).to(dtype)

    x, where = tensor(torch.bfloat16), dict(**case.starts(), **case.options)
    static = dict(k_dtypes=case.k_dtypes, v_dtype=torch.float32, total_blocks=case.blocks, **where)
    (expected, *_), _ = mean_pool(x, x, **static)
    (k_mean, k_rounded), v_mean = mean_pool(x * large, x * large, **static)
    assert torch.equal(k_mean, expected * large) and torch.equal(v_mean, k_mean)
    assert torch.equal(k_rounded, k_mean.bfloat16())
    for dtype in (torch.float32, torch.bfloat16):
        d_mean = tensor(dtype, case.blocks)
        expected, *got = (torch.empty_like(x) for _ in range(3))
        mean_pool_backward(d_mean, d_mean, expected, torch.empty_like(x), **where)
        mean_pool_backward(d_mean * large, d_mean * large, *got, **where)
        assert all(torch.equal(dx, expected * large) for dx in got)


@pytest.mark.gpu
def test_rows_past_two_gigabytes() -> None:
    """64-bit offsets: the last tokens of 2**31 elements and more."""
    T, H, D = 2**18 + 100, 70, 128
    assert T * H * D > 2**31
    x = torch.zeros(1, T, H, D, device="cuda", dtype=torch.bfloat16)
    x[:, -200:] = torch.randn(200, H, D, device="cuda", dtype=torch.bfloat16)
    static = dict(block_size=64, stride=64)
    (mean,), _ = mean_pool(x, x, k_dtypes=(torch.float32,), v_dtype=x.dtype, **static)
    tail = T // 64 * 64 - 128
    expected = x[:, tail : tail + 128].double().unflatten(1, (-1, 64)).mean(2)
    torch.testing.assert_close(mean[:, -2:].double(), expected, rtol=1e-6, atol=1e-6)
    dx = nan_filled(x)
    mean_pool_backward(mean, mean, dx, torch.empty_like(x), **static)
    torch.testing.assert_close(
        dx[:, tail : tail + 128].float(), (mean[:, -2:] / 64).repeat_interleave(64, 1), rtol=1e-2, atol=0.0
    )
    assert not dx[:, tail + 128 :].any() and not dx.isnan().any()


@dataclass(frozen=True)
class Sum:
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
    Sum(),
    Sum(parts=4, T=1, dtype=torch.float16),
    Sum(parts=5, H=3, D=64),
    Sum(parts=16, T=257, H=8, D=72),
    Sum(parts=3, T=513, H=2, D=2048),
    Sum(parts=4, T=7, H=5, heads=5, onto=True),
    Sum(parts=1),
    Sum(parts=2),
    Sum(parts=3, T=0),
]
OTHERS = [Sum(parts=17), Sum(D=65), Sum(D=2056), Sum(dtype=torch.float32)]


def launches() -> list[list[str]]:
    """Kernels of the sum of each case that is taken; in a worker."""
    from nsa_layer.kernels import rounded_sum

    assert not any(rounded_sum.can_sum([case.rows()] * case.parts, case.rows()) for case in OTHERS)
    found = []
    for case in TAKEN:
        with noted(rounded_sum, "launch", lambda name, *_: name) as names:
            sum_rounded([case.rows() for _ in range(case.parts)], case.rows(), kernels=True)
        found.append(names)
    return found


def test_kernel_adds_what_it_takes(compiler: Worker) -> None:
    assert compiler.trace(launches) == [["rounded_sum"] * bool(case.T) for case in TAKEN]


def test_rows_of_each_sequence_are_written() -> None:
    """Rows of a batch are no view of one dimension."""
    whole, parts = torch.zeros(2, 8, 3, 4, dtype=torch.bfloat16), torch.randn(3, 2, 4, 3, 4)
    sum_rounded(parts.unbind(), whole[:, 2:6])
    assert whole[:, 2:6].equal(parts.sum(0).bfloat16())
    assert not whole[:, :2].any() and not whole[:, 6:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("case", TAKEN + OTHERS, ids=str)
def test_bits_are_those_of_pytorch(case: Sum, filled: None) -> None:
    torch.manual_seed(0)
    parts = [case.rows().normal_().mul_(10.0**i) for i in range(case.parts)]
    if case.T:
        for part in parts:
            part[0, 0, :4] = torch.tensor([-0.0, torch.inf, 1e-7, torch.finfo(case.dtype).max])
    expected = torch.empty(case.T, case.H, case.D, dtype=case.dtype, device="cuda")
    sum_rounded(parts, expected)
    around = torch.full((case.T, case.heads, case.D), 7.0, dtype=case.dtype, device="cuda")
    got = parts[0] if case.onto else around[:, : case.H]
    sum_rounded(parts, got, kernels=True)
    assert torch.equal(got, expected) and torch.equal(got.signbit(), expected.signbit())
    assert (around[:, case.H :] == 7.0).all()
