"""Block-sparse backward in two passes: which calls take them, what is compiled, registers, and the gradients.

The first is the dq pass, the second backward's kernel without dq, also where its CTAs loop over a group's heads.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from fa_catalogue import PACKED, SM90, covering
from fa_compile import Worker, built_kernels, in_order, noted, refused, swept
from fa_cubin import machine_code
from fa_dq import (
    HALVES,
    LISTED,
    as_rows,
    call,
    compile_pass,
    converted,
    layout,
    queries,
    rounded_sums,
    row_sums,
    without_dq,
)
from fa_reference import assert_alike, assert_call_repeats, assert_close, reference

from fuzz.attention import Inputs, backward, forward, make_inputs, options, outputs
from fuzz.attention_lists import backward_lists, forward_lists
from fuzz.case import Attention as Case


def two_passes(case: Case) -> bool:
    """True for a case that both passes take if they are asked to."""
    queries, keys = case.block or (128, 128)
    return case.lists is not None and case.D <= 128 and case.Dv is None and not queries % 128 and keys in (64, 128)


def some(cases: list[Case], count: int) -> list[Case]:
    """So many cases without a mask_mod, and half as many with one."""
    parts = [[case for case in cases if bool(case.mask_mod) is modified] for modified in (False, True)]
    return covering(parts[0], count) + covering(parts[1], count // 2)


# Of the catalogue, and what it lacks: wide lists, queries that see no key, and head dimension 96 over such masks.
EVERY = [case for case in SM90 if two_passes(case)]
SHORT = Case(D=128, T_q=400, T_k=200, causal=True, lists="full", block=(128, 64))
CASES = some(EVERY, 16) + [
    SHORT,
    Case(D=64, Hq=2, Hkv=2, T_q=300, T_k=128 * 70, lists="both"),
    Case(D=96, causal=True, window=(200, None), **HALVES),
    Case(D=96, mask_mod="thirds", **LISTED),
]
WITHOUT_DQ = some(EVERY, 8)
PLAIN = Case(D=128, causal=True, **LISTED)
BY_GROUP = Case(D=128, causal=True, Hq=8, list_heads=2, **HALVES)
KEYED = Case(D=96, mask_mod="keyed", list_heads=4, **LISTED)
ONE_HEAD = Case(D=128, causal=True, Hkv=1, plan=3, **HALVES)
STACKED = Case(D=128, causal=True, form="stacked", **PACKED)
RAGGED = Case(D=128, causal=True, form="ragged", **PACKED)
PLANNED_PACK = replace(RAGGED, list_heads=2, plan=2, block=(128, 64))
PADDED = Case(D=64, mask_mod="thirds", form="padded", block=(128, 64), **PACKED)
SHARED = Case(D=64, causal=True, form="shared", **PACKED)
# Where CTAs of the kernel without dq loop over a group's heads: by its own choice, or by a plan.
BY_CHOICE = some([case for case in EVERY if not case.plan and case.list_heads < case.Hq > case.Hkv], 6)
PLANNED = [
    Case(D=128, causal=True, plan=2, per_group=True, **LISTED),
    Case(D=128, mask_mod="thirds", block=(128, 64), Hq=6, list_heads=2, plan=3, per_group=True, **LISTED),
    replace(RAGGED, Hkv=1, plan=2, per_group=True),
    Case(D=64, mask_mod="keyed", form="compact", plan=100, per_group=True, **PACKED),
]


def gradients(case: Case, x: Inputs, o: torch.Tensor, lse: torch.Tensor, **more: Any) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv with the lists of both directions; in two passes unless `more` says otherwise."""
    return backward(case, x, o, lse, **dict(block_sparse_tensors_fwd=forward_lists(case), passes=2) | more)


# Which calls take two passes.


