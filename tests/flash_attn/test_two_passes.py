"""Block-sparse backward in two passes: which calls take them, what is compiled and launched, and the gradients."""

import math
from contextlib import ExitStack
from dataclasses import replace
from functools import wraps
from typing import Any

import pytest
import torch
from fa_compile import Worker, built_kernels, in_order, swept
from fa_dq import call, rounded_sums, row_sums
from fa_reference import assert_alike, assert_call_repeats, assert_close, attention

from fuzz.attention import Inputs, attend, backward, both_lists, forward, make_inputs, options, outputs
from fuzz.attention_lists import backward_lists, forward_lists
from fuzz.case import Attention as Case

LISTED = dict(T_q=900, T_k=900, lists="both")
HALVES = dict(block=(128, 64), **LISTED)
PACK = dict(packed=((300, 300), (1, 129), (0, 200), (700, 640), (130, 0), (257, 900)), lists="both")
CASES = [
    Case(D=128, causal=True, **LISTED),
    Case(D=128, mask_mod="thirds", Hkv=4, **HALVES),
    Case(D=128, causal=True, Hkv=1, plan=3, **HALVES),
    Case(D=128, T_q=200, T_k=700, causal=True, lists="full", block=(256, 64), list_heads=4),
    Case(D=64, window=(200, 0), list_heads=2, **HALVES),
    Case(D=64, causal=True, Hkv=4, plan=3, **LISTED),
    Case(D=96, mask_mod="keyed", list_heads=4, **LISTED),
    Case(D=64, T_q=1, T_k=1, lists="no full"),
    # Lists that an order came with.
    Case(D=128, causal=True, Hq=8, plan=3, deterministic=True, launch="right to left", **LISTED),
    Case(D=64, list_heads=2, deterministic=True, **HALVES),
]
PACKED = [
    Case(D=128, causal=True, form="stacked", **PACK),
    Case(D=128, causal=True, form="ragged", list_heads=2, plan=2, block=(128, 64), **PACK),
    Case(D=128, window=(100, 30), form="compact", list_heads=4, Hkv=4, **PACK),
    Case(D=64, mask_mod="thirds", form="padded", block=(128, 64), **PACK),
    Case(D=64, causal=True, form="shared", **PACK),
    Case(D=64, causal=True, form="stacked", list_heads=2, plan=2, block=(128, 64), **PACK),
    Case(D=128, form="stacked", plan=3, deterministic=True, launch="right to left", **PACK),
]


def gradients(case: Case, x: Inputs, o: torch.Tensor, lse: torch.Tensor, **more: Any) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv with the lists of both directions; in two passes unless `more` says otherwise."""
    return backward(case, x, o, lse, **dict(block_sparse_tensors_fwd=forward_lists(case), passes=2) | more)


def tables(block: tuple[int, int] | None = (128, 128), capacity: tuple[int, ...] = (9,), **fields: Any) -> Any:
    """Lists of one block a row; capacity: of a row of mask lists, and of full ones."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    cnt, indices = (
        torch.ones(1, 1, 4, dtype=torch.int32),
        [torch.zeros(1, 1, 4, n, dtype=torch.int32) for n in capacity],
    )
    full = dict(full_block_cnt=cnt, full_block_idx=indices[1]) if capacity[1:] else {}
    return BlockSparseTensorsTorch(cnt, indices[0], block_size=block, **full, **fields)


def takes(passes: int | None = None, **changes: Any) -> bool:
    """True if a call on SM90 takes two passes: at head dimension 128, with default lists, and `changes`."""
    from flash_attn.cute.bwd_sm90 import two_pass

    block, D = changes.pop("block", (128, 128)), changes.pop("D", 128)
    of_keys = changes.pop("block_of_backward", block)
    x = torch.empty(1, 512, 4, D, dtype=changes.pop("dtype", torch.bfloat16), device="meta")
    lists = dict(
        forward=tables(block, changes.pop("capacity", (9,))), backward=tables(of_keys, **changes.pop("fields", {}))
    )
    given = dict(arch=90, q=x, v=x, deterministic=False, **lists)
    return two_pass.takes(passes, **(given | changes))


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


def test_capacity_says_how_many_blocks_are_few() -> None:
    """The device alone knows how many blocks the rows list. Stacked and ragged rows, and lists without tensors, have
    no capacity that would say it."""
    wide = tables(capacity=(9,))
    for lists in (wide, tables(capacity=(300,)), wide._replace(mask_block_idx=torch.zeros(1, dtype=torch.int32))):
        assert not takes(forward=lists)
    assert not takes(forward=tables()._replace(mask_block_cnt=None, mask_block_idx=None))
    compact = tables(capacity=(8,))
    assert takes(forward=compact._replace(mask_block_cnt=compact[0][0], mask_block_idx=compact[1][0]))
    assert not takes(forward=compact._replace(mask_block_cnt=compact[0][0], mask_block_idx=compact[1][0, :, 0]))


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


