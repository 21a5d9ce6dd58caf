"""Refused calls of attention with what the fork adds: compressed-causal masking, block lists, two passes over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from flash_attn.cute import flash_attn_func, flash_attn_varlen_func
from flash_attn.cute.block_lists import compute_dq_write_order
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
from flash_attn.cute.lists.backward_plan import check_plan, plan_backward
from flash_attn.cute.lists.validate_calls import validate_call
from flash_attn.cute.shared_backward import SharedBackward, backward_layout, convert
from fuzz.attention_lists import both_directions, on_gpu, sides
from fuzz.case import FORMS, Blocks, Packed
from fuzz.corrupt import spoil
from fuzz.wrong_calls import NO_SCALES, NOT_A_BOOL, Row, Table, Together, changed

B, M, N, HQ, HKV, D = 2, 3, 2, 4, 2, 64
TQ, TK = M * 128, N * 128
LENGTHS = ((300, 200), (0, 64), (129, 256))
Lists = BlockSparseTensorsTorch
BOTH = ("block_sparse_tensors", "block_sparse_tensors_bwd")


SIDES = both_directions(Blocks(B=B, H=HQ, M=M, N=N, pattern="full", seed=1))
PACKED_SIDES = {
    form: sides(Packed(packed=LENGTHS, form=form, block=(128, 128), list_heads=HQ, pattern="full")) for form in FORMS
}


def less(tensor: torch.Tensor, dim: int, by: int = 1) -> torch.Tensor:
    """Without the last of a dimension; indexing would ask a fake tensor's GPU."""
    return tensor.narrow(dim, 0, tensor.shape[dim] - by)


def qkv(device: str, packed: bool = False, D: int = D, Dv: int | None = None, Hkv: int = HKV) -> dict[str, Any]:
    starts = [[0, *accumulate(pair[side] for pair in LENGTHS)] for side in (0, 1)]
    leads = [(ends[-1],) for ends in starts] if packed else [(B, TQ), (B, TK)]
    shapes = ((*leads[0], HQ, D), (*leads[1], Hkv, D), (*leads[1], Hkv, Dv or D))
    arguments: dict[str, Any] = {n: torch.empty(s, dtype=torch.bfloat16, device=device) for n, s in zip("qkv", shapes)}
    if packed:
        for name, ends, side in zip("qk", starts, (0, 1), strict=True):
            arguments[f"cu_seqlens_{name}"] = torch.tensor(ends, dtype=torch.int32, device=device)
            arguments[f"max_seqlen_{name}"] = max(pair[side] for pair in LENGTHS)
    return arguments


SCALE: tuple[Row, Row] = (
    ("softmax_scale", TypeError, "softmax_scale is .*, expected a number or None", "1", torch.ones(1)),
    ("softmax_scale", ValueError, "softmax_scale is .*, expected a positive and finite number", *NO_SCALES),
)
COMPRESSED = (
    ("compress_factor", ValueError, "compress_factor must be in 1 .. 4194304, got", 0, -1, 1 << 23),
    ("compress_factor", TypeError, "compress_factor must be an int, got", 1.5, "2", None, True),
    ("compress_offset", TypeError, "compress_offset must be an int, got", 0.5, "0", None, True),
    ("compress_offset", ValueError, "compress_offset must be in -536870912 .. 536870912", 1 << 30, -(1 << 30)),
    ("compress_factor", ValueError, "compress_factor=16, .* need causal=True", Together(causal=False)),
    ("compress_offset", ValueError, "compress_factor=1, .* need causal=True",
     Together(causal=False, compress_factor=1)),
    ("window_size", NotImplementedError, "compress_factor=16, compress_offset=15 together with window_size", (100, 0)),
    ("qv", NotImplementedError, "compress_factor=16, compress_offset=15 together with qv", lambda _: qkv("cuda")["q"]),
    *SCALE,
)  # fmt: skip


def compressed(device: str, packed: bool) -> dict[str, Any]:
    return qkv(device, packed) | dict(causal=True, compress_factor=16, compress_offset=15)


def one_sided(device: str) -> dict[str, Any]:
    arguments = qkv(device)
    return arguments | dict(q=arguments["q"].requires_grad_())


