"""Lists that are wrong in one place: an error that names the place and the value, in every form that lists come in."""

import re
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch

from flash_attn.cute.block_lists import lists_from_blocks, lists_from_dense, transpose_lists
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.lists.backward_plan import plan_backward
from flash_attn.cute.lists.validate_calls import ALWAYS, validate_call, validate_lists
from flash_attn.cute.lists.write_order import compute_dq_write_order
from fuzz.attention import make_inputs
from fuzz.attention_lists import both_directions, sides
from fuzz.blocks import each_tensor
from fuzz.case import Blocks, Packed

Lists = BlockSparseTensorsTorch


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def said(check: Callable[..., None], *args: Any, **options: Any) -> str:
    """The message of the refusal."""
    with pytest.raises(ValueError) as error:
        check(*args, **options)
    return str(error.value)


# Lists of a batch: 5 query blocks of 128, 4 key blocks of 64; what is listed shows in the lists below.
MASK = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [2, 1, 1, 0], [0, 0, 0, 0], [2, 0, 2, 1]])
SIZES: dict[str, Any] = dict(seqlen_q=600, seqlen_k=256, num_heads=4, num_heads_kv=2, batch_size=3)


def batch_lists() -> tuple[Lists, Lists]:
    """Writable lists [1, 4, ...] with semaphore values, two entries wider than needed where capacity allows."""
    dense = MASK.repeat_interleave(128, 0)[:600].repeat_interleave(64, 1)
    dense = (dense == 2) | ((dense == 1) & (torch.arange(256) % 64 == 0))
    forward = lists_from_dense(dense.expand(1, 4, -1, -1), (128, 64), width=4)
    backward = transpose_lists(forward, 4, width=5)
    order = compute_dq_write_order(*forward[:4], *backward[:4])
    backward = backward._replace(dq_write_order=order[0], dq_write_order_full=order[1])
    return tuple(each_tensor(lists, lambda t: t.contiguous().clone()) for lists in (forward, backward))


def message(*lists: Lists | None, **options: Any) -> str:
    return said(validate_lists, *lists, **SIZES | options)


OUT = ", expected a key block of 0 .. 3"
CAPACITY = ", expected 0 .. 4, the capacity of its row"
TRANSPOSE = "backward lists must be the transpose of forward lists"
LOCKS = "semaphore values of a query block are 0, 1, 2, ..., each once"
# What is written, in turn, as the message has the last of it; and what follows that.
MISTAKES = [
    ("forward full_block_cnt[0, 2, 4] = -1", CAPACITY),
    ("forward full_block_cnt[0, 2, 4] = 5", CAPACITY),
    ("forward mask_block_idx[0, 1, 2, 1] = -3", OUT),
    ("forward mask_block_idx[0, 1, 2, 1] = 4", OUT),
    ("forward mask_block_idx[0, 1, 2, 1] = 1073741824", OUT),
    ("backward full_block_idx[0, 3, 0, 1] = 5", ", expected a query block of 0 .. 4"),
    (
        "forward mask_block_idx[0, 0, 2, 1] = 1",
        " is listed twice for query block 2, also in forward mask_block_idx[0, 0, 2, 0]",
    ),
    (
        "backward full_block_idx[0, 1, 0, 1] = 1",
        " is listed twice for key block 0, also in backward mask_block_idx[0, 1, 0, 1]",
    ),
    (
        "forward full_block_cnt[0, 0, 4] = 1; forward mask_block_cnt[0, 0, 4] = 2; "
        "forward mask_block_idx[0, 0, 4, 1] = 2",
        " is a mask block, but a full block in the backward lists",
    ),
    (
        "backward mask_block_cnt[0, 2, 3] = 2; backward mask_block_idx[0, 2, 3, 1] = 3",
        f" is not in the forward lists: query block 3 lacks key block 3; {TRANSPOSE}",
    ),
    (
        "backward mask_block_cnt[0, 2, 1] = 1; forward mask_block_idx[0, 2, 2, 0] = 1",
        f" is not in the backward lists: key block 1 lacks query block 2; {TRANSPOSE}",
    ),
    ("backward dq_write_order_full[0, 0, 2, 0] = 2", f" for query block 4, expected 1: the {LOCKS}"),
]


@pytest.mark.parametrize(("writes", "expected"), MISTAKES)
def test_one_wrong_number(writes: str, expected: str) -> None:
    both = dict(zip(("forward", "backward"), batch_lists()))
    for write in writes.split("; "):
        side, field, at, value = re.fullmatch(r"(\w+) (\w+)\[(.*)\] = (.*)", write).groups()
        getattr(both[side], field)[tuple(map(int, at.split(", ")))] = int(value)
    if field != "dq_write_order_full":
        both["backward"] = both["backward"]._replace(dq_write_order=None, dq_write_order_full=None)
    assert message(*both.values()) == f"{write}{expected}"


