"""Programs for upstream, with its open pull requests, and lists as its documentation has them: taken as they are.

They know nothing of this repository: upstream's names and places of import, its packed lists (a row has room for each
block of its sequence), and its function for the order of deterministic adds, called by position.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, count, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fa_compile import Worker, compile_backward, compile_forward, noted
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from fuzz.attention_lists import backward_lists, forward_lists
from fuzz.case import Attention as Case
from fuzz.mask_mods import MASK_MODS

PACKED = Case(D=128, packed=((300, 300), (1, 129), (700, 640)), lists="both", form="stacked")
ORDERED = Case(D=128, T_q=700, T_k=900, lists="both", deterministic=True)


def ints(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device="cuda")


STARTS = ("cu_total_m_blocks", "cu_block_idx_offsets")
NO_FULL = dict.fromkeys(("full_block_cnt", "full_block_idx"), lambda t: None)
FORWARD = [
    dict.fromkeys(STARTS, lambda t: torch.cat([t, t])),
    dict.fromkeys(STARTS, lambda t: t.narrow(0, 0, len(t) - 1)),
    NO_FULL | {"dq_write_order_full": lambda _: ints(1, 1)},
]
BACKWARD = [
    NO_FULL,
    {"dq_write_order": lambda t: t.repeat(1, 4, 1, 1)},
    {"dq_write_order": lambda t: t.narrow(2, 0, 1)},
]


def call_changed(case: Case, number: int) -> None:
    """A forward or a deterministic backward with changed lists; in a worker, which makes no kernel."""
    from flash_attn.cute import interface

    lists = backward_lists(case)._replace(passes=1) if case.deterministic else forward_lists(case)
    changes = (BACKWARD if case.deterministic else FORWARD)[number]
    lists = lists._replace(**{name: change(getattr(lists, name)) for name, change in changes.items()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interface.cute, "compile", lambda *args, **options: None)
        for function in (interface._flash_attn_fwd, interface._flash_attn_bwd, interface._bwd_preprocess):
            patch.setattr(function, "compile_cache", {})
        (compile_backward if case.deterministic else compile_forward)(case, lists=lists)


@pytest.mark.parametrize("number", range(len(FORWARD)))
def test_starts_that_upstream_takes(compiler: Worker, number: int) -> None:
    compiler.trace(call_changed, PACKED, number)


@pytest.mark.parametrize("number", range(len(BACKWARD)))
def test_orders_that_upstream_takes(compiler_sm100: Worker, number: int) -> None:
    """SM90, whose deterministic kernel upstream does not have, merges lists first: `test_determinism.py`."""
    compiler_sm100.trace(call_changed, ORDERED, number)


# From a mask to attention and its gradients.
B, T, HQ, HKV, D = 3, 512, 4, 2, 64


@dataclass(frozen=True)
class Form:
    """How q and k are packed, whether seqused_k is there, and the heads of the lists."""

    packed_q: bool
    k: str  # "dense", "packed" or "used"
    heads: int

    def __str__(self) -> str:
        return f"{'packed' if self.packed_q else 'dense'} q, {self.k} k, lists of {self.heads}"

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of q, k and v."""
        sides = ((self.packed_q, HQ), (self.k == "packed", HKV), (self.k == "packed", HKV))
        return [(*((B * T,) if packed else (B, T)), H, D) for packed, H in sides]


FORMS = [Form(*form) for form in product((False, True), ("dense", "packed", "used"), (1, HQ))]
EVERY_FORM = pytest.mark.parametrize("form", FORMS, ids=str)


@contextmanager
def read_lengths() -> Iterator[None]:
    """Fake tensors have no values: what the host reads of starts and lengths is 0, 128, 256, ..."""
    values, select = count(0, 128), torch.Tensor.__getitem__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "item", lambda self: next(values))
        patch.setattr(torch.Tensor, "__getitem__", lambda self, at: self if isinstance(at, int) else select(self, at))
        yield