ONE_SIDED = (
    (BOTH[1], ValueError, "{} is None while block_sparse_tensors is given", Together({BOTH[0]: SIDES[0]})),
    (BOTH[0], ValueError, "{} is None while block_sparse_tensors_bwd is given", Together({BOTH[1]: SIDES[1]})),
)


def positioned(device: str) -> dict[str, Any]:
    offsets = torch.zeros(B, dtype=torch.int32, device=device)
    return qkv(device) | dict(q_offset=offsets, window_size_left=127, window_size_right=0)


POSITIONS = (
    ("q_offset", TypeError, "q_offset must be int32, got", lambda x: x.long()),
    ("q_offset", ValueError, r"q_offset must be \[2\], contiguous", lambda x: less(x, 0), lambda x: x.expand(3, B)),
    ("q_offset", ValueError, "q_offset needs causal=True or a window",
     Together(window_size_left=None, window_size_right=None)),
    ("block_sparse_tensors", NotImplementedError, "q_offset together with block_sparse_tensors .*; pass seqused_k",
     lambda _: on_gpu(SIDES[0])),
)  # fmt: skip


def with_lists(device: str, form: str | None = None) -> dict[str, Any]:
    lists = SIDES if form is None else PACKED_SIDES[form]
    return qkv(device, packed=form is not None) | dict(block_sparse_tensors=on_gpu(lists[0]))


def shapes(name: str) -> tuple[Row, ...]:
    """Lists, in an argument of this name, that fit no call."""

    def rows(f: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Any]:
        return changed(mask_block_cnt=f, mask_block_idx=f)

    int64, same = torch.Tensor.long, "Block sparse tensorsforward"
    return tuple(
        (name, ValueError, *row)
        for row in (
            ("mask_block tensors must have dtype torch.int32", rows(int64), changed(mask_block_idx=int64)),
            ("full_block tensors must have dtype torch.int32", changed(full_block_idx=int64)),
            ("full_block_cnt and full_block_idx must both be", changed(full_block_idx=None),
             changed(full_block_cnt=None)),
            ("mask_block_cnt and mask_block_idx must be provided", changed(mask_block_idx=None)),
            (f"{same} m-block dimension 2 does not match", rows(lambda t: less(t, 2))),
            (f"{same} must share the same m-block dimension", changed(mask_block_cnt=lambda t: less(t, 2))),
            (f"{same} head dim must be 4 or 1", rows(lambda t: less(t, 1))),
            (f"{same} batch dim must be 2 or 1", rows(lambda t: torch.cat([t, less(t, 0)]))),
            (f"{same} must have shapes", changed(mask_block_idx=lambda t: t.select(0, 0)),
             changed(mask_block_cnt=lambda t: t.unsqueeze(0).unsqueeze(0))),
            ("mask_block tensors must live on CUDA", lambda lists: SIDES[0]),
        )
    )  # fmt: skip


FORWARD = (
    *shapes(BOTH[0]),
    (BOTH[0], ValueError, "block size 100, which must", changed(block_size=(100, 128))),
    (BOTH[0], ValueError, r"sparse_block_size\[1\] to be a multiple", changed(block_size=(128, 100))),
    (BOTH[0], ValueError, "m-block dimension 3 does not match", changed(block_size=(256, 128))),
    (BOTH[0], ValueError, r"sparse_block_size\[1\].*multiple of tile_n=80",
     lambda lists: Together(qkv("cuda", D=256), block_sparse_tensors=lists)),
)  # fmt: skip
HALF_TILES = (
    (BOTH[0], NotImplementedError, "block_size .*, 128. on sm_100.* of a multiple of 128 queries",
     changed(block_size=(64, 128)), changed(block_size=(192, 128))),
)  # fmt: skip
FORWARD_SM100 = (
    *HALF_TILES,
    (BOTH[0], ValueError, "block size 96.*multiple of 128", changed(block_size=(96, 128))),
    (BOTH[0], ValueError, r"sparse_block_size\[1\].*tile_n=128", changed(block_size=(128, 64))),
    ("qv", NotImplementedError, "block sparsity is not supported with qv",
     lambda _: Together(qkv("cuda", Dv=512), qv=torch.empty(B, TQ, HQ, 512, dtype=torch.bfloat16, device="cuda"))),
)  # fmt: skip


