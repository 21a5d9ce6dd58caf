"""A check of one call at a length at which no dense run and no quadratic reference can be made.

Sampled rows and keys of the call, over the whole length and at the borders where 32-bit offsets end, are compared with
the row-wise oracle in fp64. The rule is that of the tests: an error of at most twice that of a straight implementation
in the same dtype, and rounding. It holds for each sampled token on its own: the gradients of the first tokens are so
much larger than the others' that one limit for all would hide those.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch

from nsa_layer import reference
from nsa_layer.api import nsa
from nsa_layer.call import LSES, Aux, Call, accumulation_dtype
from nsa_layer.config import NSAConfig
from nsa_layer.cute.chunked import token_slices
from nsa_tools.shape import Shape
from nsa_tools.testing import row_oracle
from nsa_tools.testing.assertions import assert_sequence_choice, rounding_error

SEQUENCES = 3  # of a batch or a pack that are checked: the longest first


@dataclass(frozen=True)
class Verdict:
    """One tensor of the call on its sample.

    Attributes:
        error: the largest error of an element; inf where one is not finite.
        eager_error: the same of the straight implementation in the same dtype, on the same sample.
        of_limit: the largest error of a token over what it may be; above 1 is wrong.
        at: that token, or -1 where it is not about tokens.
        note: what is wrong, for what has no error.
    """

    name: str
    sampled: str
    error: float
    eager_error: float
    of_limit: float
    at: int = -1
    note: str = ""

    @property
    def ok(self) -> bool:
        return self.of_limit <= 1 and not self.note


@dataclass(frozen=True)
class Report:
    """The outcome for one shape; the peak of the whole call, in bytes, is None on a CPU."""

    shape: str
    backend: str
    verdicts: tuple[Verdict, ...]
    peak_bytes: int | None

    @property
    def ok(self) -> bool:
        return all(verdict.ok for verdict in self.verdicts)


@dataclass(frozen=True)
class Samples:
    """Sizes of the sample of a sequence: queries (with all their heads), keys, and tiles of queries."""

    rows: int = 128
    keys: int = 64
    tiles: int = 32


@dataclass(frozen=True)
class _Part:
    """One sequence of a call: its number, and its tokens in a tensor of the call."""

    number: int
    name: str
    T: int
    tokens: int | slice


def check(shape: Shape, backend: str, *, samples: Samples = Samples(), attend=nsa) -> Report:
    """Make one call of `nsa`, or of `attend` in its place, and judge its samples."""
    attend = partial(attend, **replace(shape, index_loss=False).options(), backend=backend)
    verdicts, _, peak = _verdicts(shape, attend, shape.inputs(), shape.output_gradient(), samples)
    return Report(shape.describe(), backend, tuple(verdicts), peak)


def forward_verdicts(
    shape: Shape, attend, inputs: dict[str, torch.Tensor], samples: Samples
) -> tuple[list[Verdict], Aux]:
    """The choice, o and the LSEs of one forward call ``attend(**inputs, return_aux=True)``, and its `Aux`."""
    return _verdicts(shape, attend, inputs, None, samples)[:2]


def _verdicts(
    shape: Shape, attend, inputs: dict[str, torch.Tensor], do: torch.Tensor | None, samples: Samples
) -> tuple[list[Verdict], Aux, int | None]:
    """Verdicts of every checked sequence, and the call's `Aux` and peak in bytes."""
    parts, found = list(_parts(shape)), []
    rows = [_sample(part.T, samples.rows, shape.Hq * shape.D, seed=2) for part in parts]
    keys = [_sample(part.T, samples.keys, shape.Hkv * shape.D, seed=3) for part in parts]
    got, aux, peak = _call(attend, inputs, do, parts, rows, keys)
    inputs = {name: x.detach() for name, x in inputs.items()}
    if inputs["q"].is_cuda:
        torch.cuda.empty_cache()  # the call's large blocks, for the oracle's small ones
    lse = torch.stack([getattr(aux, LSES[branch]) for branch in shape.config.branches], dim=-1).transpose(-3, -2)
    calls = list(Call(**inputs, block_indices=aux.block_indices, spec=shape.spec).sequences())
    by_token = dict(lse=lse) if do is None else dict(lse=lse, do=do, sums=row_sums_of(attend, inputs, do, shape.config))
    for number, part in enumerate(parts):
        index = [x.to(shape.device) for x in (rows[number], keys[number])]
        of_part = {name: x[part.tokens] for name, x in by_token.items()}
        found.append(_judge_choice(calls[part.number], part, samples.tiles))
        found += _judge(shape, part, calls[part.number], got[number], *index, **of_part)
    return found, aux, peak


