"""The gate's kernels compile everywhere, and on a GPU their numbers are those of nsa_layer/eager/ and of fp64."""

# What runs in a worker is imported there, so nothing up here may ask for the kernels.
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fa_compile import Worker, shared_worker, swept
from kernel_cases import faked

from nsa_layer.checks import starts_of_lengths
from nsa_layer.eager.forward import gate_values
from nsa_layer.eager.forward import gated_sum as weighted_sum

LOG2_E = 1.4426950408889634
MODES = ["equal", "weight", "gates"]
FEWER = [(1, True), (2, True), (2, False)]  # branches with gates, and whether the last has an output


@dataclass(frozen=True)
class Case:
    """Inputs of the gate; `lengths` packs, `strided` makes every tensor a slice of a bigger one."""

    mode: str = "weight"
    B: int = 2
    T: int = 300
    Hq: int = 4
    D: int = 128
    Dv: int | None = None  # of the outputs; None: D
    dtype: torch.dtype = torch.bfloat16
    gate_dtype: torch.dtype | None = None  # of gate_weight or gates; the other tensors' unless given
    lengths: tuple[int, ...] | None = None
    strided: bool = False
    saturated: bool = False  # some gates are 0, and of a weight some 1
    window: bool = True
    branches: int = 3  # that have gates; without a window the last one has no output
    tile_m: int = 64
    seed: int = 0


@dataclass(frozen=True)
class Inputs:
    q: torch.Tensor
    outputs: tuple[torch.Tensor | None, ...]
    lses: tuple[torch.Tensor | None, ...]
    do: torch.Tensor
    gate_weight: torch.Tensor | None
    gates: torch.Tensor | None
    cu_seqlens: torch.Tensor | None


def make_inputs(case: Case, device: str = "cuda") -> Inputs:
    generator = torch.Generator("cpu").manual_seed(case.seed)
    lead = (case.B, case.T) if case.lengths is None else (sum(case.lengths),)

    def draw(shape: tuple[int, ...], dtype: torch.dtype, dim: int) -> torch.Tensor:
        """`dim` counts what a slice has less of: heads or tokens."""
        wide = list(shape)
        if case.strided:
            wide[dim] += 3
        values = torch.randn(wide, generator=generator, dtype=torch.float32).to(device, dtype)
        return values.narrow(dim, 1, shape[dim]) if case.strided else values

    def rows(D: int = case.Dv or case.D) -> torch.Tensor:
        return draw((*lead, case.Hq, D), case.dtype, -2)

    def lse() -> torch.Tensor:
        heads_first = (*lead[:-1], case.Hq, lead[-1])
        empty = draw(heads_first, torch.float32, -1) < -1.5
        return draw(heads_first, torch.float32, -1).mul_(3).masked_fill_(empty, -torch.inf)

    gate_dtype = case.gate_dtype or case.dtype
    q, do = rows(case.D), rows()
    outputs, lses = (tuple(make() for _ in range(case.branches)) for make in (rows, lse))
    weight = draw((case.Hq, case.branches, case.D), gate_dtype, 0) * case.D**-0.5 if case.mode == "weight" else None
    gates = draw((*lead, case.Hq, case.branches), gate_dtype, -1) if case.mode == "gates" else None
    if case.saturated and case.mode == "weight":
        q[..., 0, 0].fill_(10.0)
        weight[0] = 0
        weight[0, :, 0] = torch.tensor([-100.0, 0.0, 100.0])
    if case.saturated and case.mode == "gates":
        gates[..., 0, 0] = 0.0
    if not case.window:
        outputs, lses = (*outputs[:-1], None), (*lses[:-1], None)
    cu_seqlens = None if case.lengths is None else starts_of_lengths(case.lengths, device)
    return Inputs(q, outputs, lses, do, weight, gates, cu_seqlens)


