"""Properties of kernels, tried on a CPU with plain PyTorch in their place: right ones pass, wrong ones do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import count

import pytest
import torch

import fuzz.properties.kernels as kernels
from flash_attn.cute.lists.validate_calls import validate_call
from fuzz import oracle, strategies
from fuzz.attention import Inputs, attend, both_lists, laid_out, make_inputs, options
from fuzz.attention_lists import blocks, both_directions
from fuzz.case import Attention, Blocks
from fuzz.kinds import KINDS
from fuzz.prop import Property, properties
from fuzz.properties.lists import made_from
from fuzz.run import Budget, run_property

NAMES = [name for name in properties() if name.startswith(("attention.is", "relations"))]
Tensors = dict[str, torch.Tensor]


def plain(case: Attention, x: Inputs, *, times: int = 1) -> list[Tensors]:
    """The definition in fp32, rounded; lists and options are made as for the kernels."""
    options(case, x)
    both_lists(case, "cpu")
    got = oracle.reference(case, x, torch.float32)
    return [{name: t.float() if name == "lse" else t.to(x.q.dtype) for name, t in got.items()}] * times


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable], None]:
    def place(run: Callable) -> None:
        monkeypatch.setattr(kernels, "make_inputs", partial(make_inputs, device="cpu"))
        monkeypatch.setattr(kernels, "run", run)

    return place


@pytest.mark.parametrize("name", NAMES)
def test_right_results_pass(name: str, stand_in: Callable) -> None:
    stand_in(plain)
    prop = properties()[name]
    few_heads = [n for n, kind in enumerate(prop.kinds) if kind.Hq <= 8]  # of many, fp64 on a CPU takes half a minute
    for kind in few_heads[::18]:
        outcome = run_property(prop, Budget(examples=1, shrink=1), kind=kind)
        assert outcome.failure is None, f"{outcome.failure.case}\n{outcome.failure.trace}"


def blind_to_the_last_key(case: Attention, got: Tensors) -> Tensors:
    return got | {"dk": got["dk"].index_fill(-3, torch.tensor([got["dk"].shape[-3] - 1]), 0)}


def never_written(case: Attention, got: Tensors) -> Tensors:
    return got | {"o": got["o"].index_fill(-1, torch.tensor([3]), float("nan"))}


def drifting(case: Attention, got: Tensors) -> Tensors:
    """Every other call's results are a tenth larger than those of the call before."""
    return {name: t * (1 + 0.1 * (next(CALLS) // len(got) % 2)) for name, t in got.items()}


def leaking(case: Attention, got: Tensors) -> Tensors:
    """A compressed key is seen one query too early."""
    factor, offset = case.compress
    case = replace(case, compress=(factor, offset - 1))
    return plain(case, make_inputs(case, "cpu"))[0]


CALLS = count()
COMPRESSED = [n for n, kind in enumerate(kernels.CAUSAL) if kind.compress and not kind.deterministic]
WRONG = [
    ("attention.is its definition", 0, blind_to_the_last_key),
    ("attention.is its definition", 0, never_written),
    *((name, 0, drifting) for name in NAMES if name.startswith("relations")),
    *(("relations.causality", kind, leaking) for kind in COMPRESSED),
]


@pytest.mark.parametrize(("name", "kind", "wrong"), WRONG)
def test_wrong_results_are_noticed(name: str, kind: int, wrong: Callable, stand_in: Callable) -> None:
    stand_in(lambda case, x, times=1: [wrong(case, got) for got in plain(case, x, times=times)])
    failure = run_property(properties()[name], Budget(examples=60, shrink=0.1), kind=kind).failure
    assert failure is not None and failure.case.startswith(Attention.__name__)


@pytest.mark.parametrize("packed", [False, True])
def test_public_functions_get_what_they_take(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of kernels' arguments, for forward and backward as for the public functions."""
    from flash_attn import cute

    name = "flash_attn_varlen_func" if packed else "flash_attn_func"
    takes, given = signature(getattr(cute, name)), []
    monkeypatch.setattr(cute, name, lambda *args, **more: given.append(takes.bind(*args, **more).arguments))
    for kind in (kind for kind in KINDS if bool(kind.packed) == packed):
        sizes = dict(packed=((3, 200), (300, 4))) if packed else dict(T_q=300, T_k=200, B=2)
        case = replace(kind, **sizes, **(dict(window=(7, None)) if kind.mask == "window" else {}))
        x = make_inputs(case, "cpu")
        attend(case, x, [x.q, x.k, x.v], **both_lists(case, "cpu"))
        got = given[-1]
        assert got["window_size"] == case.window
        assert (got.get("block_sparse_tensors") is None) == (got.get("block_sparse_tensors_bwd") is None)
        assert got["deterministic"] == kind.deterministic and ("cu_seqlens_k" in got) == packed


LISTED = [number for number, kind in enumerate(KINDS) if kind.lists]


def right_lists(case: Attention) -> None:
    """Lists that kernels are given pass the check of lists: the transpose, semaphore values and plans among them."""
    case = replace(case, spare=0)  # the check refuses wider rows
    x = make_inputs(case, "cpu")
    starts = {name: value for name, value in options(case, x).items() if name.startswith("cu_seqlens")}
    validate_call(True, *both_lists(case, "cpu").values(), x.q, x.k, **starts)


@pytest.mark.parametrize("number", LISTED, ids=lambda number: repr(KINDS[number]))
def test_kernels_get_right_lists(number: int) -> None:
    size = dict(packed=((300, 200),)) if KINDS[number].packed else dict(T_q=300, T_k=200)
    right_lists(replace(KINDS[number], **size, pattern="empty"))
    prop = Property("made up", strategies.attention, right_lists, kinds=KINDS)
    failure = run_property(prop, Budget(examples=5, seconds=10, shrink=1), kind=number).failure
    assert failure is None, f"{failure.case}\n{failure.trace}"


@pytest.mark.parametrize("pattern", ["empty", "diagonal", "full"])
def test_rows_are_no_wider_than_there_are_blocks(pattern: str) -> None:
    """Kernels refuse wider ones; rows hold one place even where they list nothing."""
    for kind in (kind for kind in KINDS if kind.lists and not kind.packed):
        for T_q, T_k in ((1, 1), (300, 1), (1, 300), (300, 400)):
            case = replace(kind, T_q=T_q, T_k=T_k, pattern=pattern, shuffle=True, spare=5)
            for lists, (most, *_) in zip(both_lists(case, "cpu").values(), (blocks(case, 1), blocks(case, 0))):
                rows = (lists.mask_block_idx, lists.full_block_idx)
                assert all(1 <= x.shape[3] <= most for x in rows if x is not None)


def test_lists_made_on_a_device() -> None:
    """Lists that the GPU's are compared with: every kind, and nothing left on a device."""
    case = Blocks(M=3, N=4)
    made = made_from(*both_directions(case), case, "cpu")
    assert {name.split(",")[0] for name in made} == {"transposed", "locks", "merged", "plan", "deterministic plan"}


def test_layouts_hold_the_same_values() -> None:
    x = torch.randn(2, 5, 3, 4)
    for layout in ("heads first", "fused", "every other batch"):
        other = laid_out(x, layout)
        assert other.equal(x) and not other.is_contiguous() and other.stride(-1) == 1
    x = make_inputs(Attention(expanded="batch"), "cpu")
    assert x.q.stride(0) == x.v.stride(0) == 0
    x = make_inputs(Attention(expanded="heads"), "cpu")
    assert x.k.stride(2) == x.v.stride(2) == 0 and x.q.stride(2) > 0