def tables(
    block: tuple[int, int] | None = (128, 128),
    capacity: tuple[int, ...] = (9,),
    rows: tuple[int, int, int] = (1, 1, 4),
    **fields: Any,
) -> Any:
    """Lists that have shapes; capacity: of a row of mask lists, and of full ones."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    lists = [torch.empty(*rows, *n, dtype=torch.int32, device="meta") for width in capacity for n in ((), (width,))]
    return BlockSparseTensorsTorch(*lists, block_size=block, **fields)


def takes(passes: int | None = None, **changes: Any) -> bool:
    """True if a call on SM90 takes two passes: at head dimension 128, with default lists, and `changes`."""
    from flash_attn.cute.bwd_sm90 import two_pass

    block, D = changes.pop("block", (128, 128)), changes.pop("D", 128)
    of_keys = changes.pop("block_of_backward", block)
    x = torch.empty(1, 512, 4, D, dtype=changes.pop("dtype", torch.bfloat16), device="meta")
    forward, backward = tables(block, changes.pop("capacity", (9,))), tables(of_keys, **changes.pop("fields", {}))
    given = dict(arch=90, q=x, v=x, deterministic=False, forward=forward, backward=backward)
    return two_pass.use_split_dq(passes, **(given | changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),  # wide blocks are faster in one pass
        ({"passes": 2}, True),
        ({"deterministic": True}, True),
        ({"deterministic": True, "passes": 1}, False),
        ({"block": (128, 64)}, True),
        ({"block": (256, 64), "D": 64}, True),
        ({"block": (128, 64), "D": 96, "dtype": torch.float16}, True),
        ({"block": (128, 64), "arch": 100}, False),
        ({"block": (128, 64), "forward": None}, False),
        ({"block": (64, 64)}, False),  # tiles of pass 2 have 128 queries
        ({"block": (128, 64), "D": 256}, False),
        ({"block": (128, 64), "score_mod": abs}, False),
        ({"deterministic": True, "score_mod": None}, True),
        ({"deterministic": True, "block": None}, True),
        ({"deterministic": True, "block": None, "D": 64}, False),  # forward may have tiles of 192
        ({"capacity": (8,)}, True),
        ({"capacity": (300,)}, False),
        ({"capacity": (1, 7)}, True),
        ({"capacity": (1, 8)}, False),  # mask and full blocks together
        ({"capacity": (8,), "fields": {"capacity": (50, 50)}}, True),  # rows of keys may be as long as they like
        ({"capacity": (8,), "fields": {"plan": torch.zeros(1, 6)}}, True),
        ({"capacity": (8,), "passes": 1}, False),
        ({"capacity": (8,), "arch": 100}, False),
        ({"capacity": (8,), "D": 256}, False),
        ({"capacity": (8,), "score_mod": abs}, False),
        ({"fields": {"passes": 2}}, True),  # as the lists say
        ({"fields": {"passes": 1}, "deterministic": True}, False),
        ({"fields": {"passes": 1}, "block": (128, 64)}, False),
        ({"fields": {"passes": 1}, "passes": 2}, True),  # the call knows better
        ({"fields": {"passes": 2}, "passes": 1}, False),
        ({"fields": {"plan_per_group": True}}, True),
    ],
    ids=str,
)
def test_which_calls_take_two_passes(changes: dict[str, Any], expected: bool) -> None:
    assert takes(**changes) is expected


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"fields": {"passes": 3}}, ValueError, "passes is 3"),
        ({"fields": {"passes": 2}, "score_mod": abs}, ValueError, "score_mod cannot be given together with passes=2"),
        ({"fields": {"passes": 2}, "arch": 100}, NotImplementedError, "sm_100"),
        ({"passes": 2, "shared": ()}, ValueError, "shared cannot be given together with passes=2"),
        ({"passes": 2, "arch": 100}, NotImplementedError, "sm_100"),
        ({"passes": 2, "D": 256}, NotImplementedError, "head dimensions 256"),
        ({"passes": 2, "block": None, "D": 64}, NotImplementedError, "without block_size"),
        ({"passes": 2, "block_of_backward": (192, 96)}, NotImplementedError, r"blocks \(192, 96\)"),
    ],
    ids=str,
)
def test_two_passes_that_cannot_be_are_refused(changes: dict[str, Any], kind: type, said: str) -> None:
    with pytest.raises(kind, match=said):
        takes(**changes)


def test_rows_without_a_capacity_are_not_few() -> None:
    """The device alone knows how many blocks the rows list: stacked and ragged rows, and lists without tensors."""
    wide, compact = tables(), tables(capacity=(8,))
    assert not takes(forward=wide._replace(mask_block_idx=torch.zeros(1, dtype=torch.int32)))
    assert not takes(forward=wide._replace(mask_block_cnt=None, mask_block_idx=None))
    assert takes(forward=compact._replace(mask_block_cnt=compact[0][0], mask_block_idx=compact[1][0]))
    assert not takes(forward=compact._replace(mask_block_cnt=compact[0][0], mask_block_idx=compact[1][0, :, 0]))


# What is compiled.


def compiled(case: Case) -> tuple[list[str], list[tuple[int, ...]]]:
    """The kernels that a deterministic call asks for, in turn, and the shapes of fp32 tensors that it makes."""
    from torch.utils._python_dispatch import TorchDispatchMode

    shapes = []

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
                shapes.append(tuple(out.shape))
            return out

    x = make_inputs(case)
    o, lse = outputs(case, x)
    with built_kernels() as kernels, Made():
        dq, dk, dv = gradients(case, x, o, lse, deterministic=True, passes=None)
    assert (dq.shape, dk.shape, dv.shape) == (x.q.shape, x.k.shape, x.v.shape) and dq.dtype == x.q.dtype
    without = {True: "", False: " without dq"}
    return [type(kernel).__name__ + without[getattr(kernel, "computes_dq", True)] for kernel in kernels], shapes


@pytest.mark.parametrize(
    "case", [ONE_HEAD, STACKED, replace(STACKED, plan=3, deterministic=True, launch="right to left")], ids=str
)
def test_two_kernels_are_compiled(compiler_sm90: Worker, case: Case) -> None:
    """Deterministic by default, without an order of adds to dq; nothing in fp32 is as large as dq."""
    names, shapes = compiler_sm90.trace(compiled, case)
    assert names[:2] == ["FlashAttentionBackwardDqSm90", "FlashAttentionBackwardSm90 without dq"]
    assert not any("Preprocess" in name for name in names)
    tokens = sum(pair[0] for pair in case.packed) or case.T_q
    assert all(shape[-2:-1] != (case.Hq,) or shape[-1] < tokens * case.D for shape in shapes)


def rows_of_layout(case: Case, without_dq: bool) -> Any:
    """The layout of a call's accumulators, and that of a window call without lists."""
    from flash_attn.cute.shared_backward import aligned, backward_layout

    x = make_inputs(case)
    masks = options(case, x)
    lengths = {name: masks[name] for name in masks if "seqlen" in name}
    own = backward_layout(x.q, x.k, x.v, **masks, block_sparse_tensors=backward_lists(case), without_dq=without_dq)
    window = backward_layout(x.q, x.k, x.v, window_size_left=100, window_size_right=0, **lengths)
    return own, aligned(own, window)


