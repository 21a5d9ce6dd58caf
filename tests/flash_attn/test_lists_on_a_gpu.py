"""Block lists on a GPU: the same as on the CPU, without waiting for the host, and in a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flash_attn.cute.block_lists import transpose_lists
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.lists.write_order import compute_dq_write_order, merged_lists
from fuzz.blocks import both_directions
from fuzz.case import Blocks

pytestmark = pytest.mark.gpu

CASES = [Blocks(B=2, H=3, M=40, N=30, full=full, shuffle=shuffle) for full in (None, 0.5) for shuffle in (False, True)]


def results(case: Blocks, forward: BlockSparseTensorsTorch, backward: BlockSparseTensorsTorch) -> Iterator[Any]:
    for spt in (False, True):
        order = compute_dq_write_order(*forward[:4], *backward[:4], spt=spt)
        yield order
        ordered = backward._replace(dq_write_order=order[0], dq_write_order_full=order[1])
        launch = torch.arange(case.N, device=order[0].device)
        launch = launch.flip(0) if spt else launch
        for loop in (
            merged_lists(ordered, descending=not spt),
            merged_lists(backward, order=launch, num_q_blocks=case.M),
        ):
            yield loop.mask_block_cnt, loop.mask_block_idx, loop.dq_write_order
    yield transpose_lists(forward, case.N, width=case.M)[:4]


def assert_same(mine: list[Any], other: list[Any]) -> None:
    for a, b in ((a, b) for tensors in zip(mine, other, strict=True) for a, b in zip(*tensors, strict=True)):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a.cpu(), b.cpu(), rtol=0, atol=0)


@pytest.mark.parametrize("case", CASES)
def test_same_as_on_the_cpu(case: Blocks) -> None:
    lists = both_directions(case)
    expected = list(results(case, *lists))
    on_gpu = [BlockSparseTensorsTorch(*(t.cuda() if torch.is_tensor(t) else t for t in side)) for side in lists]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = list(results(case, *on_gpu))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(actual, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = list(results(case, *on_gpu))
    graph.replay()
    torch.cuda.synchronize()
    assert_same(captured, expected)


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
    compute_dq_write_order(*arguments, spt=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, times = torch.cuda.memory_allocated(), []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        order = compute_dq_write_order(*arguments, spt=True)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    used = torch.cuda.max_memory_allocated() - before
    assert order[0].shape == backward.mask_block_idx.shape and int(order[0].max()) == listed - 1
    assert used < 1 << 30, f"{used / 2**30:.2f} GiB"
    assert min(times) < 3, f"{min(times):.2f} ms"