@pytest.mark.parametrize("case", [CASES[2], PACKED[0], *PACKED[5:]], ids=str)
def test_two_kernels_are_compiled(compiler_sm90: Worker, case: Case) -> None:
    """Deterministic by default, without an order of adds to dq; nothing in fp32 is as large as dq."""
    names, shapes = compiler_sm90.trace(compiled, case)
    assert names[:2] == ["FlashAttentionBackwardDqSm90", "FlashAttentionBackwardSm90 without dq"]
    assert not any("Preprocess" in name for name in names)
    tokens = sum(pair[0] for pair in case.packed) or case.T_q
    assert all(shape[-2:-1] != (case.Hq,) or shape[-1] < tokens * case.D for shape in shapes)


def times_normalized(case: Case) -> int:
    """The number of times that a call in two passes brings forward lists into the kernel's form; in a worker."""
    from unittest.mock import patch

    from flash_attn.cute.bwd_dq_sm90 import interface as bwd_dq_interface

    x = make_inputs(case)
    o, lse = outputs(case, x)
    original = bwd_dq_interface.normalize_block_sparse_config
    with (
        patch.object(bwd_dq_interface, "normalize_block_sparse_config", side_effect=original) as normalize,
        patch.object(bwd_dq_interface, "_compiled") as compiled,
    ):
        gradients(case, x, o, lse)
        assert compiled.called
    return normalize.call_count


@pytest.mark.parametrize("case", [CASES[2], PACKED[0]], ids=str)
def test_forward_lists_are_normalized_once(compiler_sm90: Worker, case: Case) -> None:
    assert compiler_sm90.trace(times_normalized, case) == 1


def rows_of_layout(case: Case, without_dq: bool) -> Any:
    """The layout of a call's accumulators, and that of a window call without lists."""
    from flash_attn.cute.shared_backward import aligned, backward_layout

    x = make_inputs(case)
    masks = options(case, x)
    lengths = {name: masks[name] for name in masks if "seqlen" in name}
    own = backward_layout(x.q, x.k, x.v, **masks, block_sparse_tensors=backward_lists(case), without_dq=without_dq)
    window = backward_layout(x.q, x.k, x.v, window_size_left=100, window_size_right=0, **lengths)
    return own, aligned(own, window)


@pytest.mark.parametrize("case", [CASES[1], CASES[4], PACKED[3], PACKED[4]], ids=str)
def test_rows_serve_both_passes(compiler_sm90: Worker, case: Case) -> None:
    own, both = compiler_sm90.trace(rows_of_layout, case, True)
    assert own.dq.tile.pattern == "rows of 64" and own.dq.start == 64 and own.dq.width == case.D
    assert both[0].dq.place == both[1].dq.place and both[0].dq.start % 64 == 0
    assert (own.dk is None) == (case.Hq == case.Hkv)


def compared(case: Case, x: Inputs, got: Any) -> None:
    exact, plain = (attention(case, x, dtype)[1:] for dtype in (torch.float64, torch.bfloat16))
    for name, mine, true, rough in zip(("dq", "dk", "dv"), got, exact, plain, strict=True):
        assert_close(f"{name} of {case!r}", mine, true, rough, rounded_sums(case, x))


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "deterministic"), in_order(CASES + PACKED, False, True), ids=str)
def test_gradients(case: Case, deterministic: bool) -> None:
    x = make_inputs(case)
    o, lse = forward(case, x)
    got = gradients(case, x, o, lse, deterministic=deterministic)
    compared(case, x, got)
    if deterministic:
        assert_call_repeats(lambda: gradients(case, x, o, lse, deterministic=True), 50, beside_other_work=True)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [CASES[1], CASES[2], PACKED[0]], ids=str)
def test_autograd(case: Case) -> None:
    """Deterministic, with lists that have no order; stacked ones too."""
    x = make_inputs(case)
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    o, _ = attend(case, x, leaves, deterministic=True, **both_lists(case))
    got = torch.autograd.grad(o, leaves, x.do, retain_graph=True)
    assert all(map(torch.equal, got, torch.autograd.grad(o, leaves, x.do)))
    compared(case, replace(x, q=x.q.detach(), k=x.k.detach(), v=x.v.detach()), got)


@pytest.mark.gpu
@pytest.mark.parametrize("given", ["dlse", "softmax_scale", "dq", "strides of 0"])
def test_what_else_reaches_both_passes(given: str) -> None:
    """As in one pass."""
    case = Case(D=128, causal=True, **HALVES)
    x = make_inputs(case)
    o, lse = forward(case, x)
    if given == "strides of 0":
        x, more = replace(x, do=x.do[:, :1].expand(x.do.shape), v=x.v[:1].expand(x.v.shape)), {}
    else:
        values = dict(dlse=torch.randn_like(lse), softmax_scale=0.2, dq=torch.full_like(x.q, torch.nan))
        more = {given: values[given]}
    expected = [t.clone() for t in gradients(case, x, o, lse, **more, passes=1)]
    got = gradients(case, x, o, lse, **more, passes=2)
    assert_alike(got, expected)
    assert given != "dq" or got[0] is more["dq"]


