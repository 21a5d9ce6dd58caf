"""Wrong calls of attention with what the fork adds to it: compressed-causal masking, block lists, their checks."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch

from flash_attn.cute import flash_attn_func, flash_attn_varlen_func
from flash_attn.cute.backward_plan import plan_backward
from flash_attn.cute.block_lists import compute_dq_write_order
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.call_validation import validate_call
from flash_attn.cute.interface import _flash_attn_bwd
from flash_attn.cute.shared_backward import SharedBackward, backward_layout, convert
from fuzz.blocks import both_directions, packed_lists
from fuzz.case import FORMS, Blocks, Packed
from fuzz.corrupt import FAULTS, PACKED_FAULTS, spoil
from fuzz.wrong_calls import NOT_A_SCALE, Changed, Spec

B, M, N, HQ, HKV, D = 2, 3, 2, 4, 2, 64
TQ, TK = M * 128, N * 128
LENGTHS = ((300, 200), (0, 64), (129, 256))
Lists = BlockSparseTensorsTorch


@lru_cache(maxsize=None)
def sides(heads: int = HQ) -> tuple[Lists, Lists]:
    return both_directions(Blocks(B=B, H=heads, M=M, N=N, pattern="full", seed=1))


@lru_cache(maxsize=None)
def packed_sides(form: str) -> tuple[Lists, Lists]:
    return packed_lists(Packed(lengths=LENGTHS, form=form, block=(128, 128), heads=HQ, pattern="full"))


def moved(lists: Lists, device: str) -> Lists:
    if device == "cpu":
        return lists
    return lists._replace(**{n: _on(t, device) for n, t in lists._asdict().items() if isinstance(t, torch.Tensor)})


def _on(tensor: torch.Tensor, device: str) -> torch.Tensor:
    if torch.cuda.is_available():
        return tensor.to(device)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)  # fake, where no GPU is


def less(tensor: torch.Tensor, dim: int, by: int = 1) -> torch.Tensor:
    """Without the last of a dimension; indexing would ask a fake tensor's GPU."""
    return tensor.narrow(dim, 0, tensor.shape[dim] - by)


def qkv(device: str, packed: bool = False, **options: Any) -> dict[str, Any]:
    starts = [[0, *accumulate(pair[side] for pair in LENGTHS)] for side in (0, 1)]
    leads = [(ends[-1],) for ends in starts] if packed else [(B, TQ), (B, TK)]
    options = dict(dtype=torch.bfloat16, device=device) | options
    q = torch.empty(*leads[0], HQ, D, **options)
    k, v = (torch.empty(*leads[1], HKV, D, **options) for _ in range(2))
    given: dict[str, Any] = dict(q=q, k=k, v=v)
    if packed:
        for name, ends, side in zip("qk", starts, (0, 1), strict=True):
            given[f"cu_seqlens_{name}"] = torch.tensor(ends, dtype=torch.int32, device=device)
            given[f"max_seqlen_{name}"] = max(pair[side] for pair in LENGTHS)
    return given


WORDS = ("mask_block", "full_block", "block_size", "Block sparse tensors", "Block sparse tensorsforward")
NAMED = {"block_sparse_tensors": ("block sparse tensors", *WORDS)}
BACKWARD_NAMED = {
    "block_sparse_tensors": (
        *NAMED["block_sparse_tensors"],
        "block_sparse_tensors_bwd",
        "dq_write_order",
        "spt",
        "plan",
    ),
}
FACTOR = {"zero": 0, "negative": -1, "a float": 1.5, "a string": "2", "None": None, "True": True, "too large": 1 << 23}
OFFSET = {"a float": 0.5, "a string": "0", "None": None, "True": True, "too large": 1 << 30, "too small": -(1 << 30)}


def compressed(device: str, packed: bool = False) -> dict[str, Any]:
    return qkv(device, packed) | dict(causal=True, compress_factor=16, compress_offset=15)