@pytest.mark.parametrize("case", [replace(SHORT, Hkv=4), replace(BY_GROUP, D=64), PADDED, SHARED], ids=str)
def test_rows_serve_both_passes(compiler_sm90: Worker, case: Case) -> None:
    own, both = compiler_sm90.trace(rows_of_layout, case, True)
    assert own.dq.tile.pattern == "rows of 64" and own.dq.start == 64 and own.dq.width == case.D
    assert both[0].dq.layout_key == both[1].dq.layout_key and both[0].dq.start % 64 == 0
    assert (own.dk is None) == (case.Hq == case.Hkv)


NO_FULL = replace(BY_GROUP, lists="no full")
SPILLS = [
    (NO_FULL, "dq"),
    (NO_FULL, "add"),
    (Case(D=128, window=(100, 30), mask_mod="keyed", **HALVES), "accum"),
    (STACKED, "dq"),
    (NO_FULL, "accum, add"),
    (NO_FULL, "accum, sums"),
    (Case(D=128, form="compact", causal=True, **PACKED), "accum, sums"),
    (Case(D=96, **LISTED), "dq"),
    (Case(D=96, mask_mod="thirds", **LISTED), "accum"),
    (Case(D=64, causal=True, mask_mod="thirds", form="stacked", **PACKED), "accum"),
]