def compute(form: Form, tile: tuple[int, int], **options: Any) -> Any:
    from flash_attn.cute.compute_block_sparsity import compute_block_sparsity

    if form.packed_q:
        options = {"cu_seqlens_q": ints(B + 1), "cu_total_m_blocks": ints(B + 1)} | options
    if form.k != "dense":
        options |= {"cu_seqlens_k": ints(B + 1)} if form.k == "packed" else {"seqused_k": ints(B)}
    mask_mod, aux = options.pop("mask", (MASK_MODS["halves"][0], None))
    with read_lengths():
        return compute_block_sparsity(*tile, B, form.heads, T, T, mask_mod, aux, "cuda", **options)


def documented_call(form: Form) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """q, k, v, and what a call says of their packing."""
    tensors = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in form.shapes]
    packing = {"cu_seqlens_q": ints(B + 1), "max_seqlen_q": T} if form.packed_q else {}
    if form.k != "dense":
        packing |= {"seqused_k": ints(B)} if form.k == "used" else {"cu_seqlens_k": ints(B + 1), "max_seqlen_k": T}
    return tensors, packing | {"mask_mod": MASK_MODS["halves"][0]}


def from_mask_to_output(form: Form, tile: tuple[int, int]) -> tuple[list[int], tuple[int, ...]]:
    """Dimensions of the lists that a mask gives in this form, and the shape of the output that reads them."""
    from flash_attn.cute.interface import _flash_attn_fwd

    lists = compute(form, tile, use_fast_sampling=True)
    (q, k, v), options = documented_call(form)
    o, *_ = _flash_attn_fwd(q, k, v, tile_mn=(128, 128), block_sparse_tensors=lists, **options)
    return [t.ndim for t in (lists.mask_block_cnt, lists.mask_block_idx)], tuple(o.shape)


@EVERY_FORM
def test_lists_of_a_mask_reach_attention(compiler: Worker, form: Form) -> None:
    tile = (256 if compiler.arch == "sm_100" else 128, 128)
    dimensions, o = compiler.trace(from_mask_to_output, form, tile)
    assert dimensions == ([2, 2] if form.packed_q else [3, 4]), "upstream's own forms"
    assert o == form.shapes[0]


def from_lists_to_gradients(form: Form) -> list[tuple[int, ...]]:
    """Shapes of the gradients over lists of query blocks for each key block."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    from flash_attn.cute.interface import _flash_attn_bwd

    rows, packed, ((q, k, v), options) = T // 128, form.k == "packed", documented_call(form)
    counts = (form.heads, B * rows) if packed else (B, form.heads, rows)
    indices = (form.heads, rows * rows * B) if packed else (*counts, rows)
    lists = BlockSparseTensorsTorch(
        *(ints(*shape) for shape in (counts, indices) * 2),
        block_size=(128, 128),
        cu_total_n_blocks=ints(B + 1) if packed else None,
        cu_block_idx_offsets=ints(B + 1) if packed and form.packed_q else None,
    )
    lse = torch.empty(*((HQ, B * T) if form.packed_q else (B, HQ, T)), device="cuda")
    gradients = _flash_attn_bwd(q, k, v, q, q, lse, block_sparse_tensors=lists, **options)
    return [tuple(t.shape) for t in gradients[:3]]


@EVERY_FORM
def test_lists_reach_gradients(compiler: Worker, form: Form) -> None:
    assert compiler.trace(from_lists_to_gradients, form) == form.shapes


@pytest.mark.parametrize("rows", [1, 4])
def test_the_size_of_query_blocks_is_inferred_as_upstream_does(rows: int) -> None:
    """From a single row, where nothing but the length fits; of more rows every size in a range does."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch, normalize_block_sparse_config
    from flash_attn.cute.lists import formats

    with FakeTensorMode():
        lists = BlockSparseTensorsTorch(ints(B, 1, rows), ints(B, 1, rows, 4))
        packed = formats.packing(None, ints(B + 1), None, None, None, T)
        sizes = dict(batch_size=B, num_head=HQ, seqlen_q=128 * rows, seqlen_k=T, block_size=(128, 128), q_stage=1)
        if rows > 1:
            with pytest.raises(ValueError, match="block_sparse_tensors.block_size is None"):
                normalize_block_sparse_config(lists, packed=packed, **sizes)
        else:
            assert normalize_block_sparse_config(lists, packed=packed, **sizes).q_subtile_factor == 1