def compress_spec(name: str, call: Any, packed: bool) -> Spec:
    return Spec(
        name,
        lambda **given: call(**given),
        lambda device: compressed(device, packed),
        {"compress_factor": FACTOR, "compress_offset": OFFSET, "window_size": {"a window": (100, 0)}}
        | {"softmax_scale": NOT_A_SCALE | {"a tensor": torch.ones(1)}},
        together={
            "not causal": ("compress_factor", dict(causal=False)),
            "an offset, not causal": ("compress_offset", dict(causal=False, compress_factor=1)),
        },
        device="cuda",
    )


def one_sided(device: str) -> dict[str, Any]:
    given = qkv(device)
    return given | dict(q=given["q"].requires_grad_())


GRADIENT = Spec(
    "flash_attn_func, a gradient with lists",
    lambda **given: flash_attn_func(**given),
    one_sided,
    together={
        "forward lists alone": ("block_sparse_tensors_bwd", dict(block_sparse_tensors=sides()[0])),
        "backward lists alone": ("block_sparse_tensors", dict(block_sparse_tensors_bwd=sides()[1])),
    },
    device="cuda",
)


def with_lists(device: str) -> dict[str, Any]:
    return qkv(device) | dict(block_sparse_tensors=moved(sides()[0], device))


def changed(**more: Any) -> Changed:
    """Fields of lists replaced by what a function makes of them."""
    return Changed(
        lambda lists: lists._replace(**{n: f(getattr(lists, n)) if callable(f) else f for n, f in more.items()})
    )


SHAPES = {
    "int64 counts": changed(mask_block_cnt=lambda t: t.long()),
    "int64 indices": changed(mask_block_idx=lambda t: t.long()),
    "int64 full indices": changed(full_block_idx=lambda t: t.long()),
    "full counts without indices": changed(full_block_idx=None),
    "full indices without counts": changed(full_block_cnt=None),
    "counts without indices": changed(mask_block_idx=None),
    "a row less": changed(mask_block_cnt=lambda t: less(t, 2), mask_block_idx=lambda t: less(t, 2)),
    "other rows of counts": changed(mask_block_cnt=lambda t: less(t, 2)),
    "three heads": changed(mask_block_cnt=lambda t: less(t, 1), mask_block_idx=lambda t: less(t, 1)),
    "three batches": changed(
        mask_block_cnt=lambda t: torch.cat([t, less(t, 0)]), mask_block_idx=lambda t: torch.cat([t, less(t, 0)])
    ),
    "indices of three dimensions": changed(mask_block_idx=lambda t: t.select(0, 0)),
    "counts of five dimensions": changed(mask_block_cnt=lambda t: t.unsqueeze(0).unsqueeze(0)),
    "blocks of 100 queries": changed(block_size=(100, 128)),
    "blocks of 100 keys": changed(block_size=(128, 100)),
    "on the CPU": Changed(lambda lists: sides()[0]),
    "lists of other blocks": changed(block_size=(256, 128)),
}
FORWARD = Spec(
    "flash_attn_func, lists",
    lambda **given: flash_attn_func(**given),
    with_lists,
    {"block_sparse_tensors": SHAPES},
    NAMED,
    device="cuda",
)


def packed_with_lists(device: str, form: str) -> dict[str, Any]:
    return qkv(device, packed=True) | dict(block_sparse_tensors=moved(packed_sides(form)[0], device))


PACKED_SHAPES = {
    "no rows before": changed(cu_total_m_blocks=None),
    "rows before of fewer sequences": changed(cu_total_m_blocks=lambda t: less(t, 0, 2)),
    "float rows before": changed(cu_total_m_blocks=lambda t: t.float()),
    "int64 counts": changed(mask_block_cnt=lambda t: t.long()),
    "counts without indices": changed(mask_block_idx=None),
    "three heads": changed(mask_block_cnt=lambda t: less(t, 0)),
}
START_SHAPES = {
    "no starts": changed(cu_block_idx_offsets=None),
    "starts of another length": changed(cu_block_idx_offsets=lambda t: less(t, -1, 2)),
    "float starts": changed(cu_block_idx_offsets=lambda t: t.float()),
}


