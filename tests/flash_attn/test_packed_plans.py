"""Plans and semaphore values of packed sequences' lists, where heads share them and where numbers are large.

That they are those of each sequence alone, in every form, are properties of the fuzzer ("packed.plan",
"packed.write order").
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flash_attn.cute.block_lists import packed_write_order
from flash_attn.cute.lists.backward_plan import plan_backward
from fuzz.blocks import packed_lists
from fuzz.case import Packed
from fuzz.properties.packed import plan


def backward(form: str, **more: Any) -> Any:
    return packed_lists(Packed(form=form, lengths=((16, 20), (8, 5)), density=0.6, seed=3, **more))[1]


def test_semaphore_values_where_one_kind_has_a_list_for_all_heads() -> None:
    one, many = (backward("compact", heads=heads, pattern=pattern) for heads, pattern in ((1, "comb"), (3, "prefix")))
    own = ("mask_block_cnt", "mask_block_idx")
    mixed = many._replace(**{name: getattr(one, name) for name in own})
    repeated = many._replace(**{n: getattr(one, n).repeat(3, *[1] * (getattr(one, n).ndim - 1)) for n in own})
    mine, other = (packed_write_order(lists, num_q_blocks=4) for lists in (mixed, repeated))
    for name in (*own, "dq_write_order", "dq_write_order_full"):
        assert getattr(mine, name).equal(getattr(other, name))
    ragged = backward("ragged", heads=3)
    with pytest.raises(ValueError, match="cannot share entries"):
        packed_write_order(ragged._replace(cu_block_idx_offsets=ragged.cu_block_idx_offsets[:1]), num_q_blocks=4)


def test_a_start_may_pass_31_bits() -> None:
    lists = backward("ragged", full=None)
    starts = torch.arange(7)[None] + (5 << 32) + (1 << 31) * torch.tensor([0, 1] * 3 + [0])
    lists = lists._replace(cu_block_idx_offsets=starts)
    items = plan_backward(lists, num_heads=1, num_heads_kv=1, num_q_blocks=4).plan
    low, high = items[:, 6].long() & 0xFFFFFFFF, items[:, 7].long()
    assert ((high << 32) | low).equal(starts[0])


@pytest.mark.parametrize("form", ["stacked", "ragged"])
def test_a_list_that_all_heads_share_is_walked_once(form: str) -> None:
    """As in lists of one head, though a head dimension says that there are more."""
    given = dict(num_heads=6, num_heads_kv=2, num_q_blocks=4, deterministic=True)
    lists = backward(form)
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
    plan(Packed(form=form, lengths=((5, 0), (0, 0), (3, 0))))