def unread(words: str) -> tuple[Row]:
    """Lists for a kernel that reads none."""
    return ((BOTH[0], NotImplementedError, words, lambda _: on_gpu(SIDES[0])),)


def packed_rows(form: str) -> tuple[Row, ...]:
    """Lists in a form that fit no pack."""
    every = (("mask_block tensors must have dtype torch.int32", changed(mask_block_cnt=torch.Tensor.long)),)
    if form == "padded":
        every += (
            ("block_size is None: padded lists of packed", changed(block_size=None)),
            ("mask_block_cnt has 3 rows of 64 tokens", changed(block_size=(64, 128))),
        )
    else:
        every += (
            ("requires block_sparse_tensors.cu_total_m_b", changed(cu_total_m_blocks=None)),
            (r"cu_total_m_blocks must have shape \(4,\)", changed(cu_total_m_blocks=lambda t: less(t, 0, 2))),
            ("cu_total_m_blocks must have dtype torch.int32 or", changed(cu_total_m_blocks=torch.Tensor.float)),
            ("mask_block_cnt and mask_block_idx must be provided", changed(mask_block_idx=None)),
            ("mask_block_cnt with shape", changed(mask_block_cnt=lambda t: less(t, 0))),
        )
    if form == "compact":
        every += (
            ("mask_block_idx with shape", changed(mask_block_idx=lambda t: less(t, 1))),
            ("full_block_idx has 2 dimensions", changed(full_block_idx=lambda t: t.select(1, 0))),
            ("dq_write_order with .* expanded to expected",
             lambda lists: lists._replace(dq_write_order=lists.mask_block_idx.repeat(1, 1, 2))),
            ("mask_block_idx.*contiguous in its last dimension",
             changed(mask_block_idx=lambda t: t.as_strided(t.shape, (t.stride(0), 1, t.shape[1])))),
        )  # fmt: skip
    if form in ("stacked", "ragged"):
        every += (
            ("cu_block_idx_offsets|requires bl", changed(cu_block_idx_offsets=None)),
            ("cu_block_idx_offsets must", changed(cu_block_idx_offsets=lambda t: less(t, -1, 2))),
            ("cu_block_idx_offsets must have dtype", changed(cu_block_idx_offsets=torch.Tensor.float)),
            ("dq_write_order_full .*must be on the same device", changed(dq_write_order_full=torch.zeros(1, 1).int())),
            ("spt requires dq_write_order to be provided", changed(spt=True)),
        )
    return tuple((BOTH[0], ValueError, *row) for row in every)


def checked(device: str) -> dict[str, Any]:
    q, k = (torch.empty(1).expand(B, T, heads, D) for T, heads in ((TQ, HQ), (TK, HKV)))
    locks = compute_dq_write_order(*SIDES[0][:4], *SIDES[1][:4])
    ordered = SIDES[1]._replace(dq_write_order=locks[0], dq_write_order_full=locks[1], spt=False)
    return dict(forward=SIDES[0], backward=ordered, q=q, k=k)


def public_checked(device: str) -> dict[str, Any]:
    arguments = checked(device)
    return dict(q=arguments["q"], k=arguments["k"], v=torch.empty(1).expand(B, TK, HKV, D))


WRONG_ENTRY = "(forward|backward) (mask_block|full_block)"
NOT_CHECKED = (("page_table", NotImplementedError, "validate=True with page_table", torch.zeros(1, 1).int()),)


ORDERED = checked("cpu")["backward"]
SPOILT = spoil("listed twice", SIDES[0], ORDERED, seed=1)  # in every known way: `fuzz/properties/lists.py`
PUBLIC_CHECK = ((BOTH[0], ValueError, WRONG_ENTRY, Together(zip(BOTH, SPOILT, strict=True), validate=True)),)
PLANNED = plan_backward(SIDES[1], num_heads=HQ, num_heads_kv=HKV, num_q_blocks=M)


def dense_backward(device: str, packed: bool = False, **sizes: int) -> dict[str, Any]:
    arguments = qkv(device, packed, **sizes)
    q, v = arguments["q"], arguments["v"]
    o = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=device)
    return arguments | dict(out=o, dout=o, lse=torch.empty(*q.shape[:-3], HQ, q.shape[-3], device=device))


