"""Packed sequences are strangers: what the others hold, NaN and inf too, reaches no row and no gradient of a sequence.

Kernels load whole tiles, so the last one of a sequence reaches into the next. The end of the sequence bounds the loads.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

import pytest
import torch
from fa_cases import Case, Inputs, _masks, backward, forward, in_turn, make_inputs, swept
from fa_compile import Worker
from fa_lists import backward_lists, forward_lists

PLAIN = ((300, 300), (500, 500), (77, 77), (64, 64))
# Tails of every kind, no queries, no keys, queries that see no key, and more keys than queries.
EDGES = ((1, 1), (63, 63), (0, 0), (64, 64), (65, 65), (127, 127), (128, 128), (129, 129), (0, 130), (130, 0))
EDGES += ((300, 64), (64, 257), (257, 300), (5, 700))
TOKENS = tuple((T_q, T_q) for T_q, _ in EDGES)
BLOCKS_OF_16 = tuple((T, T // 16) for T in (300, 500, 77, 15, 0, 64, 2100, 31, 16, 129))

LISTS = dict(lists="both", list_heads=2)
HALVES = LISTS | dict(block=(128, 64))
CASES = [
    Case(D=128, packed=PLAIN),
    Case(D=64, packed=PLAIN, causal=True, deterministic=True),
    Case(D=128, packed=EDGES, causal=True, deterministic=True),
    Case(D=128, packed=EDGES, Hkv=4, causal=True),
    Case(D=64, packed=EDGES, Hkv=1),
    Case(D=128, packed=EDGES, Hq=6, Hkv=2, causal=True, deterministic=True),
    Case(D=128, packed=EDGES, causal=True, overlap=False),
    Case(D=96, packed=EDGES, causal=True, deterministic=True),
    Case(D=192, Dv=128, packed=EDGES, Hkv=4, causal=True),
    Case(D=256, packed=EDGES, causal=True, deterministic=True),
    Case(D=128, packed=EDGES, window=(100, 0), deterministic=True),
    Case(D=128, packed=TOKENS, window=(511, 0), Hq=32, Hkv=4),
    Case(D=64, packed=EDGES, window=(100, 30), Hkv=4),
    Case(D=128, packed=EDGES, mask_mod="thirds", deterministic=True),
]
COMPRESSED = [
    Case(D=128, packed=BLOCKS_OF_16, causal=True),
    Case(D=64, packed=BLOCKS_OF_16, causal=True, deterministic=True),
    Case(D=128, packed=BLOCKS_OF_16, causal=True, Hq=8, Hkv=1, deterministic=True),
]
LISTED = [
    Case(D=128, packed=EDGES, form="stacked", causal=True, **LISTS),
    Case(D=64, packed=EDGES, form="padded", **LISTS),
    Case(D=128, packed=EDGES, form="shared", causal=True, lists="both"),
    Case(D=128, packed=EDGES, form="compact", window=(200, 30), **LISTS),
    Case(D=128, packed=EDGES, form="ragged", causal=True, plan=2, **LISTS),
    Case(D=128, packed=EDGES, form="compact", causal=True, **HALVES),
    Case(D=64, packed=EDGES, form="ragged", mask_mod="thirds", **HALVES),
    Case(D=96, packed=EDGES, form="stacked", **HALVES),
    Case(D=128, packed=EDGES, form="stacked", plan=3, deterministic=True, launch="right to left", **LISTS),
]
VALUES = (math.nan, math.inf, 3e38)
NAMES = ("o", "lse", "dq", "dk", "dv")


# What kernels are made of.


@contextmanager
def recorded_loads() -> Iterator[Counter[bool]]:
    """Counts of the tensors that kernels traced in the body load by TMA: bounded by their sequence, and not."""
    import cutlass.cute as cute
    from cutlass.cute.nvgpu import cpasync

    from flash_attn.cute.runtime.bounded_loads import is_bounded

    found: Counter[bool] = Counter()

    def noting(make: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(make)
        def noted(op: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if "G2S" in type(op).__name__:
                found[is_bounded(tensor)] += 1
            return make(op, tensor, *args, **kwargs)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpasync, "make_tiled_tma_atom", noting(cpasync.make_tiled_tma_atom))
        for name in ("make_tiled_tma_atom_A", "make_tiled_tma_atom_B"):
            patch.setattr(cute.nvgpu, name, noting(getattr(cute.nvgpu, name)))
        yield found


def loads(case: Case, passes: int | None = None) -> list[tuple[int, int]]:
    """(bounded, not bounded) of forward's kernel, and of backward's."""
    from flash_attn.cute import interface
    from flash_attn.cute.bwd_dq_sm90 import interface as bwd_dq_interface

    x = make_inputs(case)
    o = torch.empty_like(x.do)
    lse = o.new_empty((case.Hq, o.shape[0]) if case.packed else (case.B, case.Hq, case.T_q), dtype=torch.float32)
    more = {} if passes is None else dict(block_sparse_tensors_fwd=forward_lists(case), passes=passes)

    def derive() -> object:
        lists = backward_lists(case)
        return interface._flash_attn_bwd(
            x.q, x.k, x.v, o, x.do, lse, **_masks(case, x), block_sparse_tensors=lists, **more
        )

    results = []
    for call in (lambda: forward(case, x), derive):
        with pytest.MonkeyPatch.context() as patch, recorded_loads() as found:
            for function in (interface._flash_attn_fwd, interface._flash_attn_bwd, bwd_dq_interface._compiled):
                patch.setattr(function, "compile_cache", {})
            call()
        results.append((found[True], found[False]))
    return results


FORWARD = (2, 1)  # k and v; what rows of q past the end give is not stored
SM90 = {
    CASES[0]: [FORWARD, (4, 0)],
    CASES[5]: [(2, 0), (4, 0)],  # a tile of 128 is not so many queries for 3 heads: q without TMA
    CASES[11]: [FORWARD, (4, 0)],
    LISTED[0]: [FORWARD, (4, 0)],
    replace(CASES[0], packed=()): [(0, 3), (0, 4)],
}


@pytest.mark.parametrize("case", swept(SM90, 2), ids=str)
def test_loads_of_sm90(compiler_sm90: Worker, case: Case) -> None:
    assert compiler_sm90.trace(loads, case) == SM90[case]


def test_loads_of_two_passes(compiler_sm90: Worker) -> None:
    """The dq pass bounds k and v: rows of q and do past the end make rows of dq that are not stored."""
    assert compiler_sm90.trace(loads, LISTED[5], 2) == [FORWARD, (2 + 4, 2)]


SM100 = {
    CASES[0]: [FORWARD, (7, 0)],  # a pair of CTAs loads q, do and k transposed too
    CASES[8]: [FORWARD, (7, 0)],
    CASES[9]: [FORWARD, (3 + 4, 2 + 2)],  # kernels of dq, and of dk and dv: each with the rows that it sums over
    LISTED[0]: [FORWARD, (4, 0)],
    replace(CASES[0], packed=()): [(0, 3), (0, 7)],
}


@pytest.mark.parametrize("case", swept(SM100, 2), ids=str)
def test_loads_of_sm100(compiler_sm100: Worker, case: Case) -> None:
    assert compiler_sm100.trace(loads, case) == SM100[case]


def mla_loads(heads: int, queries: int, one_cta: str) -> tuple[int, int]:
    from flash_attn.cute.interface import _flash_attn_fwd

    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    q, qv = (tensor(2 * queries, heads, width) for width in (64, 512))
    k, v = (tensor(900, 1, width) for width in (64, 512))
    starts = {f"cu_seqlens_{side}": tensor(3, dtype=torch.int32) for side in "qk"}
    with pytest.MonkeyPatch.context() as patch, recorded_loads() as found:
        patch.setenv("FLASH_ATTENTION_MLA_1CTA", one_cta)
        patch.setattr(_flash_attn_fwd, "compile_cache", {})
        _flash_attn_fwd(q, k, v, qv=qv, **starts, max_seqlen_q=queries, max_seqlen_k=600, causal=True)
    return found[True], found[False]


@pytest.mark.parametrize(
    ("heads", "queries", "one_cta", "expected"),
    [(128, 300, "0", (3, 2)), (128, 300, "1", (2, 0)), (64, 1, "1", (2, 2))],
)
def test_loads_of_mla(
    compiler_sm100: Worker, heads: int, queries: int, one_cta: str, expected: tuple[int, int]
) -> None:
    """k and v, with a pair of CTAs v transposed too; not q, whose heads are rows."""
    assert compiler_sm100.trace(mla_loads, heads, queries, one_cta) == expected


# The numbers.


def attended(case: Case, x: Inputs, passes: int | None = None, **options: Any) -> dict[str, torch.Tensor]:
    """Output, log-sum-exp and gradients of the public function."""
    from flash_attn.cute import flash_attn_varlen_func

    given = _masks(case, x) | options
    given["window_size"] = (given.pop("window_size_left"), given.pop("window_size_right"))
    if case.lists is not None:
        of_keys = backward_lists(case)._replace(passes=passes)
        given |= dict(block_sparse_tensors=forward_lists(case), block_sparse_tensors_bwd=of_keys)
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    o, lse = flash_attn_varlen_func(*leaves, **given, deterministic=case.deterministic, return_lse=True)
    return dict(zip(NAMES, (o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, x.do)), strict=True))


def without_overlap(case: Case, x: Inputs) -> dict[str, torch.Tensor]:
    o, lse = forward(case, x)
    return dict(zip(NAMES, (o, lse, *backward(case, x, o, lse)), strict=True))


def rows_of(case: Case, side: int) -> list[slice]:
    """The tokens of each sequence: queries, or keys."""
    ends = [sum(pair[side] for pair in case.packed[:at]) for at in range(len(case.packed) + 1)]
    return [slice(begin, end) for begin, end in zip(ends, ends[1:])]


def filled(case: Case, x: Inputs, value: float, turn: int) -> Inputs:
    """Every other sequence holds nothing but `value`."""

    def fill(t: torch.Tensor, side: int) -> torch.Tensor:
        t = t.clone()
        for rows in rows_of(case, side)[turn::2]:
            t[rows] = value
        return t

    return replace(x, q=fill(x.q, 0), k=fill(x.k, 1), v=fill(x.v, 1), do=fill(x.do, 0))


def assert_isolated(case: Case, call: Callable[..., dict[str, torch.Tensor]], **options: Any) -> None:
    """Each sequence gives what it does beside finite ones: the same bits, but where the order of sums is left open."""
    x = make_inputs(case)
    expected = call(case, x, **options)
    for value in VALUES:
        for turn in (0, 1):
            got = call(case, filled(case, x, value, turn), **options)
            for name in NAMES:
                exact = case.deterministic or name in ("o", "lse")
                mine, clean = (t[name].mT if name == "lse" else t[name] for t in (got, expected))
                for at, rows in enumerate(rows_of(case, name in ("dk", "dv"))):
                    if at % 2 != turn:
                        said = f"{name} of sequence {at} {case.packed[at]} beside {value}"
                        assert_same(said, mine[rows], clean[rows], exact)
            own = [rows for at, rows in enumerate(rows_of(case, 0)) if at % 2 == turn]
            assert value == value or any(got["o"][rows].isnan().any() for rows in own), "NaN is lost where it is"


def assert_same(name: str, mine: torch.Tensor, clean: torch.Tensor, exact: bool) -> None:
    if exact:
        assert mine.equal(clean), f"{name}: {int((mine != clean).sum())} of {mine.numel()} numbers differ"
    elif mine.numel():
        apart, limit = (mine - clean).abs().max(), 2**-6 * clean.abs().max() + 1e-3
        assert apart <= limit, f"{name}: {float(apart):.3e} apart, limit {float(limit):.3e}"  # NaN is not


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_dense(case: Case) -> None:
    assert_isolated(case, attended if case.overlap is None else without_overlap)


@pytest.mark.gpu
@pytest.mark.parametrize("case", COMPRESSED, ids=str)
def test_compressed_keys(case: Case) -> None:
    assert_isolated(case, attended, compress_factor=16, compress_offset=15)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "passes"), in_turn(LISTED, 1, 2), ids=str)
def test_lists(case: Case, passes: int) -> None:
    assert_isolated(replace(case, deterministic=case.deterministic or passes == 2), attended, passes=passes)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [CASES[2], CASES[10], LISTED[0], LISTED[5]], ids=str)
def test_tokens_that_are_not_used(case: Case) -> None:
    """With seqused the end of a sequence is there: what its tensors hold past it may be anything."""
    x, used = make_inputs(case), [[max(0, n - n // 3) for n in side] for side in zip(*case.packed)]
    kept = [torch.zeros(sum(side), dtype=torch.bool, device="cuda") for side in zip(*case.packed)]
    for side in (0, 1):
        for rows, n in zip(rows_of(case, side), used[side]):
            kept[side][rows.start : rows.start + n] = True
    lengths = dict(zip(("seqused_q", "seqused_k"), (torch.tensor(n, dtype=torch.int32, device="cuda") for n in used)))
    options = lengths | ({} if case.lists is None else dict(passes=2))
    case = replace(case, deterministic=True)
    expected = attended(case, x, **options)
    for value in VALUES:
        spoilt = {
            name: getattr(x, name).masked_fill(~kept[name in "kv"][:, None, None], value)
            for name in ("q", "k", "v", "do")
        }
        got = attended(case, replace(x, **spoilt), **options)
        for name in NAMES:
            mine, clean = (t[name].mT if name == "lse" else t[name] for t in (got, expected))
            rows = kept[name in ("dk", "dv")]
            assert_same(f"{name} beside {value}", mine[rows], clean[rows], True)