@pytest.mark.gpu
def test_keys_in_use() -> None:
    """Fewer keys than the tensors hold."""
    from flash_attn.cute.interface import _flash_attn_fwd

    case = Case(D=128, **HALVES)
    x, lists = make_inputs(case), forward_lists(case)
    used = torch.tensor([900, 500], dtype=torch.int32, device="cuda")
    o, lse, *_ = _flash_attn_fwd(x.q, x.k, x.v, seqused_k=used, block_sparse_tensors=lists, return_lse=True)
    one, two = (list(gradients(case, x, o, lse, seqused_k=used, passes=passes)) for passes in (1, 2))
    kept = (torch.arange(900, device="cuda") < used[:, None])[..., None, None]
    for of in (one, two):
        of[1:] = [torch.where(kept, t, 0) for t in of[1:]]
    assert_alike(two, one)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [CASES[2], PACKED[1]], ids=str)
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
    ("case", "start"), in_order([CASES[2], CASES[6], PACKED[1], PACKED[4]], 64, 128, 128, 64), ids=str
)
def test_passes_that_share(case: Case, start: int) -> None:
    """Row sums and accumulators of the caller's for both passes, as the layer calls them."""
    from flash_attn.cute.interface import _flash_attn_bwd
    from flash_attn.cute.shared_backward import SharedBackward, backward_layout, convert, zeroed

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
    cu_k = None if x.cu_seqlens is None else x.cu_seqlens[1]
    outputs = [torch.full_like(t, torch.nan) for t in (x.q, x.k, x.v)]
    call(case, x, sums, dq=outputs[0], start=start)
    convert(dk, layout.dk, outputs[1], scale=case.D**-0.5, cu_seqlens=cu_k)
    convert(dv, layout.dv, outputs[2], scale=1.0, cu_seqlens=cu_k)
    compared(case, x, outputs)


WITHOUT_DQ = [
    Case(D=128, causal=True, **LISTED),
    Case(D=128, mask_mod="thirds", block=(128, 64), **LISTED),
    Case(D=128, causal=True, block=(128, 64), Hkv=1, plan=3, **LISTED),
    Case(D=64, window=(200, 0), Hkv=4, block=(128, 64), **LISTED),
    Case(D=64, causal=True, Hkv=1, plan=3, **LISTED),
    Case(D=96, mask_mod="keyed", list_heads=4, **LISTED),
]
WITHOUT_DQ += [
    Case(D=128, causal=True, form="ragged", plan=2, **PACK),
    Case(D=64, mask_mod="thirds", form="compact", block=(128, 64), **PACK),
]


def without_dq(case: Case, x: Any, o: torch.Tensor, lse: torch.Tensor, **more: Any) -> tuple[torch.Tensor | None, ...]:
    """Backward's results for the case where it leaves dq out."""
    return backward(case, x, o, lse, without_dq=True, **more)


def compiled_roles(case: Case, deterministic: bool) -> tuple[set[str], int]:
    """The warp roles that the kernel without dq was traced with, and bytes of its shared memory."""
    from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90 as Kernel

    roles: set[str] = set()
    sizes: list[int] = []

    def recording(name: str, original: Any) -> Any:
        @wraps(original)
        def role(*args: Any, **kwargs: Any) -> Any:
            roles.add(name)
            result = original(*args, **kwargs)
            if name == "_get_shared_storage_cls":
                sizes.append(result.size_in_bytes())
            return result

        return role

    x = make_inputs(case)
    o, lse = outputs(case, x)
    with ExitStack() as undo:
        for name in ("load", "mma", "dQaccum_store", "_get_shared_storage_cls"):
            undo.callback(setattr, Kernel, name, getattr(Kernel, name))
            setattr(Kernel, name, recording(name, getattr(Kernel, name)))
        dq, dk, dv = without_dq(case, x, o, lse, deterministic=deterministic)
    assert dq is None and dk.shape == x.k.shape and dv.shape == x.v.shape
    return roles, sizes[0]


@pytest.mark.parametrize("of", swept(in_order(WITHOUT_DQ, False, True)), ids=str)
def test_nothing_of_dq_is_compiled(compiler_sm90: Worker, of: tuple[Case, bool]) -> None:
    case, deterministic = of
    roles, size = compiler_sm90.trace(compiled_roles, case, deterministic)
    assert roles >= {"load", "mma"} and "dQaccum_store" not in roles
    # Keys, values, and two stages of queries and their gradients; two CTAs share 227 KiB.
    two_ctas = case.block == (128, 64)
    assert size <= (113 if two_ctas else 160) * 1024


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "deterministic"), in_order(WITHOUT_DQ, False, True), ids=str)
def test_dk_and_dv_of_one_pass(case: Case, deterministic: bool) -> None:
    """The kernel with dq adds the same products, in an order of its own."""
    x = make_inputs(case)
    o, lse = forward(case, x)
    expected = backward(case, x, o, lse)
    _, *got = without_dq(case, x, o, lse, deterministic=deterministic)
    assert_alike(got, expected[1:])
    if deterministic:
        assert_call_repeats(lambda: without_dq(case, x, o, lse, deterministic=True)[1:], 20)