@pytest.mark.parametrize("spilled", swept(SPILLS, 5), ids=str)
def test_registers_suffice(spilled: tuple[Case, str], compiler_sm90: Worker) -> None:
    assert [code.stack for code in compiler_sm90.run(machine_code, compile_pass, *spilled)] == [[0]]


@pytest.mark.parametrize(("D", "Dv", "said"), [(80, None, "dimensions 80 and 80"), (128, 64, "dimensions 128 and 64")])
def test_head_dimensions_are_refused_by_name(D: int, Dv: int | None, said: str, compiler_sm90: Worker) -> None:
    """Beside what the catalogue of wrong calls has."""
    with refused(said):
        compiler_sm90.trace(compile_pass, Case(D=D, Dv=Dv, lists="full"), "dq")


def test_blackwell_is_refused(compiler_sm100: Worker) -> None:
    with refused("sm_100: the dq pass is for sm_90, and for sm_100 over lists with mask_block_bits"):
        compiler_sm100.trace(compile_pass, Case(D=128, lists="full"), "dq")


def compiled_roles(case: Case, deterministic: bool) -> tuple[set[str], int]:
    """The warp roles that the kernel without dq was traced with, and bytes of its shared memory."""
    from contextlib import ExitStack

    from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90 as Kernel

    x, roles = make_inputs(case), []
    storage = Kernel._get_shared_storage_cls
    with (
        ExitStack() as stack,
        noted(Kernel, "_get_shared_storage_cls", lambda kernel: storage(kernel).size_in_bytes()) as sizes,
    ):
        for name in ("load", "mma", "dQaccum_store"):
            stack.enter_context(noted(Kernel, name, lambda *args, name=name, **options: name, roles))
        dq, dk, dv = without_dq(case, x, *outputs(case, x), deterministic=deterministic)
    assert dq is None and dk.shape == x.k.shape and dv.shape == x.v.shape
    return set(roles), sizes[0]


@pytest.mark.parametrize("of", swept(in_order(WITHOUT_DQ, False, True), 4), ids=str)
def test_nothing_of_dq_is_compiled(compiler_sm90: Worker, of: tuple[Case, bool]) -> None:
    case, deterministic = of
    roles, size = compiler_sm90.trace(compiled_roles, case, deterministic)
    assert roles >= {"load", "mma"} and "dQaccum_store" not in roles
    # Keys, values, and two stages of queries and their gradients; two CTAs share 227 KiB.
    two_ctas = case.block == (128, 64)
    assert size <= (113 if two_ctas else 160) * 1024


# The gradients.


def compared(case: Case, x: Inputs, got: Any) -> None:
    exact, rough = (reference(case, x, dtype) for dtype in (torch.float64, torch.bfloat16))
    for name, mine in zip(("dq", "dk", "dv"), got, strict=True):
        assert_close(f"{name} of {case!r}", mine, exact[name], rough[name], rounded_sums(case, x))


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "deterministic"), in_order(CASES, False, True), ids=str)
def test_gradients(case: Case, deterministic: bool) -> None:
    x = make_inputs(case)
    o, lse = forward(case, x)
    got = gradients(case, x, o, lse, deterministic=deterministic)
    compared(case, x, got)
    if deterministic:
        assert_call_repeats(lambda: gradients(case, x, o, lse, deterministic=True), 50)