def _call(attend, inputs: dict, do: torch.Tensor | None, parts: list[_Part], rows: list, keys: list) -> tuple:
    """The call's sampled results for each part by name, `Aux`, and the peak in bytes; whole gradients are let go."""
    cuda = inputs["q"].is_cuda
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    with torch.set_grad_enabled(do is not None):
        o, aux = attend(**inputs, return_aux=True)
    got = [{"o": o.detach()[part.tokens][index]} for part, index in zip(parts, rows)]
    if do is not None:
        grads = dict(zip(inputs, torch.autograd.grad(o, list(inputs.values()), do, allow_unused=True)))
        for name, index in (("q", rows), ("k", keys), ("v", keys)):
            for found, part, wanted in zip(got, parts, index):
                found[f"d{name}"] = grads[name][part.tokens][wanted]
        if "gate_weight" in grads:
            got[0]["d_gate_weight"] = grads["gate_weight"]
    return got, aux, torch.cuda.max_memory_allocated() if cuda else None


@torch.no_grad()
def row_sums_of(attend, inputs: dict[str, torch.Tensor], do: torch.Tensor, config: NSAConfig) -> torch.Tensor:
    """``do . o_i`` of every row, [B, T, Hq, branches] or [total, Hq, branches], with the o_i of the backend under test.

    One key/value head and one branch at a time, the branch that alone has a gate: no o_i is whole in memory.
    """
    q, count = inputs["q"], len(config.branches)
    Hkv, G = inputs["k"].shape[-2], q.shape[-2] // inputs["k"].shape[-2]
    sums = torch.empty(*q.shape[:-1], count, dtype=accumulation_dtype(q.dtype), device=q.device)
    for head in range(Hkv):
        heads = slice(head * G, (head + 1) * G)
        tensors = {name: x[..., head : head + 1, :].contiguous() for name, x in inputs.items() if name != "gate_weight"}
        tensors["q"] = q[..., heads, :].contiguous()
        if "k_index" in tensors and inputs["k_index"].shape[-2] == 1:
            tensors["k_index"] = inputs["k_index"]
        for i in range(count):
            gates = torch.zeros(*q.shape[:-2], G, count, dtype=q.dtype, device=q.device)
            gates[..., i] = 1
            o_i = attend(**tensors, **dict(gates=gates) if count > 1 else {})
            for total, do_part, o_part in token_slices(sums[..., heads, i, None], do[..., heads, :], o_i):
                total[..., 0] = (do_part.to(sums.dtype) * o_part).sum(-1)
    return sums


def _judge(
    shape: Shape,
    part: _Part,
    call: Call,
    got: dict[str, torch.Tensor],
    rows: torch.Tensor,
    keys: torch.Tensor,
    *,
    lse: torch.Tensor,
    do: torch.Tensor | None = None,
    sums: torch.Tensor | None = None,
) -> Iterator[Verdict]:
    """Verdicts on values; lse, do, sums: of the part, [T, Hq, ..]."""
    # Nothing finer than fp64 measures its error: it is that of fp32, scaled.
    double = shape.dtype == torch.float64
    coarse, eps = torch.float32 if double else shape.dtype, torch.finfo(shape.dtype).eps
    judge = partial(_verdict, part=part, inputs=shape.dtype, finer=2**-26 if double else 1.0)
    exact, straight = (row_oracle.rows(call, do, rows, dtype=dtype) for dtype in (torch.float64, coarse))
    judge_rows = partial(judge, at=rows, sampled=f"{len(rows) * shape.Hq:,} rows")
    yield judge_rows("o", got["o"], straight.o, exact.o)
    yield judge_rows("lse", lse[rows], straight.lse, exact.lse, is_lse=True)
    if do is None:
        return
    yield judge_rows("row sums", sums[rows], straight.row_sums, exact.row_sums, noise=eps * exact.terms.amax(1))
    yield judge_rows("dq", got["dq"], straight.dq, exact.dq, noise=eps * exact.noise.amax(1))
    of_call = dict(lse=lse, row_sums=sums)
    exact, straight = (row_oracle.keys(call, do, keys, **of_call, dtype=dtype) for dtype in (torch.float64, coarse))
    judge_keys = partial(judge, at=keys, sampled=f"{len(keys) * shape.Hkv:,} keys")
    yield judge_keys("dk", got["dk"], straight.dk, exact.dk, noise=eps * exact.noise.amax(1))
    yield judge_keys("dv", got["dv"], straight.dv, exact.dv)
    if "d_gate_weight" in got and shape.B == 1 and shape.lengths is None:  # the weight's gradient is of all sequences
        weights = (x[None] for x in (got["d_gate_weight"], straight.d_gate_weight, exact.d_gate_weight))
        yield judge("d_gate_weight", *weights, at=None, sampled="all")


