"""Block lists: made from tables, windows and BlockMasks, transposed, and with semaphore values; on GPUs too."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flash_attn.cute import block_sparsity
from flash_attn.cute.block_lists import (
    draw_lists,
    lists_from_block_mask,
    lists_from_blocks,
    lists_from_dense,
    lists_from_window,
    transpose_lists,
)
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.lists.write_order import compute_dq_write_order, merged_lists
from fuzz.attention_lists import both_directions
from fuzz.blocks import each_tensor, table_of
from fuzz.case import Blocks
from fuzz.properties.lists import same
from nsa_tools.measure.peak_memory import peak_bytes
from nsa_tools.measure.timing import capture, interleaved


def test_window_at_scale() -> None:
    lists = lists_from_window(1 << 20, 1 << 20, 2047, 0, (128, 128))
    assert lists.full_block_idx.shape == (1, 1, 8192, 15) and lists.mask_block_idx.shape == (1, 1, 8192, 2)
    assert lists.mask_block_idx[0, 0, 100].tolist() == [84, 100]


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


def arguments(forward: BlockSparseTensorsTorch, backward: BlockSparseTensorsTorch) -> tuple[torch.Tensor | None, ...]:
    return (*forward[:4], *backward[:4])


def assert_equal(ours: tuple[torch.Tensor | None, ...], theirs: tuple[torch.Tensor | None, ...]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


def test_an_order_of_launch_for_each_head_and_batch() -> None:
    forward, backward = both_directions(Blocks(B=2, H=3, seed=2))
    orders = torch.rand(2, 3, 5, generator=torch.Generator().manual_seed(0)).argsort(-1)
    own = compute_dq_write_order(*arguments(forward, backward), order=orders)
    of_heads = compute_dq_write_order(*arguments(forward, backward), order=orders[0].int())
    for b, h in ((b, h) for b in range(2) for h in range(3)):
        for locks, order in ((own, orders[b, h]), (of_heads, orders[0, h])):
            alone = compute_dq_write_order(*arguments(forward, backward), order=order)
            assert all(mine[b, h].equal(other[b, h]) for mine, other in zip(locks, alone, strict=True))


@pytest.mark.parametrize("spt", [False, True])
def test_where_upstream_has_it(spt: bool) -> None:
    """By position and by name, as programs written for upstream call it."""
    lists = arguments(*both_directions(Blocks(seed=1)))
    expected = compute_dq_write_order(*lists, spt=spt)
    assert_equal(block_sparsity.compute_dq_write_order(*lists, spt), expected)
    names = [f"{side}_{kind}_{of}" for side in ("fwd", "bwd") for kind in ("mask", "full") for of in ("cnt", "idx")]
    named = dict(zip(names, lists, strict=True))
    assert_equal(block_sparsity.compute_dq_write_order(**named, spt=spt), expected)


def merged(lists: BlockSparseTensorsTorch, locks: Any = None, **options: Any) -> tuple[torch.Tensor, ...]:
    """Counts, entries and semaphore values of `merged_lists`; without these or an order, of a launch in order."""
    if locks is not None:
        lists = lists._replace(dq_write_order=locks[0], dq_write_order_full=locks[1])
    elif "order" not in options:
        options["order"] = torch.arange(lists.mask_block_cnt.shape[2])
    loop = merged_lists(lists, **options)
    assert loop.full_block_cnt is loop.full_block_idx is loop.dq_write_order_full is None
    return loop.mask_block_cnt, loop.mask_block_idx, loop.dq_write_order


def repeated(lists: BlockSparseTensorsTorch, batch: int, head: int) -> BlockSparseTensorsTorch:
    return each_tensor(lists, lambda t: t.expand(batch, head, *t.shape[2:]))


def assert_repeated(mine: tuple[torch.Tensor, ...], alone: tuple[torch.Tensor, ...], batch: int, head: int) -> None:
    """Views that repeat what one list has."""
    for many, one in zip(mine, alone, strict=True):
        torch.testing.assert_close(many, one.expand_as(many), rtol=0, atol=0)
        assert many.shape[:2] == (batch, head)
        assert all(many.stride(d) == 0 for d in (0, 1) if many.shape[d] > 1)


@pytest.mark.parametrize("batch,head", [(2, 3), (1, 3), (2, 1)])
def test_repeated_lists_are_computed_once(batch: int, head: int) -> None:
    """Heads and batches that share a list share its transpose, and its semaphore values, of the same order too."""
    forward, backward = both_directions(Blocks(H=1, seed=5))
    wide_forward, wide = (repeated(lists, batch, head) for lists in (forward, backward))
    assert_repeated(transpose_lists(wide_forward, 5)[:4], transpose_lists(forward, 5)[:4], batch, head)
    locks, alone = (compute_dq_write_order(*arguments(forward, lists)) for lists in (wide, backward))
    assert_repeated((*locks, *merged(wide, locks)), (*alone, *merged(backward, alone)), batch, head)
    order = torch.tensor([2, 0, 1, 4, 3])
    expected = merged(backward, order=order)
    assert_repeated(merged(wide, order=order.expand(batch, head, 5)), expected, batch, head)
    for own, once in zip(merged(wide, order=order.repeat(batch, head, 1)), expected, strict=True):
        assert own.equal(once.expand(own.shape))


def test_mask_lists_for_every_head_and_full_lists_for_one() -> None:
    _, many = both_directions(Blocks(H=3, full=None, density=0.3, seed=6))
    listed, _ = table_of(many, 6)
    free = lists_from_blocks(~listed.any(1, keepdim=True), block_size=many.block_size)
    full_cnt, full_idx = free[:2]
    mixed = BlockSparseTensorsTorch(*many[:2], full_cnt, full_idx)
    repeated = BlockSparseTensorsTorch(*many[:2], full_cnt.expand(1, 3, -1), full_idx.expand(1, 3, -1, -1))
    assert_equal(merged(mixed), merged(repeated))


def band(heads: int, blocks: int, listed: int, capacity: int) -> tuple[torch.Tensor, ...]:
    """Arguments of compute_dq_write_order: a band of mask blocks, in rows of larger capacity, and for full blocks."""
    row, at = torch.arange(blocks).view(blocks, 1), torch.arange(capacity)
    count = torch.full((1, heads, blocks), listed, dtype=torch.int32)
    sides = []
    for index in (row - at, row + at):
        idx = (index % blocks).int().expand(1, heads, blocks, capacity).contiguous()
        sides += [count, idx, torch.zeros_like(count), torch.zeros_like(idx)]
    return tuple(sides)


@pytest.mark.parametrize("blocks", [512, 4096])
def test_narrow_rows_take_memory_by_the_block(blocks: int) -> None:
    """No table of all pairs of blocks, from lists or, as upstream has it too, from a BlockMask."""
    heads, listed, capacity = 2, 5, 8
    lists = band(heads, blocks, listed, capacity)
    entries = 2 * heads * blocks * capacity
    assert peak_bytes(lambda: compute_dq_write_order(*lists), "cpu") <= 80 * entries
    bounded = peak_bytes(lambda: compute_dq_write_order(*lists, listed=heads * blocks * listed), "cpu")
    assert bounded <= 80 * heads * blocks * listed + 8 * entries
    mask = SimpleNamespace(as_tuple=lambda: (blocks * 128, blocks * 128, *lists))
    of_mask = partial(block_sparsity.compute_dq_write_order_from_block_mask, mask)
    assert peak_bytes(of_mask, "cpu") <= 80 * entries
    assert_equal(of_mask(), compute_dq_write_order(*lists))


def test_width_and_bound() -> None:
    forward, backward = both_directions(Blocks(M=9, N=8, spare=4, seed=7))
    count = backward.mask_block_cnt + backward.full_block_cnt
    tight, total = int(count.max()), int(count.sum())
    wide, narrow = merged(backward), merged(backward, width=tight, listed=total)
    assert narrow[1].shape[3] == tight < wide[1].shape[3]
    sides = arguments(forward, backward)
    assert_equal(narrow[1:], tuple(t[..., :tight] for t in wide[1:]))
    assert_equal(compute_dq_write_order(*sides, listed=total), compute_dq_write_order(*sides))


def test_more_query_blocks_than_an_int_counts() -> None:
    _, backward = both_directions(Blocks(H=8, seed=8))
    assert_equal(merged(backward, num_q_blocks=1 << 30), merged(backward))


def test_large_numbers() -> None:
    """Query blocks, rows and semaphore values whose product passes 32 bits."""
    N, last = 3000, (1 << 20) - 1
    idx = torch.tensor([0, last]).expand(1, 1, N, 2).int().contiguous()
    cnt = torch.full((1, 1, N), 2, dtype=torch.int32)
    _, entries, locks = merged(BlockSparseTensorsTorch(cnt, idx))
    assert locks[0, 0].tolist() == [[n, n] for n in range(N)]
    assert (entries[..., 0] == last * 2).all() and not entries[..., 1].any()


CASE = Blocks(B=2, H=3, M=40, N=30, shuffle=True)


def made_of(forward: BlockSparseTensorsTorch, backward: BlockSparseTensorsTorch) -> list[torch.Tensor]:
    order = compute_dq_write_order(*arguments(forward, backward), spt=True)
    ordered = backward._replace(dq_write_order=order[0], dq_write_order_full=order[1])
    launch = torch.arange(CASE.N, device=order[0].device).flip(0)
    loops = merged_lists(ordered), merged_lists(backward, order=launch, num_q_blocks=CASE.M)
    made = *order, *transpose_lists(forward, CASE.N, width=CASE.M)[:4], *loops[0][:2], *loops[1][:2]
    return [*made, *(loop.dq_write_order for loop in loops)]


@pytest.mark.gpu
def test_lists_are_made_without_a_wait_and_in_graphs() -> None:
    """As on a CPU, which `fuzz/properties/lists.py` compares in general."""
    lists = both_directions(CASE)
    expected, on_gpu = made_of(*lists), [each_tensor(side, torch.Tensor.cuda) for side in lists]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = made_of(*on_gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph, captured = capture(lambda: made_of(*on_gpu))
    graph.replay()
    for made in (found, captured):
        assert_equal(tuple(t.cpu() for t in made), tuple(expected))


@pytest.mark.gpu
def test_an_order_of_writes_at_a_million_tokens() -> None:
    """32 heads, 16 unsorted blocks a query block: under 1 GiB beside the lists, and under 3 ms."""
    B, H, M, listed = 1, 32, (1 << 20) // 128, 16
    draw = torch.Generator("cuda").manual_seed(0)
    # Each row's blocks are 16 of as many strides through all: no block twice.
    first = torch.randint(M, (B, H, M, 1), device="cuda", generator=draw)
    idx = ((first + torch.arange(listed, device="cuda") * 509) % M).flip(-1).int()
    cnt = torch.full((B, H, M), listed, dtype=torch.int32, device="cuda")
    forward = BlockSparseTensorsTorch(cnt, idx, block_size=(128, 128))
    backward = transpose_lists(forward, M)
    arguments = (cnt, idx, None, None, backward.mask_block_cnt, backward.mask_block_idx, None, None)
    call = partial(compute_dq_write_order, *arguments, spt=True)
    (order, _), used = call(), peak_bytes(call, "cuda")
    assert order.shape == backward.mask_block_idx.shape and int(order.max()) == listed - 1
    assert used < 1 << 30, f"{used / 2**30:.2f} GiB"
    times = interleaved({"order": call}, repeats=10, device="cuda")["order"]
    assert min(times) < 3, f"{min(times):.2f} ms"