@pytest.mark.gpu
@pytest.mark.parametrize("given", ["dlse", "softmax_scale", "dq", "strides of 0", "seqused_k"])
def test_what_else_reaches_both_passes(given: str) -> None:
    """As in one pass."""
    case = Case(D=128, causal=given != "seqused_k", option="seqused" if given == "seqused_k" else None, **HALVES)
    x = make_inputs(case)
    o, lse = forward(case, x)
    values = dict(dlse=torch.randn_like(lse), softmax_scale=0.2, dq=torch.full_like(x.q, torch.nan))
    more = {given: values[given]} if given in values else {}
    if given == "strides of 0":
        x = replace(x, do=x.do[:, :1].expand(x.do.shape), v=x.v[:1].expand(x.v.shape))
    expected, got = ([t.clone() for t in gradients(case, x, o, lse, **more, passes=passes)] for passes in (1, 2))
    if given == "seqused_k":  # nobody writes past the keys in use
        used = torch.tensor(case.used, device="cuda")[:, None]
        kept = (torch.arange(case.T_k, device="cuda") < used)[..., None, None]
        for of in (expected, got):
            of[1:] = [torch.where(kept, t, 0) for t in of[1:]]
    assert_alike(got, expected)
    assert given != "dq" or got[0].equal(more["dq"])


@pytest.mark.gpu
@pytest.mark.parametrize("case", [ONE_HEAD, PLANNED_PACK], ids=str)
def test_captured_calls(case: Case) -> None:
    x = make_inputs(case)
    o, lse = forward(case, x)
    lists, more = backward_lists(case), dict(block_sparse_tensors_fwd=forward_lists(case), deterministic=True)

    def function(do: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return backward(case, replace(x, do=do), o, lse, lists, **more)

    expected = function(x.do)
    graph, static = torch.cuda.CUDAGraph(), torch.randn_like(x.do)
    with torch.cuda.graph(graph):
        captured = function(static)
    static.copy_(x.do)
    graph.replay()
    assert all(map(torch.equal, expected, captured))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "start"), in_order([ONE_HEAD, KEYED, PLANNED_PACK, SHARED], 64, 128, 128, 64), ids=str
)
def test_passes_that_share(case: Case, start: int) -> None:
    """Row sums and accumulators of the caller's for both passes, as the layer calls them."""
    from flash_attn.cute.interface import _flash_attn_bwd
    from flash_attn.cute.shared_backward import SharedBackward, backward_layout, zeroed

    x = make_inputs(case)
    given = options(case, x) | dict(block_sparse_tensors=backward_lists(case), without_dq=True, deterministic=True)
    layout = backward_layout(x.q, x.k, x.v, **given)
    layout = replace(layout, dq=replace(layout.dq, start=start))
    sums = row_sums(case, x, start)
    rows = [t.nan_to_num(fill) for t, fill in zip(sums, (0.0, math.inf))]
    dk, dv = zeroed(layout.dk, layout.dv, device=x.q.device)
    shared = SharedBackward(layout, *rows, None, dk, dv)
    got = _flash_attn_bwd(x.q, x.k, x.v, None, x.do, None, **given, shared=shared)
    assert got == (None, None, None)
    dq = torch.full_like(x.q, torch.nan)
    call(case, x, sums, dq=dq, start=start)
    compared(case, x, [dq, *converted(case, x, layout, None, dk, dv)[1:]])


# The dq pass alone. What ends a chain of calls is three more kernels for each of these.
ENDS = [(Case(D=128, window=(100, 30), **HALVES), 64), (replace(BY_GROUP, D=64), 64), (PADDED, 64), (PLANNED_PACK, 128)]
SUMS = [(ONE_HEAD, 64), (SHORT, 128), (KEYED, 64), (PLANNED_PACK, 128)]