def packed_spec(form: str) -> Spec:
    wrong = {
        "padded": {"no block size": changed(block_size=None), "few rows": changed(block_size=(64, 128)), "int64 counts":
                   PACKED_SHAPES["int64 counts"]},
        "compact": PACKED_SHAPES | {"rows less": changed(mask_block_idx=lambda t: less(t, 1))},
    }.get(form, PACKED_SHAPES | START_SHAPES)  # fmt: skip
    return Spec(
        f"flash_attn_varlen_func, {form} lists",
        lambda **given: flash_attn_varlen_func(**given),
        lambda device: packed_with_lists(device, form),
        {"block_sparse_tensors": wrong},
        NAMED | {"block_sparse_tensors": (*NAMED["block_sparse_tensors"], "cu_total_m_blocks", "cu_block_idx_offsets")},
        device="cuda",
    )


def checked(device: str) -> dict[str, Any]:
    q, k = (torch.empty(1).expand(B, T, heads, D) for T, heads in ((TQ, HQ), (TK, HKV)))
    locks = compute_dq_write_order(*sides()[0][:4], *sides()[1][:4])
    ordered = sides()[1]._replace(dq_write_order=locks[0], dq_write_order_full=locks[1], spt=False)
    return dict(forward=sides()[0], backward=ordered, q=q, k=k)


def spoilt(given: dict[str, Any], faults: tuple[str, ...]) -> dict[str, tuple[str, dict[str, Any]]]:
    found = {}
    for fault in faults:
        pairs = (spoil(fault, given["forward"], given["backward"], seed) for seed in range(40))
        pair = next((pair for pair in pairs if pair is not None), None)
        if pair is not None:
            found[fault] = ("forward", dict(zip(("forward", "backward"), pair, strict=True)))
    return found


def packed_checked(form: str) -> dict[str, Any]:
    tensors = qkv("cpu", packed=True)
    names = ("q", "k", "cu_seqlens_q", "cu_seqlens_k")
    forward, backward = packed_sides(form)
    return dict(forward=forward, backward=backward) | {name: tensors[name] for name in names}


def check_spec(name: str, good: Any, faults: tuple[str, ...]) -> Spec:
    return Spec(
        f"validate=True, {name}",
        lambda forward, backward, q, k, **more: validate_call(True, forward, backward, q, k, **more),
        lambda device: good(),
        also={"forward": ("backward", "block_size", "block_sparse_tensors", "block_sparse_tensors_bwd")},
        together=spoilt(good(), faults),
    )


CHECKED = Spec(
    "flash_attn_func, validate=True",
    lambda **given: flash_attn_func(**given),
    lambda device: dict(q=checked(device)["q"], k=checked(device)["k"], v=torch.empty(1).expand(B, TK, HKV, D)),
    together={
        label: ("block_sparse_tensors", dict(zip(("block_sparse_tensors", "block_sparse_tensors_bwd"), pair.values()))
                | dict(validate=True))
        for label, (_, pair) in spoilt(checked("cpu"), FAULTS).items()
    },
    also={"block_sparse_tensors": ("forward", "backward")},
)  # fmt: skip


ORDERED = checked("cpu")["backward"]


def backward_call(device: str) -> dict[str, Any]:
    given = qkv(device)
    o = torch.empty_like(given["q"])
    lse = torch.empty(B, HQ, TQ, dtype=torch.float32, device=device)
    more = dict(out=o, dout=o, lse=lse, deterministic=True, block_sparse_tensors=moved(ORDERED, device))
    return given | more


