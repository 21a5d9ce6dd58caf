"""Calls of SM90's dq pass for a case: row sums from an exact reference, and how accumulators lie."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from fuzz.attention import Inputs, Tensors, backward, make_inputs, options, outputs
from fuzz.attention_lists import forward_lists
from fuzz.case import Attention as Case
from fuzz.oracle import reference

LISTED = dict(T_q=900, T_k=900, lists="both")
HALVES = dict(block=(128, 64), **LISTED)


def layout(case: Case, start: int = 64) -> Any:
    """The layout of the accumulator that other calls of backward would share."""
    from flash_attn.cute.shared_backward import AccumLayout, Tile

    tile = Tile(90, 64, 128, 1, False, False, 32, None)
    heads = (case.Hq,) if case.packed else (case.B, case.Hq)
    tokens = sum(pair[0] for pair in case.packed) if case.packed else case.T_q
    return AccumLayout(heads, tokens, len(case.packed) if case.packed else None, start, case.D, tile)


def as_rows(
    o: torch.Tensor, do: torch.Tensor, lse: torch.Tensor, lengths: Sequence[int], shape: tuple[int, ...], start: int,
    fills: tuple[float, float] = (0.0, math.inf),
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """dpsum and lse_log2 where calls of backward have them: `fills` in the rest of a tile, NaN where nothing is read.

    lengths: of packed sequences of queries, or the one that all have.
    """
    dpsum = (o.double() * do.double()).sum(-1).movedim(-1, -2)
    lse_log2 = torch.where(lse.isneginf(), 0.0, lse * math.log2(math.e))
    sums = tuple(torch.full(shape, torch.nan, device=o.device) for _ in range(2))
    for out, values, fill in zip(sums, (dpsum, lse_log2), fills):
        begin = 0
        for b, T in enumerate(lengths):
            at = (begin + b * start) // start * start
            out[..., at : at + -(-T // start) * start] = fill
            out[..., at : at + T] = values[..., begin : begin + T]
            begin += T
    return sums


def queries(case: Case) -> list[int]:
    return [T_q for T_q, _ in case.packed] or [case.T_q]


def row_sums(
    case: Case, x: Inputs, start: int, exact: Tensors | None = None, fills: tuple[float, float] = (math.nan, math.nan)
) -> tuple[torch.Tensor, torch.Tensor]:
    """dpsum and lse_log2 of the reference, or of other o and lse."""
    exact, accum = exact or reference(case, x, torch.float64), layout(case, start)
    return as_rows(exact["o"], x.do, exact["lse"], queries(case), (*accum.heads, accum.rows), start, fills)


def call(case: Case, x: Inputs, rows: tuple[torch.Tensor, torch.Tensor], lists: Any = None, **output: Any) -> None:
    """The dq pass over the case's lists, or others."""
    from flash_attn.cute.bwd_dq.interface import backward_dq

    lists, given = forward_lists(case) if lists is None else lists, options(case, x)
    given["window_size"] = given.pop("window_size_left"), given.pop("window_size_right")
    given.pop("max_seqlen_k", None)
    backward_dq(x.q, x.k, x.v, x.do, *rows, lists, **given, **output)


def compile_pass(case: Case, output: str, lists: Any = None) -> None:
    """The dq pass on tensors without memory, with an output: "dq", "accum", "add", "sums", or several; in a worker."""
    x = make_inputs(case)
    o, lse = outputs(case, x)
    rows = tuple(torch.empty(*layout(case).heads, layout(case).rows, device="cuda") for _ in range(2))
    more = {"accum": dict(accum=torch.empty(layout(case).shape, device="cuda"))}
    more |= {"add": dict(add=True), "sums": dict(out=o, lse=lse), "dq": {}}
    written = {name: value for each in output.split(", ") for name, value in more[each].items()}
    call(case, x, rows, lists, dq=torch.empty_like(x.q), **written)


def without_dq(case: Case, x: Inputs, o: Any, lse: Any, **more: Any) -> tuple[torch.Tensor | None, ...]:
    """Backward's results for the case where it leaves dq out."""
    return backward(case, x, o, lse, without_dq=True, **more)


def converted(case: Case, x: Inputs, layout: Any, *accums: torch.Tensor | None) -> list[torch.Tensor | None]:
    """dq, dk and dv that accumulators hold; None for one that is not there."""
    from flash_attn.cute.shared_backward import convert

    scale, (cu_q, cu_k) = case.D**-0.5, x.cu_seqlens or (None, None)
    to = zip(accums, (layout.dq, layout.dk, layout.dv), (x.q, x.k, x.v), (scale, scale, 1.0), (cu_q, cu_k, cu_k))
    return [
        None if accum is None else convert(accum, of, torch.full_like(t, torch.nan), scale=factor, cu_seqlens=cu)
        for accum, of, t, factor, cu in to
    ]


def rounded_sums(case: Case, x: Inputs, name: str = "dq") -> float:
    """The error of dq, or of dk, from rounding dP and dpsum to fp32.

    Both sum products of do with v. A row that sees one key has to get 0 for their difference, and gets what rounding
    leaves, while plain PyTorch, which rounds such sums to bf16 alike, may get 0.
    """
    rows, values = (float(t.double().norm(dim=-1).max()) for t in (x.do, x.v))
    other = float(x.k.abs().max()) if name == "dq" else case.Hq // case.Hkv * float(x.q.abs().max())
    return torch.finfo(torch.float32).eps * rows * values * other * case.D**-0.5