@pytest.mark.gpu
@pytest.mark.parametrize("case,start", ENDS, ids=str)
def test_end_of_a_chain(case: Case, start: int) -> None:
    """dq on top of what the accumulator holds, which `convert` gives alone, and of what it holds itself."""
    from flash_attn.cute.shared_backward import convert

    x = make_inputs(case)
    rows, cu_seqlens = row_sums(case, x, start), None if x.cu_seqlens is None else x.cu_seqlens[0]
    accum = torch.randn(layout(case, start).shape, device="cuda")
    before, alone, kept, held = torch.randn_like(x.q), torch.empty_like(x.q), torch.empty_like(x.q), accum.clone()
    call(case, x, rows, dq=alone, start=start)
    convert(accum, layout(case, start), kept, scale=case.D**-0.5, cu_seqlens=cu_seqlens)
    for parts, more in (
        ((alone, kept), dict(accum=accum)),
        ((alone, kept, before), dict(accum=accum, add=True)),
        ((alone, before), dict(add=True)),
    ):
        dq = before.clone() if "add" in more else torch.full_like(x.q, torch.nan)
        call(case, x, rows, dq=dq, start=start, **more)
        exact = sum(part.double() for part in parts)
        assert_close(f"dq of {len(parts)} parts of {case!r}", dq, exact, sum(parts[1:], start=parts[0]))
    assert accum.equal(held), f"the accumulator changed: {case!r}"


@pytest.mark.gpu
@pytest.mark.parametrize("case,start", SUMS, ids=str)
def test_row_sums(case: Case, start: int) -> None:
    """Row sums that the pass computes are those of o, in all rows of the sequences' tiles, and dq is of them."""
    x, accum = make_inputs(case), layout(case, start)
    o = torch.randn_like(x.q)
    lse = torch.randn((*accum.heads, x.q.shape[-3]), device="cuda") + 8
    lse[..., ::7] = -torch.inf
    sums = tuple(torch.full((*accum.heads, accum.rows), torch.nan, device="cuda") for _ in range(2))
    dq, again = (torch.full_like(x.q, torch.nan) for _ in range(2))
    call(case, x, sums, dq=dq, start=start, out=o, lse=lse)
    expected = as_rows(o, x.do, lse, queries(case), (*accum.heads, accum.rows), start)
    error = torch.finfo(torch.float32).eps * float((o.double().norm(dim=-1) * x.do.double().norm(dim=-1)).max())
    torch.testing.assert_close(sums[0], expected[0], atol=error, rtol=0, equal_nan=True)
    torch.testing.assert_close(sums[1], expected[1], equal_nan=True)
    call(case, x, sums, dq=again, start=start)
    assert dq.isfinite().all() and dq.equal(again), f"dq is not of the sums: {case!r}"


@pytest.mark.gpu
@pytest.mark.parametrize("block_k", [64, 128])
def test_rows_that_list_nothing(block_k: int) -> None:
    """dq is 0, or what the accumulator and dq hold."""
    case = Case(D=128, **LISTED, block=(128, block_k))
    x = make_inputs(case)
    lists = forward_lists(case)
    for counts in (lists.mask_block_cnt, lists.full_block_cnt):
        counts[:, :, 1::2] = 0
    rows = tuple(sums.nan_to_num(0.5) for sums in row_sums(case, x, 64))
    dq = torch.full_like(x.q, torch.nan)
    call(case, x, rows, lists, dq=dq)
    empty = torch.arange(case.T_q, device="cuda") // 128 % 2 == 1
    assert dq.isfinite().all() and dq[:, empty].eq(0).all() and dq[:, ~empty].ne(0).any()
    accum = torch.full(layout(case).shape, 3.0, device="cuda")
    for add in (False, True):
        dq = torch.full_like(x.q, 0.5 if add else torch.nan)
        call(case, x, rows, lists, accum=accum, dq=dq, add=add)
        alone = (3 * case.D**-0.5 + add * 0.5 * torch.ones_like(dq)).to(dq.dtype)
        assert dq[:, empty].equal(alone[:, empty]) and dq.isfinite().all() and not dq[:, ~empty].equal(alone[:, ~empty])