PLANNED = plan_backward(sides()[1], num_heads=HQ, num_heads_kv=HKV, num_q_blocks=M)
ORDERS = {
    "no lock values": changed(dq_write_order=None, spt=None),
    "no lock values of full blocks": changed(dq_write_order_full=None),
    "no direction": changed(spt=None),
    "a direction that is no bool": changed(spt=1),
    "int64 lock values": changed(dq_write_order=lambda t: t.long()),
    "narrower lock values": changed(dq_write_order=lambda t: torch.cat([t, t], -1)),
    "lock values of more rows": changed(dq_write_order=lambda t: torch.cat([t, t], 2)),
    "lock values on the CPU": changed(dq_write_order=lambda t: torch.zeros(t.shape, dtype=torch.int32)),
    "a plan without lock values": Changed(lambda lists: moved(PLANNED, lists.mask_block_cnt.device.type)),
    "blocks of 100 queries": changed(block_size=(100, 128)),
    "blocks of 96 keys": changed(block_size=(128, 96)),
    "int64 counts": changed(mask_block_cnt=lambda t: t.long()),
    "three heads": changed(mask_block_cnt=lambda t: less(t, 1)),
}
BACKWARD = Spec(
    "backward of flash_attn_func, deterministic",
    lambda q, k, v, out, dout, lse, **more: _flash_attn_bwd(q, k, v, out, dout, lse, **more),
    backward_call,
    {"block_sparse_tensors": ORDERS},
    BACKWARD_NAMED,
    device="cuda",
)
PAGED = Spec(
    "validate=True, paged keys",
    lambda forward, backward, q, k, **more: validate_call(True, forward, backward, q, k, **more),
    checked,
    {"page_table": {"given": torch.zeros(1, 1, dtype=torch.int32)}},
)

LAYOUT = Spec(
    "backward_layout",
    lambda q, k, v, **options: backward_layout(q, k, v, **options),
    qkv,
    {
        "q": {"no tokens": Changed(lambda x: x.narrow(1, 0, 0))},
        "learnable_sink": {"given": torch.zeros(HQ)},
        "seqused_q": {"given": torch.zeros(B, dtype=torch.int32)},
    },
    device="cuda",
)


def converted(device: str) -> dict[str, Any]:
    given = qkv(device)
    layout = backward_layout(**given).dq
    return dict(
        accum=torch.empty(layout.shape, dtype=torch.float32, device=device),
        layout=layout,
        out=torch.empty_like(given["q"]),
        scale=1.0,
    )


CONVERT = Spec(
    "convert",
    lambda accum, layout, out, **more: convert(accum, layout, out, **more),
    converted,
    {
        "accum": {"half precision": Changed(lambda x: x.half()), "smaller": Changed(lambda x: less(x, 0))},
        "out": {"fewer tokens": Changed(lambda x: less(x, 1)), "fewer heads": Changed(lambda x: less(x, 2))},
        "cu_seqlens": {"for a batch": torch.zeros(3, dtype=torch.int32)},
    },
    device="cuda",
)


def shared_call(device: str) -> dict[str, Any]:
    given = qkv(device)
    layout = backward_layout(**given)
    rows = torch.empty(layout.row_shape, dtype=torch.float32, device=device)
    return given | dict(dout=torch.empty_like(given["q"]), shared=SharedBackward(layout, rows, rows))


SHARED = Spec(
    "backward of flash_attn_func, shared",
    lambda q, k, v, dout, **more: _flash_attn_bwd(q, k, v, None, dout, None, **more),
    shared_call,
    {
        "shared": {
            "no layout": Changed(lambda x: x._replace(layout=None)),
            "a layout of fewer heads": Changed(
                lambda x: x._replace(layout=replace(x.layout, dq=replace(x.layout.dq, heads=(B, 1))))
            ),
            "no row sums": Changed(lambda x: x._replace(dpsum=None)),
            "no log-sum-exp": Changed(lambda x: x._replace(lse_log2=None)),
            "half row sums": Changed(lambda x: x._replace(dpsum=x.dpsum.half())),
            "fewer row sums": Changed(lambda x: x._replace(dpsum=less(x.dpsum, 1))),
            "an accumulator of row sums": Changed(lambda x: x._replace(dq=x.dpsum)),
            "dk without dv": Changed(lambda x: x._replace(dk=torch.empty_like(x.dpsum))),
        },
    },
    device="cuda",
)
SPECS = (
    compress_spec("flash_attn_func, compressed", flash_attn_func, False),
    compress_spec("flash_attn_varlen_func, compressed", flash_attn_varlen_func, True),
    GRADIENT,
    FORWARD,
    *(packed_spec(form) for form in FORMS),
    check_spec("lists", lambda: checked("cpu"), FAULTS),
    *(check_spec(f"{form} lists", lambda form=form: packed_checked(form), PACKED_FAULTS) for form in FORMS),
    CHECKED,
    BACKWARD,
    PAGED,
    LAYOUT,
    CONVERT,
    SHARED,
)
