"""Packed sequences are strangers: what the others hold, NaN and inf too, reaches no row and no gradient of a sequence.

Kernels load whole tiles, so the last one of a sequence reaches into the next. The end of the sequence bounds the loads.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from fa_compile import Worker, noted, only_hosts, swept

from fuzz.attention import NAMES, attended, backward, both_lists, forward, make_inputs, outputs
from fuzz.attention_lists import forward_lists
from fuzz.case import Attention as Case
from fuzz.kinds import PACKED as ONE_PACK
from fuzz.kinds import call
from fuzz.properties.kernels import PACKS, neighbours

PLAIN = ((300, 300), (500, 500), (77, 77), (64, 64))
# Tails of every kind, no queries, no keys, queries that see no key, and more keys than queries.
EDGES = ((1, 1), (63, 63), (0, 0), (64, 64), (65, 65), (127, 127), (128, 128), (129, 129), (0, 130), (130, 0))
EDGES += ((300, 64), (64, 257), (257, 300), (5, 700))
LISTS = dict(lists="both", list_heads=2)
HALVES = LISTS | dict(block=(128, 64))
PACKED = [
    Case(D=128, packed=PLAIN),
    Case(D=128, packed=EDGES, Hq=6, Hkv=2, causal=True, deterministic=True),
    Case(D=128, packed=EDGES, causal=True, overlap=False),
    Case(D=192, Dv=128, packed=EDGES, Hkv=4, causal=True),
    Case(D=256, packed=EDGES, causal=True, deterministic=True),
    Case(D=128, packed=EDGES, window=(511, 0), Hq=32, Hkv=4),
]
LISTED = [
    Case(D=128, packed=EDGES, form="stacked", causal=True, **LISTS),
    Case(D=128, packed=EDGES, form="compact", causal=True, **HALVES),
]
# What is only run.
WINDOW = Case(D=128, packed=EDGES, window=(100, 0), deterministic=True)
KINDS = [
    *PACKS,
    call(D=64, Hkv=1, **ONE_PACK),
    call(D=96, causal=True, deterministic=True, **ONE_PACK),
    call(D=192, Dv=128, causal=True, Hkv=4, **ONE_PACK),
    call(D=256, causal=True, deterministic=True, **ONE_PACK),
]
VALUES = (math.nan, math.inf, 3e38)


# What kernels are made of.


@contextmanager
def recorded_loads() -> Iterator[list[bool | None]]:
    """For tensors that kernels traced in the body load by TMA, whether their sequence bounds them; None for stores."""
    import cutlass.cute as cute
    from cutlass.cute.nvgpu import cpasync

    from flash_attn.cute.runtime.bounded_loads import is_bounded

    def bounded(op: Any, tensor: Any, *args: Any, **options: Any) -> bool | None:
        return is_bounded(tensor) if "G2S" in type(op).__name__ else None

    found: list[bool | None] = []
    with ExitStack() as stack:
        stack.enter_context(noted(cpasync, "make_tiled_tma_atom", bounded, found))
        for name in ("make_tiled_tma_atom_A", "make_tiled_tma_atom_B"):
            stack.enter_context(noted(cute.nvgpu, name, bounded, found))
        stack.enter_context(only_hosts())  # atoms are made where kernels are launched
        yield found


def loads(case: Case, passes: int | None = None) -> list[tuple[int, int]]:
    """(bounded, not bounded) of forward's kernel, and of backward's."""
    x = make_inputs(case)
    more = {} if passes is None else dict(block_sparse_tensors_fwd=forward_lists(case), passes=passes)
    results = []
    for kernel in (lambda: forward(case, x), lambda: backward(case, x, *outputs(case, x), **more)):
        with recorded_loads() as found:
            kernel()
        results.append((found.count(True), found.count(False)))
    return results


FORWARD = (2, 1)  # k and v; what rows of q past the end give is not stored
SM90 = {
    PACKED[0]: [FORWARD, (4, 0)],
    PACKED[1]: [(2, 0), (4, 0)],  # a tile of 128 is not so many queries for 3 heads: q without TMA
    PACKED[2]: [FORWARD, (4, 0)],
    PACKED[5]: [FORWARD, (4, 0)],
    LISTED[0]: [FORWARD, (4, 0)],
    replace(PACKED[0], packed=()): [(0, 3), (0, 4)],
}


@pytest.mark.parametrize("case", swept(SM90), ids=str)
def test_loads_of_sm90(compiler_sm90: Worker, case: Case) -> None:
    assert compiler_sm90.trace(loads, case) == SM90[case]


def test_loads_of_two_passes(compiler_sm90: Worker) -> None:
    """The dq pass bounds k and v: rows of q and do past the end make rows of dq that are not stored."""
    assert compiler_sm90.trace(loads, LISTED[1], 2) == [FORWARD, (2 + 4, 2)]


SM100 = {
    PACKED[0]: [FORWARD, (7, 0)],  # a pair of CTAs loads q, do and k transposed too
    PACKED[3]: [FORWARD, (7, 0)],
    PACKED[4]: [FORWARD, (3 + 4, 2 + 2)],  # kernels of dq, and of dk and dv: each with the rows that it sums over
    LISTED[0]: [FORWARD, (4, 0)],
    replace(PACKED[0], packed=()): [(0, 3), (0, 7)],
}


@pytest.mark.parametrize("case", swept(SM100), ids=str)
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
        _flash_attn_fwd(q, k, v, qv=qv, **starts, max_seqlen_q=queries, max_seqlen_k=600, causal=True)
    return found.count(True), found.count(False)


@pytest.mark.parametrize(
    ("heads", "queries", "one_cta", "expected"),
    [(128, 300, "0", (3, 2)), (128, 300, "1", (2, 0)), (64, 1, "1", (2, 2))],
)
def test_mla_loads(compiler_sm100: Worker, heads: int, queries: int, one_cta: str, expected: tuple[int, int]) -> None:
    """k and v, with a pair of CTAs v transposed too; not q, whose heads are rows."""
    assert compiler_sm100.trace(mla_loads, heads, queries, one_cta) == expected


# The numbers.


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_neighbours(kind: Case) -> None:
    """Each sequence gives what it does beside finite ones."""
    for seed in range(0, 3 * len(EDGES), 5):  # which sequence is looked at, and what the others hold
        window = (100, 30) if kind.mask == "window" else (None, None)
        neighbours(replace(kind, packed=EDGES, window=window, seed=seed))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [PACKED[2], WINDOW, replace(LISTED[0], form="compact"), LISTED[1]], ids=str)
def test_tokens_that_are_not_used(case: Case) -> None:
    """With seqused the end of a sequence is there: what its tensors hold past it may be anything.

    Rows of stacked lists would have capacity for the blocks in use alone; those of a case for all.
    """
    x, used = make_inputs(case), [[max(0, n - n // 3) for n in side] for side in zip(*case.packed)]
    pairs = [zip(*sides, strict=True) for sides in zip(zip(*case.packed), used)]
    kept = [torch.cat([torch.arange(T, device="cuda") < n for T, n in each]) for each in pairs]
    options = dict(zip(("seqused_q", "seqused_k"), (torch.tensor(n, dtype=torch.int32, device="cuda") for n in used)))
    case = replace(case, deterministic=True, passes=2 if case.lists else None)
    options |= both_lists(case)
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
            assert mine[rows].equal(clean[rows]), f"{name} beside {value}"