def backward_call(device: str, **sizes: int) -> dict[str, Any]:
    return dense_backward(device, **sizes) | dict(deterministic=True, block_sparse_tensors=on_gpu(ORDERED))


HEAD_DIMS = tuple(
    ("q", NotImplementedError, f"multiples of 32, got head_dim={D}, head_dim_v={Dv}",
     lambda q, sizes=dict(D=D, Dv=Dv): Together(dense_backward("cuda", packed=True, **sizes)))
    for D, Dv in ((72, 72), (80, 80), (64, 80))
)  # fmt: skip
FEW_KEYS = tuple(
    (BOTH[0], ValueError, f"SM100.*head_dim={D} requires 2CTA; .* even number of tile_n={block_k} tiles",
     lambda lists, sizes=dict(D=D, Dv=Dv), block=(256, block_k): Together(
         backward_call("cuda", **sizes), block_sparse_tensors=lists._replace(block_size=block)))
    for D, Dv, block_k in ((192, 128, 128), (256, 256, 64))
)  # fmt: skip


def other_locks(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Any]:
    return changed(dq_write_order=change)


ORDER = tuple(
    (BOTH[0], ValueError, *row)
    for row in (
        ("requires dq_write_order in", changed(dq_write_order=None, spt=None)),
        ("requires dq_write_order (in|to be provided)", changed(dq_write_order=None)),
        ("requires dq_write_order_full", changed(dq_write_order_full=None)),
        ("deterministic block-sparse backward requires block_sparse_tensor.*spt", changed(spt=None)),
        ("spt must be a bool when provided", changed(spt=1)),
        ("dq_write_order must have dtype torch.int32", other_locks(torch.Tensor.long)),
        ("dq_write_order(_full)? with shape|cannot be expanded to expected shape",
         *(other_locks(lambda t, d=d: torch.cat([t, t], d)) for d in (-1, 2)),
         changed(dq_write_order_full=lambda t: less(t, -1))),
        ("dq_write_order must be on", other_locks(lambda t: torch.zeros(t.shape, dtype=torch.int32))),
    )
)  # fmt: skip
BACKWARD = ORDER + tuple(
    (BOTH[0], ValueError, *row)
    for row in (
        ("needs a plan that was made with", lambda lists: on_gpu(PLANNED)),
        (r"sparse_block_size\[0\] to be a multiple of", changed(block_size=(100, 128))),
        (r"expects sparse_block_size\[1\]=128", changed(block_size=(128, 96))),
        ("mask_block tensors must have dtype torch.int32", changed(mask_block_cnt=torch.Tensor.long)),
        ("the same batches and heads, or 1, got", changed(mask_block_cnt=lambda t: less(t, 1))),
    )
)
LAYOUT = (
    ("q", ValueError, r"q has shape \(2, 0, 4, 64\)", lambda x: x.narrow(1, 0, 0)),
    ("learnable_sink", ValueError, "learnable_sink cannot be given together with shared", torch.zeros(HQ)),
    ("seqused_q", ValueError, "seqused_q cannot be given together with shared", torch.zeros(B, dtype=torch.int32)),
)


def converted(device: str) -> dict[str, Any]:
    arguments = qkv(device)
    layout = backward_layout(**arguments).dq
    accum = torch.empty(layout.shape, dtype=torch.float32, device=device)
    return dict(accum=accum, layout=layout, out=torch.empty_like(arguments["q"]), scale=1.0)


CONVERT = (
    ("accum", ValueError, "accum is torch.float", lambda x: x.half(), lambda x: less(x, 0)),
    ("out", ValueError, "out is torch.bfloat16", lambda x: less(x, 1), lambda x: less(x, 2)),
    ("cu_seqlens", ValueError, "cu_seqlens is .*, expected one", torch.zeros(3, dtype=torch.int32)),
)


def shared_call(device: str, **sizes: int) -> dict[str, Any]:
    arguments = qkv(device, **sizes)
    layout = backward_layout(**arguments)
    rows = torch.empty(layout.row_shape, dtype=torch.float32, device=device)
    more = dict(out=None, lse=None, dout=torch.empty_like(arguments["q"]), shared=SharedBackward(layout, rows, rows))
    return arguments | more