def with_options(form: Form, options: dict[str, Any], mask: str) -> list[tuple[int, ...] | None]:
    """Shapes of the lists that `compute_block_sparsity` returns."""
    if "cu_block_idx_offsets" in options:
        options = options | {"cu_block_idx_offsets": ints(*options["cu_block_idx_offsets"])}
    aux = [ints(T)] if mask == "keyed" else None
    lists = compute(form, (128, 128), mask=(MASK_MODS[mask][0], aux), **options)
    return [None if t is None else tuple(t.shape) for t in lists[:4]]


@pytest.mark.parametrize(
    ("form", "options", "mask"),
    [
        (Form(True, "dense", 1), {"compute_full_blocks": False, "use_fast_sampling": True}, "halves"),
        (Form(True, "packed", HQ), {"cu_block_idx_offsets": (B + 1,), "use_fast_sampling": True}, "keyed"),
        (Form(True, "dense", HQ), {"cu_block_idx_offsets": (B + 1,)}, "halves"),
    ],
    ids=["no full blocks", "offsets and aux_tensors", "every token"],
)
def test_options_of_compute_block_sparsity(compiler: Worker, form: Form, options: dict[str, Any], mask: str) -> None:
    cnt, idx, full_cnt, full_idx = compiler.trace(with_options, form, options, mask)
    assert cnt[0] == idx[0] == form.heads and len(cnt) == len(idx) == 2
    assert (full_cnt, full_idx) == ((None, None) if "compute_full_blocks" in options else (cnt, idx))


# Whole programs.
LENGTHS = ((300, 300), (1, 129), (700, 640), (257, 900))
TOKENS = [sum(side) for side in zip(*LENGTHS)]
HEADS = (6, 2)  # a group that no other test compiles, so that these are not in a worker's cache


def before(numbers: Any) -> torch.Tensor:
    return torch.tensor([0, *accumulate(numbers)], dtype=torch.int32, device="cuda")


