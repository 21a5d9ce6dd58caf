"""Lists as upstream's documentation has them are taken, in every form and packing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, product
from typing import Any

import pytest
import torch
from fa_compile import Worker
from torch._subclasses.fake_tensor import FakeTensorMode

from fuzz.attention import backward, forward, make_inputs, outputs
from fuzz.attention_lists import backward_lists, forward_lists
from fuzz.case import Attention as Case
from fuzz.mask_mods import MASK_MODS

PACKED = Case(D=128, packed=((300, 300), (1, 129), (700, 640)), lists="both", form="stacked")
ORDERED = Case(D=128, T_q=700, T_k=900, lists="both", deterministic=True)


def less(t: torch.Tensor) -> torch.Tensor:
    return t.narrow(0, 0, t.shape[0] - 1)


def twice(t: torch.Tensor) -> torch.Tensor:
    return torch.cat([t, t])


def nothing(t: torch.Tensor) -> None:
    return None


NO_FULL = dict.fromkeys(("full_block_cnt", "full_block_idx"), nothing)
FORWARD = [
    {"cu_total_m_blocks": twice, "cu_block_idx_offsets": twice},
    {"cu_total_m_blocks": less, "cu_block_idx_offsets": less},
    NO_FULL | {"dq_write_order_full": lambda _: torch.zeros(1, 1, dtype=torch.int32, device="cuda")},
]
BACKWARD = [
    NO_FULL,
    {"dq_write_order": lambda t: t.repeat(1, 4, 1, 1)},
    {"dq_write_order": lambda t: t.narrow(2, 0, 1)},
]


def changed(lists: Any, changes: dict[str, Callable[[torch.Tensor], Any]]) -> Any:
    return lists._replace(**{name: change(getattr(lists, name)) for name, change in changes.items()})


def call(case: Case, number: int) -> None:
    """A forward or a deterministic backward with lists like that; in a worker, which makes no kernel."""
    from flash_attn.cute import interface

    x = make_inputs(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interface.cute, "compile", lambda *args, **options: None)
        for function in (interface._flash_attn_fwd, interface._flash_attn_bwd, interface._bwd_preprocess):
            patch.setattr(function, "compile_cache", {})
        if case.deterministic:
            backward(case, x, *outputs(case, x), changed(backward_lists(case)._replace(passes=1), BACKWARD[number]))
        else:
            forward(case, x, changed(forward_lists(case), FORWARD[number]))


@pytest.mark.parametrize("number", range(len(FORWARD)))
def test_starts_that_upstream_takes(compiler: Worker, number: int) -> None:
    compiler.trace(call, PACKED, number)


@pytest.mark.parametrize("number", range(len(BACKWARD)))
def test_orders_that_upstream_takes(compiler_sm100: Worker, number: int) -> None:
    """SM90, whose deterministic kernel upstream does not have, merges lists first: `test_determinism.py`."""
    compiler_sm100.trace(call, ORDERED, number)


B, T, HQ, HKV, D = 3, 512, 4, 2, 64


@dataclass(frozen=True)
class Form:
    """How q and k are packed, whether seqused_k is there, and the heads of the lists."""

    packed_q: bool
    k: str  # "dense", "packed" or "used"
    heads: int

    def __str__(self) -> str:
        return f"{'packed' if self.packed_q else 'dense'} q, {self.k} k, lists of {self.heads}"


FORMS = [Form(*form) for form in product((False, True), ("dense", "packed", "used"), (1, HQ))]


def ints(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device="cuda")


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
    shapes = ((form.packed_q, HQ), (form.k == "packed", HKV), (form.k == "packed", HKV))
    tensors = [
        torch.empty(*((B * T,) if packed else (B, T)), H, D, dtype=torch.bfloat16, device="cuda")
        for packed, H in shapes
    ]
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


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_lists_of_a_mask_reach_attention(compiler: Worker, form: Form) -> None:
    tile = (256 if compiler.arch == "sm_100" else 128, 128)
    dimensions, o = compiler.trace(from_mask_to_output, form, tile)
    assert dimensions == ([2, 2] if form.packed_q else [3, 4]), "upstream's own forms"
    assert o == ((B * T, HQ, D) if form.packed_q else (B, T, HQ, D))


def from_lists_to_gradients(form: Form) -> list[tuple[int, ...]]:
    """Shapes of the gradients over lists of query blocks for each key block."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    from flash_attn.cute.interface import _flash_attn_bwd

    rows, (q, k, v), options = T // 128, *documented_call(form)
    width = rows * rows * B if form.k == "packed" else rows
    before = (form.heads, B * rows) if form.k == "packed" else (B, form.heads, rows)
    lists = BlockSparseTensorsTorch(
        *(ints(*shape) for shape in (before, (*before[: 1 if form.k == "packed" else 3], width)) * 2),
        block_size=(128, 128),
        **({"cu_total_n_blocks": ints(B + 1)} if form.k == "packed" else {}),
        **({"cu_block_idx_offsets": ints(B + 1)} if form.k == "packed" and form.packed_q else {}),
    )
    lse = torch.empty(*((HQ, B * T) if form.packed_q else (B, HQ, T)), device="cuda")
    gradients = _flash_attn_bwd(q, k, v, q, q, lse, block_sparse_tensors=lists, **options)
    return [tuple(t.shape) for t in gradients[:3]]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_lists_reach_gradients(compiler: Worker, form: Form) -> None:
    (q, k, v), _ = compiler.trace(shapes, form)
    assert compiler.trace(from_lists_to_gradients, form) == [q, k, v]


def shapes(form: Form) -> tuple[list[tuple[int, ...]], None]:
    return [tuple(t.shape) for t in documented_call(form)[0]], None


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
