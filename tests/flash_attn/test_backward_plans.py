"""Backward by a plan: the kernel that follows it, and plans of packed sequences."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from fa_catalogue import SM90
from fa_compile import Worker, in_order, noted, swept

from flash_attn.cute.block_lists import packed_write_order
from flash_attn.cute.lists.backward_plan import plan_backward
from fuzz.attention import backward, forward, make_inputs, outputs
from fuzz.attention_lists import backward_lists, sides
from fuzz.case import Attention as Case
from fuzz.case import Packed
from fuzz.properties.lists import plan_of_packs

WITHOUT_PLAN = [case for case in SM90 if case.packed and case.deterministic and not case.plan]
STACKED = [case for case in WITHOUT_PLAN if case.form == "stacked"]


def compile_ordered(case: Case, in_use: bool) -> set[int]:
    """Deterministic backward in one pass; dimensions of the index lists that the kernel reads.

    in_use: sequences have fewer queries than their capacity.
    """
    from flash_attn.cute.lists import deterministic_lists
    from flash_attn.cute.lists.rows import ListRow

    x, lists = make_inputs(case), backward_lists(case)
    seqused_q = torch.empty_like(lists.cu_total_n_blocks.narrow(0, 1, len(case.packed))) if in_use else None
    with (
        noted(ListRow, "entries", lambda row, tensor, full=False: len(tensor.shape)) as visited,
        noted(deterministic_lists, "blocks_before", lambda lengths, *args, **options: lengths) as asked,
    ):
        backward(case, x, *outputs(case, x), lists, seqused_q=seqused_q)
    if case.form == "stacked":
        lengths = asked[-1]
        assert lengths.starts[0] is x.cu_seqlens[0] and lengths.used[0] is seqused_q
    return set(visited)


@pytest.mark.parametrize("case", swept(WITHOUT_PLAN[::-1]), ids=str)  # the padded one first
def test_one_pass_compiles(compiler_sm90: Worker, case: Case) -> None:
    """The kernel loops over one ragged list for every form, but padded lists as they are."""
    found = compiler_sm90.trace(compile_ordered, case, case is STACKED[-1])
    assert found == {4 if case.form == "padded" else 1}


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "plan"), in_order(STACKED, 0, 2), ids=str)
def test_stacked_lists_give_the_bits_of_ragged_ones(case: Case, plan: int) -> None:
    case = replace(case, plan=plan)
    x = make_inputs(case)
    o, lse = forward(case, x)
    forms = [replace(case, form=form) for form in ("stacked", "ragged")]
    lists = [backward_lists(form) for form in forms]
    got, expected = (backward(case, x, o, lse, each) for each in lists)
    assert all(map(torch.equal, got, expected))


def packed_backward(form: str, **more: Any) -> Any:
    return sides(Packed(form=form, packed=((16, 20), (8, 5)), density=0.6, seed=3, **more))[1]


def test_semaphore_values_where_one_kind_has_a_list_for_all_heads() -> None:
    one, many = (
        packed_backward("compact", list_heads=heads, pattern=pattern) for heads, pattern in ((1, "comb"), (3, "prefix"))
    )
    own = ("mask_block_cnt", "mask_block_idx")
    mixed = many._replace(**{name: getattr(one, name) for name in own})
    repeated = many._replace(**{n: getattr(one, n).repeat(3, *[1] * (getattr(one, n).ndim - 1)) for n in own})
    mine, other = (packed_write_order(lists, num_q_blocks=4) for lists in (mixed, repeated))
    for name in (*own, "dq_write_order", "dq_write_order_full"):
        assert getattr(mine, name).equal(getattr(other, name))
    ragged = packed_backward("ragged", list_heads=3)
    with pytest.raises(ValueError, match="cannot share entries"):
        packed_write_order(ragged._replace(cu_block_idx_offsets=ragged.cu_block_idx_offsets[:1]), num_q_blocks=4)


def test_a_start_may_pass_31_bits() -> None:
    lists = packed_backward("ragged", lists="no full")
    starts = torch.arange(7)[None] + (5 << 32) + (1 << 31) * torch.tensor([0, 1] * 3 + [0])
    lists = lists._replace(cu_block_idx_offsets=starts)
    tiles = plan_backward(lists, num_heads=1, num_heads_kv=1, num_q_blocks=4).plan
    low, high = tiles[:, 6].long() & 0xFFFFFFFF, tiles[:, 7].long()
    assert ((high << 32) | low).equal(starts[0])


@pytest.mark.parametrize("form", ["stacked", "ragged"])
def test_a_list_that_all_heads_share_is_read_once(form: str) -> None:
    """As in lists of one head, though a head dimension says that there are more."""
    given = dict(num_heads=6, num_heads_kv=2, num_q_blocks=4, deterministic=True)
    lists = packed_backward(form)
    repeated = {
        name: t.expand(6, *t.shape[1:])
        for name, t in lists._asdict().items()
        if isinstance(t, torch.Tensor) and t.ndim > 1
    }
    given["cu_total_m_blocks"] = torch.tensor([0, 4, 6])
    one, many = (plan_backward(each, **given) for each in (lists, lists._replace(**repeated)))
    assert many.mask_block_idx.equal(one.mask_block_idx) and many.plan.equal(one.plan)


@pytest.mark.parametrize("form", ["compact", "stacked", "ragged"])
def test_a_pack_without_keys_has_a_plan_of_nothing(form: str) -> None:
    plan_of_packs(Packed(form=form, packed=((5, 0), (0, 0), (3, 0))))