def packed_lists(block: tuple[int, int]) -> dict[str, Any]:
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    sizes = [[-(-length // size) for length in side] for side, size in zip(zip(*LENGTHS), block)]
    cells = [m * n for m, n in zip(*sizes, strict=True)]
    names = dict(block_sparse_tensors="cu_total_m_blocks", block_sparse_tensors_bwd="cu_total_n_blocks")
    return {
        argument: BlockSparseTensorsTorch(
            *(ints(HEADS[0], sum(of)) for of in (rows, cells) * 2),
            block_size=block, cu_block_idx_offsets=before(cells), **{name: before(rows)},
        )
        for (argument, name), rows in zip(names.items(), sizes)
    }  # fmt: skip


def packed_ordered_lists(block: tuple[int, int]) -> dict[str, Any]:
    """The same with an order of deterministic adds, in a call that one pass alone can do."""
    given = packed_lists(block)
    lists = given["block_sparse_tensors_bwd"]
    orders = map(torch.empty_like, (lists.mask_block_idx, lists.full_block_idx))
    lists = lists._replace(**dict(zip(("dq_write_order", "dq_write_order_full"), orders)), spt=True)
    return given | dict(block_sparse_tensors_bwd=lists, deterministic=True, softcap=20.0)


def ordered_lists(block: tuple[int, int]) -> dict[str, Any]:
    """Padded lists for deterministic backward; every sequence lists every block of the longest."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch, compute_dq_write_order

    def every(rows: int, columns: int) -> list[torch.Tensor]:
        shape = len(LENGTHS), HEADS[0], rows
        idx = torch.arange(columns, dtype=torch.int32).repeat(*shape, 1)
        cnt = torch.full(shape, columns, dtype=torch.int32)
        return [cnt, idx, torch.zeros_like(cnt), torch.zeros_like(idx)]

    M, N = (-(-max(side) // size) for side, size in zip(zip(*LENGTHS), block))
    with unset_fake_temporarily():
        forward, backward = every(M, N), every(N, M)
        orders = compute_dq_write_order(*forward, *backward, True)
    forward, backward, (order, order_full) = ([ints(*t.shape) for t in of] for of in (forward, backward, orders))
    more = dict(dq_write_order=order, dq_write_order_full=order_full, spt=True)
    return dict(
        block_sparse_tensors=BlockSparseTensorsTorch(*forward, block_size=block),
        block_sparse_tensors_bwd=BlockSparseTensorsTorch(*backward, block_size=block, **more),
        deterministic=True,
    )


class Context:
    """Autograd's context for a function: PyTorch without CUDA has no autograd of tensors on a GPU."""

    needs_input_grad = (True,) * 64

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        assert value is False

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None: ...


@contextmanager
def without_autograd(name: str) -> Iterator[Callable[..., tuple]]:
    """In the body an autograd function of the interface is its forward alone; its backward for that call is given."""
    from flash_attn.cute import interface

    function, context = getattr(interface, name), Context()

    def apply(*args: Any) -> Any:
        with torch.no_grad():
            return function.forward(context, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interface, name, SimpleNamespace(apply=apply))
        yield torch.no_grad()(partial(function.backward, context))


def dimensions(row: Any, tensor: Any, full: bool = False) -> int:
    return len(tensor.shape)


def run_program(lists: Callable[..., Any], D: int, block: tuple[int, int]) -> tuple[list[tuple], list[set[int]]]:
    """Shapes and types of q's, k's and v's gradients, and the dimensions of the index lists that both kernels loop."""
    from flash_attn.cute import flash_attn_varlen_func
    from flash_attn.cute.lists.rows import ListRow

    q, k, v = (
        torch.empty(TOKENS[side], HEADS[side], D, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        for side in (0, 1, 1)
    )
    given = {f"cu_seqlens_{name}": before(of) for name, of in zip("qk", zip(*LENGTHS))}
    given |= {f"max_seqlen_{name}": max(of) for name, of in zip("qk", zip(*LENGTHS))}
    with without_autograd("FlashAttnVarlenFunc") as derive, noted(ListRow, "entries", dimensions) as forwards:
        out, lse = flash_attn_varlen_func(q, k, v, causal=True, **given, **lists(block))
    with noted(ListRow, "entries", dimensions) as backwards:
        gradients = derive(torch.empty_like(out), None)[:3]
    return [(tuple(t.shape), t.dtype) for t in gradients], [set(forwards), set(backwards)]


# Packed rows are found as ragged ones, padded ones as they are; SM90 takes packed lists in order in one pass.
PROGRAMS = [(packed_lists, 64, 1), (ordered_lists, 128, 4), (packed_ordered_lists, 128, 1)]


@pytest.mark.parametrize(("lists", "D", "dimensions"), PROGRAMS)
def test_programs_compile_as_they_are(
    compiler_sm90: Worker, lists: Callable[..., Any], D: int, dimensions: int
) -> None:
    gradients, visited = compiler_sm90.trace(run_program, lists, D, (128, 128))
    assert gradients == [((TOKENS[side], HEADS[side], D), torch.bfloat16) for side in (0, 1, 1)]
    assert visited == [{dimensions}] * 2


def test_one_pass_follows_the_order(compiler_sm100: Worker) -> None:
    _, visited = compiler_sm100.trace(run_program, ordered_lists, 128, (256, 128))
    assert visited == [{4}, {4}]
