"""Lists as upstream, with its open pull requests, makes and documents them: taken as they are."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, product
from typing import Any

import pytest
import torch
from fa_compile import Worker, built_kernels, compile_backward, compile_forward, swept
from torch._subclasses.fake_tensor import FakeTensorMode

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
    lists = backward_lists(case)._replace(passes=1) if case.deterministic else forward_lists(case)
    changes = (BACKWARD if case.deterministic else FORWARD)[number]
    lists = lists._replace(**{name: change(getattr(lists, name)) for name, change in changes.items()})
    with built_kernels():
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


SIDES = zip(product((False, True), ("dense", "packed", "used")), ((1, HQ), (1, HQ), (HQ, 1), (HQ, 1), (HQ, 1), (1, HQ)))
FORMS = [Form(*sides, heads) for sides, either in SIDES for heads in either]
SOME_FORMS = pytest.mark.parametrize("form", swept(FORMS, 4), ids=str)


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


@SOME_FORMS
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


@SOME_FORMS
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