@pytest.mark.gpu
def test_rows_that_are_not_used() -> None:
    """Nothing is written past seqused_q, and what comes before does not change."""
    case, used = Case(D=64, Hq=6, Hkv=1, q_tiles=2, **LISTED), (333, 900)
    x = make_inputs(case)
    rows = row_sums(case, x, 64)
    whole, dq = (torch.full_like(x.q, torch.nan) for _ in range(2))
    call(case, x, rows, dq=whole)
    call(case, x, rows, dq=dq, seqused_q=torch.tensor(used, dtype=torch.int32, device="cuda"))
    for b, rows_used in enumerate(used):
        assert dq[b, :rows_used].equal(whole[b, :rows_used]) and dq[b, rows_used:].isnan().all()


@pytest.mark.gpu
def test_ctas_that_stay_and_ctas_that_do_not_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_attn.cute.bwd_dq import interface as bwd_dq_interface

    case = replace(BY_GROUP, T_q=3000, T_k=3000)
    x = make_inputs(case)
    rows = row_sums(case, x, 64)
    found = []
    for stay in (True, False):
        monkeypatch.setattr(bwd_dq_interface, "has_short_rows", lambda lists, stay=stay: stay)
        found.append(torch.full_like(x.q, torch.nan))
        call(case, x, rows, dq=found[-1])
    assert found[0].equal(found[1]) and found[0].isfinite().all()


# The kernel without dq alone.


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "loops", "deterministic"),
    [(case, False, order) for case, order in in_order(WITHOUT_DQ, False, True)]
    + [(case, True, order) for case, order in in_order(BY_CHOICE + PLANNED, False, True)],
    ids=str,
)
def test_dk_and_dv_of_one_pass(case: Case, loops: bool, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel with dq adds the same products, in an order of its own; loops: over a group's heads."""
    from flash_attn.cute.bwd_sm90 import two_pass

    x = make_inputs(case)
    o, lse = forward(case, x)
    monkeypatch.setattr(two_pass, "LOOPS_OVER_GROUP", loops)
    _, *got = without_dq(case, x, o, lse, deterministic=deterministic)
    if deterministic:
        assert_call_repeats(lambda: without_dq(case, x, o, lse, deterministic=True)[1:], 20)
    _, *expected = backward(replace(case, plan=0, per_group=False) if case.per_group else case, x, o, lse)
    assert_alike(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [PLAIN, RAGGED], ids=str)
def test_groups_add_to_accumulators_of_the_caller(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_attn.cute.bwd_sm90 import two_pass
    from flash_attn.cute.interface import _flash_attn_bwd
    from flash_attn.cute.shared_backward import SharedBackward, backward_layout, zeroed

    monkeypatch.setattr(two_pass, "LOOPS_OVER_GROUP", True)
    x = make_inputs(case)
    o, lse = forward(case, x)
    _, *expected = without_dq(case, x, o, lse)
    given = options(case, x) | dict(block_sparse_tensors=backward_lists(case), without_dq=True)
    layout = backward_layout(x.q, x.k, x.v, **given)
    rows = as_rows(o, x.do, lse, queries(case), layout.row_shape, layout.dq.start)
    dk, dv = zeroed(layout.dk, layout.dv, device=x.q.device)
    for _ in range(2):
        _flash_attn_bwd(x.q, x.k, x.v, None, x.do, None, **given, shared=SharedBackward(layout, *rows, None, dk, dv))
    assert_alike(converted(case, x, layout, None, dk, dv)[1:], [2 * t for t in expected])
