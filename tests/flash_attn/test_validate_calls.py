"""`validate=True`: a wrong list is an error that names its first wrong entry, in every form that lists come in."""

from itertools import accumulate
from typing import Any

import pytest
import torch

from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.lists.backward_plan import plan_backward
from flash_attn.cute.lists.validate_calls import ALWAYS, validate_call
from fuzz.attention_lists import sides
from fuzz.blocks import POISON, both_directions
from fuzz.case import Blocks, Packed

BLOCK = 128
LENGTHS = ((600, 500), (0, 300), (1, 129), (260, 0), (128, 128))
PACKED = ["compact", "stacked", "ragged"]


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def qk(*lead: int, Hq: int = 4, Hkv: int = 2, keys: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensors that have shapes; nothing reads them."""
    shape = (*lead[:-1], lead[-1] if keys is None else keys)
    return torch.zeros(1).expand(*lead, Hq, 64), torch.zeros(1).expand(*shape, Hkv, 64)


def packed_call(form: str, heads: int = 2, full: float = 0.5) -> tuple[list[Any], dict[str, Any]]:
    """[forward, backward, q, k] of random lists in a form, and the options of the call."""
    case = Packed(packed=LENGTHS, form=form, block=(BLOCK, BLOCK), list_heads=heads, density=0.6, full=full)
    cu_q, cu_k = (int32([0, *accumulate(pair[side] for pair in LENGTHS)]) for side in (0, 1))
    q, k = qk(int(cu_q[-1]), keys=int(cu_k[-1]))
    return [*sides(case), q, k], dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)


def said(*call: Any, **options: Any) -> str:
    with pytest.raises(ValueError) as error:
        validate_call(True, *call, **options)
    return str(error.value)


@pytest.mark.parametrize("form", PACKED)
@pytest.mark.parametrize(("kind", "backward"), [("mask", False), ("full", True)])
def test_one_wrong_entry(form: str, kind: str, backward: bool) -> None:
    """Every entry that is read counts, in every sequence; what lies between rows does not."""
    call, options = packed_call(form)
    entries = getattr(call[backward], f"{kind}_block_idx")
    wrong = 0
    for at in range(entries.numel()):
        before = int(entries.flatten()[at])
        entries.view(-1)[at] = 77
        if before != POISON:
            wrong += 1
            message = said(*call, **options)
            assert "whose rows count from its start" in message and "= 77, expected a" in message
        else:
            validate_call(True, *call, **options)
        entries.view(-1)[at] = before
    counts = getattr(call[backward], f"{kind}_block_cnt")
    assert wrong == int(counts.sum())


@pytest.mark.parametrize("form", PACKED)
def test_the_sequence_is_named(form: str) -> None:
    call, options = packed_call(form, full=0.0)
    counts = call[0].mask_block_cnt
    row = [0, *accumulate(-(-T_q // BLOCK) for T_q, _ in LENGTHS)][4]
    counts[1, row] = 3
    message = said(*call, **options)
    assert message.startswith("sequence 4, whose rows count from its start: forward mask_block_cnt[0, 1, 0] = ")


def test_another_sequences_blocks_are_out_of_range() -> None:
    call, options = packed_call("compact")
    call[0].mask_block_cnt[:, 5] = 1  # sequence 2: a row, two key blocks
    call[0].full_block_cnt[:, 5] = 0
    call[0].mask_block_idx[:, 5, 0] = 3
    assert "sequence 2" in said(*call, **options) and "= 3, expected a key block of 0 .. 1" in said(*call, **options)


@pytest.mark.parametrize(
    ("form", "change", "expected"),
    [
        ("compact", dict(cu_total_m_blocks=None), "cu_total_m_blocks, with shape (6,); got None"),
        ("compact", dict(cu_total_m_blocks=int32([0, 4, 4, 5, 8, 9])), "expected room for 5 rows of sequence 0"),
        ("compact", dict(cu_total_m_blocks=int32([0, 5, 5, 6, 9, 11])), "[5] = 11, but mask_block_cnt has 10 rows"),
        ("stacked", dict(cu_block_idx_offsets=int32([-1, 0, 0, 0, 0, 0])), "by cu_block_idx_offsets, at place -1"),
        ("stacked", dict(cu_block_idx_offsets=int32([0, 20, 20, 22, 99])), "by cu_block_idx_offsets, at place 99"),
        ("ragged", dict(cu_block_idx_offsets=torch.full((2, 10), 1 << 40)), "at place 1099511627776 with"),
        ("compact", dict(block_size=None), "block_size is None"),
    ],
)
def test_offsets(form: str, change: dict[str, Any], expected: str) -> None:
    call, options = packed_call(form)
    call[0] = call[0]._replace(**change)
    assert expected in said(*call, **options)


def test_padded_lists_of_packed_sequences() -> None:
    """One list for all: what it lists past the end of a shorter sequence has no effect, and is right."""
    forward, backward = both_directions(Blocks(M=5, N=4, pattern="full", full=0.0))
    cu_q, cu_k = int32([0, 600, 640]), int32([0, 500, 510])
    call, options = [forward, backward, *qk(640, keys=510)], dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    validate_call(True, *call, **options)
    assert forward.mask_block_cnt[0, 1, 2] > 0
    forward.mask_block_idx[0, 1, 2, 0] = 4
    assert "forward mask_block_idx[0, 1, 2, 0] = 4, expected a key block of 0 .. 3" in said(*call, **options)


@pytest.mark.parametrize("block_size", [None, (BLOCK, BLOCK)])
def test_lists_that_are_not_packed(block_size: tuple[int, int] | None) -> None:
    lists = [
        side._replace(block_size=block_size) for side in both_directions(Blocks(B=2, H=4, pattern="full", full=0.0))
    ]
    tensors = qk(2, 700, keys=640)
    validate_call(True, *lists, *tensors)
    lists[0].mask_block_idx[1, 2, 3, 0] = 5
    assert said(*lists, *tensors).startswith("forward mask_block_idx[1, 2, 3, 0] = 5, expected a key block of 0 .. 4")


PLANS = [(4, False), (2, False), (2, True), (1, False)]  # key/value heads of 4 query heads, and whether per group


def planned(form: str, Hkv: int, per_group: bool, heads: int = 1, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """[forward, planned backward, q, k] of as many lists, and the options of the call."""
    if form == "padded":
        both = both_directions(Blocks(B=2, H=heads, pattern="empty columns", density=0.8, shuffle=True))
        call, given, M = [*both, *qk(2, 700, keys=640, Hkv=Hkv)], {}, 6
    else:
        call, given = packed_call(form, heads=heads)
        call[2:] = qk(*call[2].shape[:-2], keys=call[3].shape[-3], Hkv=Hkv)
        M = 5
        if form == "stacked":
            options["cu_total_m_blocks"] = call[0].cu_total_m_blocks
    sizes = dict(num_heads=4, num_heads_kv=Hkv, num_q_blocks=M, per_group=per_group)
    call[1] = plan_backward(call[1], longest=2, **sizes, **options)
    return call, given


@pytest.mark.parametrize(("per_group", "deterministic"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("form", ["padded", *PACKED])
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
        assert said(*call, **options).startswith(expected), column
        plan[at] = was


@pytest.mark.parametrize("form", ["padded", *PACKED])
def test_each_key_block_is_stored_once_where_nothing_is_added(form: str) -> None:
    """A key block that lists nothing is stored, too: its dk and dv are zeros, which a work tile has to write."""
    call, options = planned(form, 4, False)
    plan = call[1].plan
    empty = int((plan[:, 3] == plan[:, 4]).int().argmax())
    assert plan[empty, 3] == plan[empty, 4]
    call[1] = call[1]._replace(plan=torch.cat([plan[:empty], plan[empty + 1 :]]))
    assert "backward plan has 0 work tiles for key block" in said(*call, **options)
    call[1] = call[1]._replace(plan=torch.cat([plan, plan[empty : empty + 1]]))
    assert "backward plan has 2 work tiles for key block" in said(*call, **options)


@pytest.mark.parametrize(("Hkv", "per_group"), PLANS[1:])
@pytest.mark.parametrize("form", ["padded", *PACKED])
def test_ranks_follow_the_launch(form: str, Hkv: int, per_group: bool) -> None:
    call, options = planned(form, Hkv, per_group)
    plan = call[1].plan
    was = plan.clone()
    later = int((plan[:, 5] > 0).int().argmax())
    for rank in (int(was[later, 5]) - 1, int(was[later, 5]) + 1):
        plan[later, 5] = rank
        message = said(*call, **options)
        assert message.startswith(f"backward plan[{later}] = ") and f"expected rank {int(was[later, 5])}" in message
    plan[:] = was.flip(0)  # the same work tiles in an order that they were not made for
    assert "expected rank" in said(*call, **options)


@pytest.mark.parametrize("Hkv", [4, 1])
@pytest.mark.parametrize("form", ["padded", *PACKED])
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
    assert "semaphore values have to rise with the launch, or the GPU hangs" in said(*call, **options)


def test_wrong_entry_behind_a_ragged_plan() -> None:
    faults = [
        ("dq_write_order", 1, "the semaphore values of a query block are 0, 1, 2"),
        ("mask_block_idx", 200, "_block_idx"),
    ]
    for field, more, expected in faults:
        call, options = planned("ragged", 2, False, heads=2, deterministic=True)
        getattr(call[1], field)[0] += more
        assert expected in said(*call, **options)


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
    assert said(forward, ragged, *tensors).startswith("sequence 1, ")


def test_plans_that_cover_an_entry_twice() -> None:
    forward, backward = both_directions(Blocks(H=1, M=6, N=1, density=1.0))
    plan = plan_backward(backward, num_heads=2, num_heads_kv=1, num_q_blocks=6, longest=3)
    tensors = qk(1, 700, Hq=2, Hkv=1, keys=100)
    validate_call(True, forward, plan, *tensors)
    assert plan.plan[:2, 3:5].tolist() == [[0, 3], [3, 6]]
    plan.plan[1, 3:5] = int32([2, 5])
    assert "each once" in said(forward, plan, *tensors)
    plan.plan[1, 3:5] = int32([4, 7])
    assert said(forward, plan, *tensors).startswith("backward plan[1] = [0, 0, 0, 4, 7, ")


def test_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, backward = both_directions(Blocks(B=1, H=4, M=6, N=5, density=1.0, full=0.0))
    forward.mask_block_idx[0, 0, 0, 0] = 99
    tensors = qk(1, 700, keys=640)
    monkeypatch.delenv(ALWAYS, raising=False)
    validate_call(False, forward, backward, *tensors)
    monkeypatch.setenv(ALWAYS, "0")
    validate_call(False, forward, backward, *tensors)
    monkeypatch.setenv(ALWAYS, "1")
    with pytest.raises(ValueError, match="= 99, expected a key block"):
        validate_call(False, forward, backward, *tensors)
    validate_call(False, forward, backward, *tensors, page_table=int32([[0]]))
    with pytest.raises(NotImplementedError, match="page_table"):
        validate_call(True, forward, backward, *tensors, page_table=int32([[0]]))
    validate_call(True, None, None, *tensors, page_table=int32([[0]]))


@pytest.mark.parametrize("packed", [False, True])
def test_attention_functions_ask(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert function(q, k, k, **options) == "computed"
    with pytest.raises(ValueError, match="= 99, expected a key block"):
        function(q, k, k, **options, validate=True)


@pytest.mark.gpu
@pytest.mark.parametrize("form", PACKED)
def test_on_a_gpu(form: str) -> None:
    call, options = packed_call(form)

    def moved(value: Any) -> Any:
        return value.cuda() if torch.is_tensor(value) else value

    call = [BlockSparseTensorsTorch(*map(moved, side)) for side in call[:2]] + call[2:]
    options = {name: value.cuda() for name, value in options.items()}
    validate_call(True, *call, **options)
    call[1].full_block_cnt[0, 1] += 1
    assert "sequence 0, whose rows count from its start: backward" in said(*call, **options)