SHARED = (
    ("shared", ValueError, "shared.layout is None, expected this call's backward_layout", changed(layout=None)),
    ("shared", ValueError, "shared.layout.dq is AccumLayout",
     changed(layout=lambda x: replace(x, dq=replace(x.dq, heads=(B, 1))))),
    ("shared", ValueError, "shared.dpsum is None, expected torch.float32", changed(dpsum=None)),
    ("shared", ValueError, "shared.lse_log2 is None, expected torch.float32", changed(lse_log2=None)),
    ("shared", ValueError, r"shared.dpsum is torch.float(16|32) \(2, [43], ",
     changed(dpsum=torch.Tensor.half), changed(dpsum=lambda x: less(x, 1))),
    ("shared", ValueError, "shared.dq is torch.float32", lambda x: x._replace(dq=x.dpsum)),
    ("shared", ValueError, "shared.dk and shared.dv: expected both or neither",
     lambda x: x._replace(dk=torch.empty_like(x.dpsum))),
    ("dk", ValueError, "shared.dk: without GQA", lambda _: without_gqa()),
    ("dlse", ValueError, "dlse cannot be given together with shared", torch.ones(1)),
)  # fmt: skip


def without_gqa() -> Together:
    arguments = shared_call("cuda", Hkv=HQ)
    accum = torch.empty(arguments["shared"].layout.dq.shape, dtype=torch.float32, device="cuda")
    return Together(arguments, shared=arguments["shared"]._replace(dq=accum, dk=accum, dv=accum))


PLAN_FORMS = (
    torch.Tensor.long, torch.Tensor.float, lambda t: t[0], lambda t: t[:0], lambda t: t[:, :5],
    lambda t: torch.cat([t, t[:, :2]], 1), lambda t: t.t().contiguous().t(), lambda t: t.to("meta"),
)  # fmt: skip
PLAN = (
    ("lists", ValueError, r"plan is torch.* expected torch.int32 \[work tiles, 6\] on cpu",
     *(changed(plan=form) for form in PLAN_FORMS)),
    ("arch", NotImplementedError, "plan on sm_1[012]0: only backward on SM90 follows a plan", 100, 110, 120),
    ("packed_k", NotImplementedError, "a plan of padded lists for packed sequences", True),
    ("batch", ValueError, "lists for 2 sequences, the call has 3", 3),
)  # fmt: skip
PLAN_SM100 = ((BOTH[0], NotImplementedError, "only backward on SM90 follows a plan", lambda _: on_gpu(PLANNED)),)
NO_BLOCKS = "blocks of .* queries and .* keys: the dq pass supports multiples of 128"
BAD_BLOCKS = [changed(block_size=size) for size in ((64, 128), (128, 96), (100, 128))]


def asked_for(device: str) -> dict[str, Any]:
    forward, backward = (on_gpu(each) for each in SIDES)
    lists = dict(block_sparse_tensors_fwd=forward, block_sparse_tensors=backward)
    return dense_backward(device) | dict(passes=2) | lists


ONE_LIST = both_directions(Blocks(B=B, H=1, M=M, N=N, pattern="full"))[1]
OF_GROUPS = plan_backward(ONE_LIST, num_heads=HQ, num_heads_kv=HKV, num_q_blocks=M, per_group=True)


def without(device: str) -> dict[str, Any]:
    arguments = asked_for(device)
    del arguments["passes"], arguments["block_sparse_tensors_fwd"]
    return arguments | dict(without_dq=True)


def score(s: Any, b: Any, h: Any, i: Any, j: Any, aux: Any) -> Any:
    return s


