"""Block lists from tables and BlockMasks, large windows, and transposed lists.

That lists of tables, masks and windows, and the transpose, are right are properties of the fuzzer ("lists.made",
"windows.dense", "windows.lists", "lists.transposed", "lists.order of rows").
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flash_attn.cute.block_lists import (
    draw_lists,
    lists_from_block_mask,
    lists_from_dense,
    lists_from_window,
    transpose_lists,
)
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.lists.write_order import compute_dq_write_order
from fuzz.blocks import both_directions, table_of
from fuzz.case import Blocks
from fuzz.properties.lists import same


def test_window_at_scale() -> None:
    lists = lists_from_window(1 << 20, 1 << 20, 2047, 0, (128, 128))
    assert lists.full_block_idx.shape == (1, 1, 8192, 15) and lists.mask_block_idx.shape == (1, 1, 8192, 2)
    assert lists.mask_block_idx[0, 0, 100].tolist() == [84, 100]


def test_transpose_of_repeated_lists_is_repeated() -> None:
    forward, _ = both_directions(Blocks(H=1))
    wide = BlockSparseTensorsTorch(*(t.expand(2, 3, *t.shape[2:]) for t in forward[:4]))
    for mine, other in zip(transpose_lists(wide, 5)[:4], transpose_lists(forward, 5)[:4], strict=True):
        assert mine.shape[:2] == (2, 3) and mine.stride()[:2] == (0, 0)
        torch.testing.assert_close(mine, other.expand_as(mine), rtol=0, atol=0)


def soft_causal(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (k <= q) & (q - k < 300 + 100 * h)


@pytest.mark.parametrize("T", [1024, 1000])
@pytest.mark.parametrize("both", [True, False])
def test_block_mask(T: int, both: bool) -> None:
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    block_mask = create_block_mask(soft_causal, 1, 2, T, T, device="cpu", BLOCK_SIZE=(128, 64))
    if not both:
        kept = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
        block_mask = BlockMask.from_kv_blocks(
            *(getattr(block_mask, name) for name in kept),
            BLOCK_SIZE=(128, 64),
            mask_mod=soft_causal,
            seq_lengths=(T, T),
            compute_q_blocks=False,
        )
    forward, backward = lists_from_block_mask(block_mask)
    at = torch.arange(T)
    dense = torch.stack([soft_causal(0, h, at.view(-1, 1), at) for h in range(2)])[None]
    expected, columns = lists_from_dense(dense, (128, 64)), -(-T // 64)
    if T % 128 == 0:  # FlexAttention's last query block is a mask block if it is short
        same(forward, *table_of(expected, columns))
    same(backward, *(table.mT for table in table_of(forward, columns)))
    for lists in (forward, backward):
        assert lists.block_size == (128, 64)
        for cnt, idx in (lists[:2], lists[2:4]):
            assert idx.shape[3] == max(1, int(cnt.max()))
    assert lists_from_block_mask(block_mask, width=10)[0].mask_block_idx.shape[3] == 10


def test_picture(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    forward, backward = both_directions(Blocks(M=6, N=5))
    order = compute_dq_write_order(*forward[:4], *backward[:4])
    shades = draw_lists(forward, 5, head=1).images[0].get_array()
    listed, full = (table[0, 1] for table in table_of(forward, 5))
    assert (shades == (listed.int() + full).numpy()).all()
    ordered = backward._replace(dq_write_order=order[0], dq_write_order_full=order[1])
    axes = draw_lists(ordered, 6, head=1, backward=True, path=tmp_path / "lists.png")
    assert (axes.images[0].get_array() == shades).all()
    texts = {text.get_position()[::-1]: int(text.get_text()) for text in axes.texts}
    for m, row in enumerate(listed):
        at = row.nonzero().flatten().tolist()
        assert [texts[m, n] for n in at] == list(range(len(at)))
    assert (tmp_path / "lists.png").stat().st_size > 1000