def forward(x: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    from nsa_layer.kernels.gating.forward import gated_sum

    return gated_sum(x.q, *x.outputs, gate_weight=x.gate_weight, gates=x.gates)


def backward(x: Inputs, g: torch.Tensor | None, tile_m: int) -> Any:
    from nsa_layer.kernels.gating.backward import gated_sum_backward

    static = dict(gate_weight=x.gate_weight, gates=x.gates, tile_m=tile_m, cu_seqlens=x.cu_seqlens)
    return gated_sum_backward(x.do, x.outputs, x.lses, g=g, q=x.q, **static)


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return (got.double() - exact.double()).abs().max().item() if got.numel() else 0.0


def assert_close(
    case: Case, name: str, got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype
) -> None:
    assert got.shape == exact.shape and got.dtype == dtype, f"{name} of {case}: {got.shape} {got.dtype}"
    assert got.isfinite().all(), f"{name} of {case} is not finite"
    # fp32 sums of a few hundred numbers, whatever the dtype
    rounding = max(torch.finfo(dtype).eps, 4e-6) * exact.abs().max().item() + 1e-6
    allowed = 2 * error(eager, exact) + rounding
    assert error(got, exact) <= allowed, f"{name} of {case}: error {error(got, exact):.3g}, allowed {allowed:.3g}"


def in_tiles(case: Case, by_heads: torch.Tensor, fill: float) -> torch.Tensor:
    """[B, Hq, T] (packed [Hq, total]) as attention's backward has its rows: each sequence from a tile's start on."""
    m, T = case.tile_m, by_heads.shape[-1]
    if case.lengths is None:
        return torch.nn.functional.pad(by_heads, (0, -T % m), value=fill)
    total = (T + (len(case.lengths) + 1) * m - 1) // m * m
    out = by_heads.new_full((by_heads.shape[0], total), torch.nan)  # NaN: nobody's
    start = 0
    for n, length in enumerate(case.lengths):
        begin = (start + n * m) // m * m
        out[:, begin : begin + length] = by_heads[:, start : start + length]
        out[:, begin + length : begin + length + -length % m] = fill
        start += length
    return out


def assert_rows(case: Case, name: str, got: torch.Tensor, exact: torch.Tensor) -> None:
    """Anything may stand where `exact` has NaN."""
    assert got.shape == exact.shape and got.dtype == torch.float32, f"{name} of {case}: {got.shape}"
    owned = ~exact.isnan()
    got, exact = got[owned].double(), exact[owned].double()
    assert torch.equal(got.isinf(), exact.isinf()), f"{name} of {case}: other rows are infinite"
    finite = exact.isfinite()
    torch.testing.assert_close(got[finite], exact[finite], rtol=1e-5, atol=2e-5, msg=lambda m: f"{name} of {case}: {m}")


def gate_gradients(
    dg: torch.Tensor, g: torch.Tensor, q: torch.Tensor, gate_weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of ``g = sigmoid(q . gate_weight)``, of q and of the weight, in their dtypes."""
    d_logit = dg * g * (1 - g)
    dq = torch.einsum("...hi,hid->...hd", d_logit, gate_weight.to(g.dtype))
    d_weight = d_logit.unsqueeze(-1) * q.unsqueeze(-2)
    return dq.to(q.dtype), d_weight.flatten(0, -4).sum(0).to(gate_weight.dtype)


def row_sums(do: torch.Tensor, outputs: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """do . o of each branch, [..., branches]; 0 without an output."""
    return torch.stack([do.new_zeros(do.shape[:-1]) if o is None else (do * o).sum(-1) for o in outputs], -1)


def trace_all() -> None:
    """In a worker: tensors are fake."""
    for case in TRACED:
        x = faked(partial(make_inputs, case, "cpu"))
        o, g = forward(x)
        assert o.shape == x.outputs[0].shape and o.dtype == case.dtype
        assert (g is None) == (case.mode == "equal") and (g is None or g.shape == (*x.q.shape[:-1], case.branches))
        got = backward(x, g, case.tile_m)
        if not case.window:
            made = (got.dpsum, got.lse_log2, *([got.do_branches] if case.mode == "gates" else []))
            assert all(x[-1] is None for x in made)
        assert len(got.dpsum) == case.branches
        for stat in (x for x in (*got.dpsum, *got.lse_log2) if x is not None):
            assert stat.dtype == torch.float32 and stat.is_contiguous()
            assert stat.shape == in_tiles(case, torch.zeros(x.lses[0].shape), 0.0).shape


def trace_both_dimensions() -> None:
    """In a worker."""
    from nsa_layer.kernels import launch

    with patch.object(launch, "_compiled", {}):
        for Dv in (128, 96):
            x = faked(partial(make_inputs, Case(D=128, Dv=Dv), "cpu"))
            backward(x, forward(x)[1], 64)
        names = [name for name, *_ in launch._compiled]
    assert names.count("gated_sum") == names.count("gated_sum_backward") == 2, names


OTHER_DIMS = [(96, 96), (192, 128), (256, 256), (128, 96)]
TRACED = [
    Case("equal", Hq=32),
    Case("equal", D=64, lengths=(300,), Hq=3, tile_m=80),
    Case("weight", Hq=32),
    Case("weight", D=64, lengths=(100, 0, 200), Hq=64, dtype=torch.float16, gate_dtype=torch.float32, tile_m=128),
    Case("gates", lengths=(300,), Hq=6, dtype=torch.float16),
    Case("gates", D=64, gate_dtype=torch.float32, tile_m=128),
    *(Case(mode, lengths=(300,), window=False) for mode in MODES),
    *(Case(mode, Hq=16, D=D, Dv=Dv) for mode, (D, Dv) in zip(MODES, OTHER_DIMS)),
    *(Case(mode, D=64, window=window, branches=n) for mode in MODES for n, window in FEWER),
]


@pytest.mark.xdist_group("sm_100")
@pytest.mark.parametrize("arch", swept(["sm_100", "sm_90"]))
def test_kernels_are_traced(arch: str) -> None:
    shared_worker(arch).trace(trace_all)


def test_each_pair_of_dimensions_has_its_kernels(compiler: Worker) -> None:
    compiler.trace(trace_both_dimensions)


SHAPES = [
    dict(B=2, T=1, Hq=1),
    dict(B=3, T=63, Hq=3),
    dict(B=1, T=300, Hq=32),
    dict(B=2, T=257, Hq=6, strided=True),
    dict(B=1, T=5000, Hq=2),
    dict(lengths=(100, 0, 1, 64, 300, 0), Hq=4),
    dict(lengths=(0, 0, 7), Hq=16, strided=True),
    dict(lengths=(129, 128, 127) * 9, Hq=1),
    dict(B=1, T=100, Hq=4, saturated=True),
]


WAYS = [(128, torch.bfloat16, None), (64, torch.float16, None), (128, torch.float16, torch.float32)]
TILES = (64, 80, 128, 64, 128, 80, 64, 128, 64)


def every_case() -> list[Case]:
    cases = []
    for n, (mode, (shape, tile_m)) in enumerate(product(MODES, zip(SHAPES, TILES))):
        D, dtype, gate_dtype = WAYS[n % len(WAYS)]
        cases.append(Case(mode, D=D, dtype=dtype, gate_dtype=gate_dtype, tile_m=tile_m, seed=n, **shape))
    cases += [Case(mode, lengths=x, window=False) for mode, x in product(MODES, (None, (100, 0, 200)))]
    cases += [Case(mode, Hq=16, D=D, Dv=Dv) for mode, (D, Dv) in product(MODES, OTHER_DIMS)]
    return cases + [Case(mode, branches=n, window=window, strided=True) for mode in MODES for n, window in FEWER]


@pytest.mark.gpu
@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("case", every_case(), ids=str)
def test_numbers(case: Case) -> None:
    """Without a window its gates do not count, whatever they are, and have no gradient."""
    x = make_inputs(case)
    o, g = forward(x)
    got = backward(x, g, case.tile_m)
    q, do, outputs = x.q.double(), x.do.double(), [o if o is None else o.double() for o in x.outputs]
    weight = None if x.gate_weight is None else x.gate_weight.double()
    exact_g = gate_values(q, weight, None if x.gates is None else x.gates.double(), case.branches)
    delta = row_sums(do, outputs)
    eager_g = gate_values(x.q, x.gate_weight, x.gates, case.branches)
    wide = x.do.to(eager_g.dtype)
    eager_dg = row_sums(wide, x.outputs)

    exact_o = weighted_sum(exact_g, *outputs)
    assert_close(case, "o", o, weighted_sum(eager_g, *x.outputs).to(case.dtype), exact_o, case.dtype)
    assert (g is None) == (case.mode == "equal")
    if g is not None:
        assert_close(case, "g", g, eager_g, exact_g, torch.float32)
    assert (got.dq is None) == (got.d_weight is None) == (case.mode != "weight")
    assert (got.d_gates is None) == (got.do_branches is None) == (case.mode != "gates")
    if case.mode == "weight":
        eager = gate_gradients(eager_dg, eager_g, x.q, x.gate_weight)
        exact = gate_gradients(delta, exact_g, q, weight)
        assert_close(case, "dq", got.dq, eager[0], exact[0], case.dtype)
        assert_close(case, "d_weight", got.d_weight, eager[1], exact[1], x.gate_weight.dtype)
    if case.mode == "gates":
        assert_close(case, "d_gates", got.d_gates, eager_dg.to(x.gates.dtype), delta, x.gates.dtype)
    for i in range(case.branches - (not case.window)):
        sent, lowered = delta[..., i], exact_g[..., i].log()
        if case.mode == "gates":
            do_i = got.do_branches[i]
            eager_do = (eager_g[..., i : i + 1] * wide).to(case.dtype)
            assert_close(case, f"do {i}", do_i, eager_do, exact_g[..., i : i + 1] * do, case.dtype)
            sent, lowered = (do_i.double() * outputs[i]).sum(-1), 0.0
        sent = in_tiles(case, sent.mT.contiguous(), 0.0)
        assert_rows(case, f"dpsum {i}", got.dpsum[i], sent)
        lse = x.lses[i].double()
        lowered = lowered.mT if isinstance(lowered, torch.Tensor) else lowered
        lse = torch.where(lse == -torch.inf, 0.0, (lse - lowered) * LOG2_E)
        assert_rows(case, f"lse_log2 {i}", got.lse_log2[i], in_tiles(case, lse, torch.inf))
    if case.mode == "weight" and not case.window:
        x.gate_weight[:, -1] = torch.nan
        assert forward(x)[0].equal(o)