def test_rising() -> None:
    forward, backward = batch_lists()
    forward.mask_block_idx[0, 3, 2, :2] = torch.tensor([2, 1])
    validate_lists(forward, backward, **SIZES)
    expected = "forward mask_block_idx[0, 3, 2, 1] = 1 comes after 2, expected rising indices"
    assert message(forward, backward, ascending=True) == expected


def test_block_sizes_that_differ_are_not_compared() -> None:
    forward, _ = batch_lists()
    half = lists_from_dense(torch.ones(600, 256, dtype=torch.bool), (64, 64))
    validate_lists(forward, transpose_lists(half, 4), **SIZES)
    none_full = transpose_lists(half, 4, width=10)._replace(full_block_cnt=torch.zeros(1, 1, 4, dtype=torch.int32))
    assert "is not in the backward lists" in message(half, none_full)
    validate_lists(forward, none_full, **SIZES)


def test_semaphore_values_follow_the_launch() -> None:
    forward, backward = batch_lists()
    order = compute_dq_write_order(*forward[:4], *backward[:4], spt=True)
    backward = backward._replace(dq_write_order=order[0], dq_write_order_full=order[1])
    for options in ({}, {"order": torch.arange(3, -1, -1)}):
        validate_lists(forward, backward, **SIZES, **options)
    validate_lists(forward, backward._replace(spt=True), **SIZES)
    assert "or the GPU hangs" in message(forward, backward._replace(spt=False))
    assert "or the GPU hangs" in message(forward, backward, order=torch.tensor([3, 2, 0, 1]))


def test_lists_that_heads_and_sequences_share() -> None:
    """Coordinates are those of the tensor, whatever the heads that share it."""
    forward, backward = batch_lists()
    grouped = [each_tensor(side, lambda t: t[:, ::2].clone()) for side in (forward, backward)]
    validate_lists(*grouped, **SIZES)
    validate_lists(forward, grouped[1], **SIZES)
    grouped[1].mask_block_idx[0, 1, 2, 0] = 7
    assert message(*grouped).startswith("backward mask_block_idx[0, 1, 2, 0] = 7, expected a query block of")
    one = each_tensor(forward, lambda t: t[:, :1])
    wide = each_tensor(one, lambda t: t.expand(3, 4, *t.shape[2:]))
    for lists in (one, wide):
        validate_lists(lists, backward, **SIZES)
    backward.mask_block_idx[0, 3, 1, 0] = 0
    assert message(wide, backward).startswith("forward mask_block_idx[0, 3, 1, 1] = 1 is not in the backward lists")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"block_size": None}, "forward block_size is None: give block_size=(queries, keys)"),
        ({"block_size": (64, 64)}, "expected B of [1, 3], H of [1, 2, 4] and 10 rows, for seqlen_q=600"),
        ({"block_size": (128, 128)}, "expected a width of at most 2: a row cannot list more blocks"),
        ({"mask_block_cnt": int32([[[0] * 5] * 3])}, "forward mask_block_cnt is torch.int32 (1, 3, 5) on"),
        ({"mask_block_idx": torch.zeros(1, 1, 5, 4)}, "forward mask_block_idx is torch.float32 (1, 1, 5, 4) on cpu"),
        ({"full_block_idx": None}, "forward full_block_cnt and full_block_idx must be given together"),
        ({"dq_write_order": torch.zeros(1, 4, 5, 4).int()}, "forward dq_write_order_full is None, expected the"),
    ],
)
def test_shapes(change: dict[str, Any], expected: str) -> None:
    assert expected in message(batch_lists()[0]._replace(**change))


