"""The chosen kernels are those in which a sanitizer can find something."""

from __future__ import annotations

import pytest

from fuzz import sanitize
from fuzz.attention_lists import backward_lists
from fuzz.case import Attention


@pytest.mark.parametrize("case", [case for case in sanitize.CASES if isinstance(case, Attention)], ids=repr)
def test_stages_are_filled_anew(case: Attention) -> None:
    """Races are about the earlier content of a stage: a CTA of backward loops over more rows than two stages hold."""
    (rows, _), (block_q, block_k) = case.lengths[0], case.block or (128, 128)
    if case.lists:
        lists = backward_lists(case, device="cpu")
        counts = lists.mask_block_cnt + (0 if lists.full_block_cnt is None else lists.full_block_cnt)
        most = counts if lists.plan is None else lists.plan[:, 4] - lists.plan[:, 3]
        rows = block_q * int(most.max())
    elif case.mask == "window":
        assert case.window[1] is None or case.window[0] + block_k > 384
    assert rows > 2 * (64 if block_k == 64 else 128)