def _judge_choice(call: Call, part: _Part, count: int) -> Verdict:
    M, _, n = call.block_indices.shape
    tiles = _sample(M, count, 1, seed=4).tolist()
    scores, allowed = row_oracle.choice_scores(call, tiles)
    own = reference.select_blocks(scores, config=call.config, width=n)
    given, note = call.block_indices[tiles], ""
    try:
        assert_sequence_choice("sampled tiles", given, own, scores, allowed)
    except AssertionError as error:
        note = str(error).splitlines()[0]
    differ = float((given != own).sum())
    return Verdict(f"choice{part.name}", f"{given.shape[:2].numel():,} lists", differ, 0.0, 0.0, note=note)


def _verdict(
    name: str,
    got: torch.Tensor,
    straight: torch.Tensor,
    exact: torch.Tensor,
    *,
    part: _Part,
    inputs: torch.dtype,
    finer: float,
    sampled: str,
    at: torch.Tensor | None,
    noise: torch.Tensor | float = 0.0,
    is_lse: bool = False,
) -> Verdict:
    """Tensors [tokens, ...], each token judged on its own."""
    empty, stored = exact == -torch.inf, got.dtype
    wrong = (got == -torch.inf).ne(empty) | ~got.masked_fill(empty, 0).isfinite()
    got, straight, exact = (x.double().masked_fill(empty, 0) for x in (got, straight, exact))
    error, eager = ((x - exact).abs().flatten(1).amax(1) for x in (got, straight))
    error = error.masked_fill(wrong.flatten(1).any(1), torch.inf)
    largest = exact.abs().flatten(1).amax(1)
    relative, fixed = (rounding_error(stored, inputs, x, lse=is_lse) for x in (1.0, 0.0))
    limit = 2 * eager * finer + (relative - fixed) * largest + fixed + noise
    of_limit = error / limit.clamp(min=torch.finfo(torch.float64).tiny)
    worst = int(of_limit.argmax())
    token = -1 if at is None else int(at[worst])
    largest_errors = float(error.max()), float(eager.max()) * finer
    return Verdict(name + part.name, sampled, *largest_errors, float(of_limit[worst]), token)


def _parts(shape: Shape) -> Iterator[_Part]:
    """The sequences that are checked."""
    if shape.lengths is None:
        for b in range(min(shape.B, SEQUENCES)):
            yield _Part(b, f" [{b}]" if shape.B > 1 else "", shape.T, b)
        return
    by_length = sorted(range(len(shape.lengths)), key=lambda i: -shape.lengths[i])
    ends = list(accumulate(shape.lengths))
    for i in sorted({*by_length[: SEQUENCES - 1], by_length[-1]}):
        yield _Part(i, f" [{i}]", shape.lengths[i], slice(ends[i] - shape.lengths[i], ends[i]))


def _sample(T: int, count: int, elements: int, *, seed: int) -> torch.Tensor:
    """Positions over the whole length, one drawn from each of `count` equal ranges, and borders.

    Borders are the ends, and where the offset of a token of so many elements, or its bytes, pass 2**31 and the next.
    """
    if T <= count:
        return torch.arange(T)
    drawn = torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    spread = ((torch.arange(count) + drawn) * T / count).long().clamp(max=T - 1).tolist()
    wrapped = [(1 << bits) // elements for bits in range(30, 36)]
    borders = {0, T - 1, *(token + step for token in wrapped for step in (-1, 0) if token < T)}
    # In place of the nearest drawn ones: the count stays what was asked for.
    for border in sorted(borders):
        free = [i for i, token in enumerate(spread) if token not in borders]
        if free and border not in spread:
            spread[min(free, key=lambda i: abs(spread[i] - border))] = border
    return torch.tensor(sorted(set(spread)))