def test_packed_lists_are_for_the_attention_functions() -> None:
    packed = batch_lists()[0]._replace(cu_total_m_blocks=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(NotImplementedError, match="cu_total_m_blocks is given"):
        validate_lists(packed, **SIZES)


def test_lists_of_nothing_are_one_wide() -> None:
    """Kernels want a dimension with stride 1, so lists are made no narrower, even for no keys."""
    lists = lists_from_blocks(torch.zeros(2, 0, dtype=torch.bool), block_size=(128, 128))
    assert lists.mask_block_idx.shape[3] == 1
    backward = transpose_lists(lists, 0)
    sizes = dict(seqlen_q=256, seqlen_k=0, num_heads=1)
    validate_lists(lists, backward, **sizes)
    for spt in (False, True):  # and in an order of launch
        order, _ = compute_dq_write_order(*lists[:4], *backward[:4], spt=spt)
        validate_lists(lists, backward._replace(dq_write_order=order, spt=spt), **sizes)


# Lists of a call, with `validate=True`.
BLOCK = 128
LENGTHS = ((600, 500), (0, 300), (1, 129), (260, 0), (128, 128))
PACKED = ["compact", "stacked", "ragged"]
EVERY_FORM = pytest.mark.parametrize("form", ["padded", *PACKED])


def qk(*lead: int, Hq: int = 4, Hkv: int = 2, keys: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensors that have shapes; nothing reads them."""
    shape = (*lead[:-1], lead[-1] if keys is None else keys)
    return torch.zeros(1).expand(*lead, Hq, 64), torch.zeros(1).expand(*shape, Hkv, 64)


def packed_call(form: str, heads: int = 2, full: float = 0.5, Hkv: int = 2) -> tuple[list[Any], dict[str, Any]]:
    """[forward, backward, q, k] of random lists in a form, and the options of the call."""
    case = Packed(packed=LENGTHS, form=form, block=(BLOCK, BLOCK), list_heads=heads, density=0.6, full=full, Hkv=Hkv)
    x = make_inputs(case, "cpu")
    return [*sides(case), x.q, x.k], dict(zip(("cu_seqlens_q", "cu_seqlens_k"), x.cu_seqlens))


def refusal(*call: Any, **options: Any) -> str:
    return said(validate_call, True, *call, **options)


@pytest.mark.parametrize("form", PACKED)
def test_the_sequence_is_named(form: str) -> None:
    """And a block that another sequence alone has is out of range."""
    call, options = packed_call(form, full=0.0)
    row = [0, *accumulate(-(-T_q // BLOCK) for T_q, _ in LENGTHS)][4]
    call[0].mask_block_cnt[1, row] = 3
    expected = "sequence 4, whose rows count from its start: forward mask_block_cnt[0, 1, 0] = "
    assert refusal(*call, **options).startswith(expected)
    call, options = packed_call("compact")
    call[0].mask_block_cnt[:, 5] = 1  # sequence 2: a row, two key blocks
    call[0].full_block_cnt[:, 5] = 0
    call[0].mask_block_idx[:, 5, 0] = 3
    found = refusal(*call, **options)
    assert "sequence 2" in found and "= 3, expected a key block of 0 .. 1" in found


@pytest.mark.parametrize(
    ("form", "change", "expected"),
    [
        ("compact", dict(cu_total_m_blocks=None), "cu_total_m_blocks, with shape (6,); got None"),
        ("compact", dict(cu_total_m_blocks=int32([0, 4, 4, 5, 8, 9])), "expected capacity for 5 rows of sequence 0"),
        ("compact", dict(cu_total_m_blocks=int32([0, 5, 5, 6, 9, 11])), "[5] = 11, but mask_block_cnt has 10 rows"),
        ("stacked", dict(cu_block_idx_offsets=int32([-1, 0, 0, 0, 0, 0])), "by cu_block_idx_offsets, at offset -1"),
        ("stacked", dict(cu_block_idx_offsets=int32([0, 20, 20, 22, 99])), "by cu_block_idx_offsets, at offset 99"),
        ("ragged", dict(cu_block_idx_offsets=torch.full((2, 10), 1 << 40)), "at offset 1099511627776 with"),
        ("compact", dict(block_size=None), "block_size is None"),
    ],
)
def test_offsets(form: str, change: dict[str, Any], expected: str) -> None:
    call, options = packed_call(form)
    call[0] = call[0]._replace(**change)
    assert expected in refusal(*call, **options)


def test_padded_lists_of_packed_sequences() -> None:
    """One list for all: what it lists past the end of a shorter sequence has no effect, and is right."""
    forward, backward = both_directions(Blocks(M=5, N=4, pattern="full", full=0.0))
    starts = dict(cu_seqlens_q=int32([0, 600, 640]), cu_seqlens_k=int32([0, 500, 510]))
    call = [forward, backward, *qk(640, keys=510)]
    validate_call(True, *call, **starts)
    assert forward.mask_block_cnt[0, 1, 2] > 0
    forward.mask_block_idx[0, 1, 2, 0] = 4
    assert "forward mask_block_idx[0, 1, 2, 0] = 4, expected a key block of 0 .. 3" in refusal(*call, **starts)


@pytest.mark.parametrize("block_size", [None, (BLOCK, BLOCK)])
def test_lists_of_a_batch(block_size: tuple[int, int] | None) -> None:
    both = both_directions(Blocks(B=2, H=4, pattern="full", full=0.0))
    call = [*(side._replace(block_size=block_size) for side in both), *qk(2, 700, keys=640)]
    validate_call(True, *call)
    call[0].mask_block_idx[1, 2, 3, 0] = 5
    assert refusal(*call).startswith("forward mask_block_idx[1, 2, 3, 0] = 5, expected a key block of 0 .. 4")


def planned(form: str, Hkv: int, per_group: bool, heads: int = 1, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """[forward, planned backward, q, k] of as many lists, and the options of the call."""
    if form == "padded":
        both = both_directions(Blocks(B=2, H=heads, pattern="empty columns", density=0.8, shuffle=True))
        call, given, M = [*both, *qk(2, 700, keys=640, Hkv=Hkv)], {}, 6
    else:
        (call, given), M = packed_call(form, heads=heads, Hkv=Hkv), 5
        if form == "stacked":
            options["cu_total_m_blocks"] = call[0].cu_total_m_blocks
    sizes = dict(num_heads=4, num_heads_kv=Hkv, num_q_blocks=M, per_group=per_group)
    call[1] = plan_backward(call[1], longest=2, **sizes, **options)
    return call, given


@pytest.mark.parametrize(("per_group", "deterministic"), [(False, False), (True, False), (False, True)])
@EVERY_FORM
def test_one_wrong_work_tile(form: str, per_group: bool, deterministic: bool) -> None:
    """It does nothing, or is of no head, of a sequence without keys or none, or of another place in the entries."""
    call, options = planned(form, 2, per_group, heads=2, deterministic=deterministic, schedule="right to left")
    validate_call(True, *call, **options)
    plan = call[1].plan
    at = int((plan[:, 4] > plan[:, 3]).int().argmax())
    named = f"backward plan[{at}] = "
    faults = [(4, int(plan[at, 3]), "backward plan deals out"), (1, 4, named), (0, 3, named)]
    if form != "padded":
        faults.append((6, int(plan[at, 6]) + 1, named))
    for column, value, expected in faults:
        was = plan[at].clone()
        plan[at, column] = value
        assert refusal(*call, **options).startswith(expected), column
        plan[at] = was


@EVERY_FORM
def test_each_key_block_is_stored_once_where_nothing_is_added(form: str) -> None:
    """A key block that lists nothing is stored, too: its dk and dv are zeros, which a work tile has to write."""
    call, options = planned(form, 4, False)
    plan = call[1].plan
    empty = int((plan[:, 3] == plan[:, 4]).int().argmax())
    assert plan[empty, 3] == plan[empty, 4]
    for count, tiles in ((0, [plan[:empty], plan[empty + 1 :]]), (2, [plan, plan[empty : empty + 1]])):
        call[1] = call[1]._replace(plan=torch.cat(tiles))
        assert f"backward plan has {count} work tiles for key block" in refusal(*call, **options)


@pytest.mark.parametrize(("Hkv", "per_group"), [(2, False), (2, True), (1, False)])
@EVERY_FORM
def test_ranks_follow_the_launch(form: str, Hkv: int, per_group: bool) -> None:
    call, options = planned(form, Hkv, per_group)
    plan = call[1].plan
    was = plan.clone()
    later = int((plan[:, 5] > 0).int().argmax())
    for rank in (int(was[later, 5]) - 1, int(was[later, 5]) + 1):
        plan[later, 5] = rank
        found = refusal(*call, **options)
        assert found.startswith(f"backward plan[{later}] = ") and f"expected rank {int(was[later, 5])}" in found
    plan[:] = was.flip(0)  # the same work tiles in an order that they were not made for
    assert "expected rank" in refusal(*call, **options)


@pytest.mark.parametrize("Hkv", [4, 1])
@EVERY_FORM
def test_semaphore_values_follow_the_launch_of_work_tiles(form: str, Hkv: int) -> None:
    """Work tiles of one head in another order, with the ranks of that order."""
    call, options = planned(form, Hkv, False, deterministic=True, schedule="right to left")
    plan = call[1].plan
    own = (plan[:, 1] == 0) & (plan[:, 0] == 0)
    plan[own] = plan[own].flip(0)
    waits: dict[tuple[int, ...], int] = {}
    for at, (batch, head, block, begin, end, *_) in enumerate(plan.tolist()):
        key = (batch, head * Hkv // 4, block)
        if end > begin and Hkv < 4:
            plan[at, 5] = waits.get(key, 0)
            waits[key] = waits.get(key, 0) + 1
    assert "semaphore values must rise with the launch, or the GPU hangs" in refusal(*call, **options)


@pytest.mark.parametrize(
    ("field", "more", "expected"),
    [("dq_write_order", 1, "the semaphore values of a query block are 0, 1, 2"), ("mask_block_idx", 200, "_block_idx")],
)
def test_wrong_entry_behind_a_ragged_plan(field: str, more: int, expected: str) -> None:
    call, options = planned("ragged", 2, False, heads=2, deterministic=True)
    getattr(call[1], field)[0] += more
    assert expected in refusal(*call, **options)


def test_ragged_lists_of_a_batch() -> None:
    """Backward lists may be ragged where sequences are not packed: each has as many rows as the others."""
    forward, backward = both_directions(Blocks(B=2, H=2, M=6, N=5, density=0.7, full=None))
    count, idx = (t.transpose(0, 1).flatten(1, 2) for t in (backward.mask_block_cnt, backward.mask_block_idx))
    starts = torch.arange(count.numel()).view(count.shape) * idx.shape[-1]
    ragged = backward._replace(mask_block_cnt=count, mask_block_idx=idx.flatten(), cu_block_idx_offsets=starts)
    ragged = ragged._replace(cu_total_n_blocks=int32([0, 5, 10]))
    tensors = qk(2, 700, keys=640)
    for deterministic in (False, True):
        static = dict(num_heads=4, num_heads_kv=2, num_q_blocks=6, deterministic=deterministic)
        validate_call(True, forward, plan_backward(ragged, **static), *tensors)
    validate_call(True, forward, ragged, *tensors)
    ragged.mask_block_idx[int(starts[1, 7])] = 6
    assert refusal(forward, ragged, *tensors).startswith("sequence 1, ")


def test_plans_that_cover_an_entry_twice() -> None:
    forward, backward = both_directions(Blocks(H=1, M=6, N=1, density=1.0))
    plan = plan_backward(backward, num_heads=2, num_heads_kv=1, num_q_blocks=6, longest=3)
    call = (forward, plan, *qk(1, 700, Hq=2, Hkv=1, keys=100))
    validate_call(True, *call)
    assert plan.plan[:2, 3:5].tolist() == [[0, 3], [3, 6]]
    plan.plan[1, 3:5] = int32([2, 5])
    assert "each once" in refusal(*call)
    plan.plan[1, 3:5] = int32([4, 7])
    assert refusal(*call).startswith("backward plan[1] = [0, 0, 0, 4, 7, ")


@pytest.mark.parametrize("packed", [False, True])
def test_only_on_request(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the argument of the attention functions, or the environment's variable."""
    from flash_attn.cute import interface

    if packed:
        (forward, backward, q, k), options = packed_call("compact")
        function, attention = interface.flash_attn_varlen_func, interface.FlashAttnVarlenFunc
    else:
        forward, backward = both_directions(Blocks(B=1, H=4, M=6, N=5, density=1.0))
        (q, k), options = qk(1, 700, keys=640), {}
        function, attention = interface.flash_attn_func, interface.FlashAttnFunc
    monkeypatch.delenv(ALWAYS, raising=False)
    monkeypatch.setattr(attention, "apply", lambda *arguments: "computed")
    options |= dict(block_sparse_tensors=forward, block_sparse_tensors_bwd=backward)
    assert function(q, k, k, **options, validate=True) == "computed"
    forward.mask_block_idx[forward.mask_block_cnt > 0, 0] = 99
    for value, validate, taken in ((None, False, True), (None, True, False), ("0", False, True), ("1", False, False)):
        if value is not None:
            monkeypatch.setenv(ALWAYS, value)
        if taken:
            assert function(q, k, k, **options, validate=validate) == "computed"
            continue
        with pytest.raises(ValueError, match="= 99, expected a key block"):
            function(q, k, k, **options, validate=validate)


def test_keys_on_pages_are_checked_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    call, pages = [*both_directions(Blocks(B=1, H=4)), *qk(1, 700, keys=640)], dict(page_table=int32([[0]]))
    monkeypatch.setenv(ALWAYS, "1")
    validate_call(False, *call, **pages)
    with pytest.raises(NotImplementedError, match="page_table"):
        validate_call(True, *call, **pages)
    validate_call(True, None, None, *call[2:], **pages)


@pytest.mark.gpu
@pytest.mark.parametrize("form", PACKED)
def test_on_a_gpu(form: str) -> None:
    call, options = packed_call(form)
    call = [each_tensor(side, torch.Tensor.cuda) for side in call[:2]] + call[2:]
    options = {name: value.cuda() for name, value in options.items()}
    validate_call(True, *call, **options)
    call[1].full_block_cnt[0, 1] += 1
    assert "sequence 0, whose rows count from its start: backward" in refusal(*call, **options)