ALONE = "{} cannot be given together with passes=2"
BWD, FWD = "block_sparse_tensors", "block_sparse_tensors_fwd"
TWO = (
    ("passes", ValueError, "passes is .*, expected 1, 2 or None", 0, 3, 2.0, "2", True),
    (f"{BWD} {FWD}", NotImplementedError, "passes=2: two passes loop over block lists of both directions", None),
    (BWD, NotImplementedError, "passes=2: no tile for backward lists of blocks", changed(block_size=(128, 96))),
    (FWD, NotImplementedError, f"passes=2: {NO_BLOCKS}", *BAD_BLOCKS),
    *shapes(FWD),
    ("score_mod", ValueError, ALONE, score),
    ("softcap", ValueError, ALONE, 3.0),
    ("aux_scalars", ValueError, ALONE, (1,)),
    ("learnable_sink", ValueError, ALONE, torch.zeros(HQ)),
    ("compress_factor", ValueError, ALONE, Together(causal=True, compress_factor=16)),
)
WITHOUT = (
    (BWD, NotImplementedError, "without_dq=True without block lists", None),
    (BWD, ValueError, r"expects sparse_block_size\[1\]=128", changed(block_size=(128, 96))),
    ("dq", ValueError, "dq cannot be given together with without_dq=True", torch.empty(1)),
    ("learnable_sink", ValueError, "learnable_sink cannot be given together with without_dq=True", torch.zeros(HQ)),
    ("without_dq", *NOT_A_BOOL, 0),
    (BWD, ValueError, "lists for each of 4 query heads",
     lambda lists: on_gpu(SIDES[1]._replace(plan=OF_GROUPS.plan, plan_per_group=True))),
    (BWD, NotImplementedError, "one pass loops over query heads one by one",
     lambda lists: Together(block_sparse_tensors=on_gpu(OF_GROUPS), without_dq=False)),
)  # fmt: skip
TWO_PASSES = (
    Table("backward of flash_attn_func, two passes", _flash_attn_bwd, asked_for, TWO, "cuda"),
    Table("backward of flash_attn_func, without dq", _flash_attn_bwd, without, WITHOUT, "cuda"),
    Table("backward of flash_attn_func, without dq on sm_100", _flash_attn_bwd, backward_call,
          (("without_dq", NotImplementedError, "on sm_100", True),), "cuda", arch=100),
)  # fmt: skip
TABLES = (
    Table("flash_attn_func, compressed", flash_attn_func, partial(compressed, packed=False), COMPRESSED, "cuda"),
    Table("flash_attn_varlen_func, compressed", flash_attn_varlen_func, partial(compressed, packed=True), COMPRESSED,
          "cuda"),
    Table("flash_attn_func, positions", _flash_attn_fwd, positioned, POSITIONS, "cuda"),
    Table("flash_attn_func, a gradient with lists", flash_attn_func, one_sided, ONE_SIDED, "cuda"),
    Table("flash_attn_func, lists", flash_attn_func, with_lists, FORWARD, "cuda"),
    Table("flash_attn_func, lists on sm_100", flash_attn_func, with_lists, FORWARD_SM100, "cuda", arch=100),
    *(
        Table(
            f"flash_attn_func, lists on sm_{arch}", flash_attn_func, qkv,
            unread(f"Block sparsity not supported on SM {arch // 10}.0: only kernels for"), "cuda", arch=arch,
        )
        for arch in (80, 120)
    ),
    Table(
        "backward of flash_attn_func, lists on sm_120", _flash_attn_bwd, dense_backward,
        unread("Block sparsity backward not supported on SM 12.0"), "cuda", arch=120,
    ),
    *(
        Table(f"flash_attn_varlen_func, {form} lists", flash_attn_varlen_func, partial(with_lists, form=form),
              packed_rows(form), "cuda")
        for form in FORMS
    ),
    Table("validate=True, paged keys", partial(validate_call, True), checked, NOT_CHECKED),
    Table("flash_attn_func, validate=True", flash_attn_func, public_checked, PUBLIC_CHECK),
    Table("check_plan", check_plan, lambda device: dict(lists=PLANNED, arch=90, batch=B, packed_k=False), PLAN),
    Table("backward of flash_attn_varlen_func", _flash_attn_bwd, partial(dense_backward, packed=True), HEAD_DIMS,
          "cuda"),
    Table("backward of flash_attn_func, deterministic", _flash_attn_bwd, backward_call, BACKWARD, "cuda"),
    Table(
        "backward of flash_attn_func, deterministic on sm_100", _flash_attn_bwd, backward_call,
        (*ORDER, *FEW_KEYS, *PLAN_SM100, *HALF_TILES), "cuda", arch=100,
    ),
    Table("backward_layout", backward_layout, qkv, LAYOUT, "cuda"),
    Table("convert", convert, converted, CONVERT, "cuda"),
    Table("backward of flash_attn_func, shared", _flash_attn_bwd, shared_call, SHARED, "cuda"),
    *TWO_PASSES,
)  # fmt: skip
