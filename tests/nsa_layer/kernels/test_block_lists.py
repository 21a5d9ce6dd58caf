"""Lists made by kernels against the lists, transposes and plans that PyTorch makes of the same choice."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import pytest
import torch
from fa_compile import Worker
from kernel_cases import poison, starts

from fuzz.blocks import each_tensor
from fuzz.choices import random_choice
from nsa_layer.config import NSAConfig
from nsa_layer.warm_up.lookup import OnMeta
from nsa_tools.testing.pasteable import Pasteable


@dataclass(frozen=True, repr=False)
class Case(Pasteable):
    """`lengths`: packed sequences; one number: a batch of two of that length."""

    lengths: tuple[int, ...] = (1000,)
    heads: tuple[int, int] = (4, 2)
    block_size: int = 64
    q_tile: int = 128
    n: int = 6
    causal: bool = True
    longest: int = 32

    @property
    def packed(self) -> bool:
        return len(self.lengths) > 1

    @property
    def kv_tile(self) -> int:
        return 64 if self.block_size == 64 else 128

    @property
    def config(self) -> NSAConfig:
        return NSAConfig(block_size=self.block_size, q_tile=self.q_tile, block_counts=self.n)

    @property
    def static(self) -> dict:
        return dict(block_size=self.block_size, q_tile=self.q_tile, kv_tile=self.kv_tile, causal=self.causal)


PACK = (300, 0, 1, 128, 2000, 0)
MANY = Case((70, 700, 5) * 100 + (4000,))
CASES = [
    Case(),
    Case(lengths=(1,)),
    Case(lengths=(63,), heads=(2, 2)),
    Case(lengths=(5000,), n=16, longest=3),
    Case(lengths=(5000,), n=7, causal=False, heads=(8, 1)),
    Case(block_size=256, q_tile=256),
    Case(block_size=256, n=3, causal=False),
    Case(block_size=256, n=3),
    Case(lengths=(890,), block_size=256, n=16),
    Case(longest=2),
    Case(heads=(3, 3)),
    Case(PACK),
    Case(PACK, longest=2),
    Case(PACK, heads=(3, 3)),
    Case(PACK, block_size=128, causal=False),
    Case(PACK, block_size=256, longest=2),
    MANY,
    Case((40_000,), n=16),
    Case((200_000,), n=16, heads=(2, 1)),
    Case(lengths=(5000,), n=16, longest=2, heads=(8, 1)),
]


def choice(case: Case, seed: int = 0) -> list[torch.Tensor]:
    """The listed blocks [B, Hkv, M, n] of each sequence that is not empty."""
    generator, config = torch.Generator().manual_seed(seed), case.config
    B, Hkv = 1 if case.packed else 2, case.heads[1]
    draw = random_choice if max(case.lengths) < 10_000 else many_blocks
    return [draw(T, B, Hkv, config, generator) for T in case.lengths if T]


def many_blocks(T: int, B: int, H: int, config: NSAConfig, generator: torch.Generator) -> torch.Tensor:
    """Long lists: the first block, the tile's own, and others anywhere before; quick to draw."""
    M, n, own = config.num_tiles(T), config.list_width(T), config.q_tile // config.block_size
    last = torch.arange(1, M + 1).view(-1, 1) * own - 1
    drawn = (torch.rand(B, H, M, n, generator=generator) * (last + 1)).int()
    drawn[..., 0] = 0
    drawn[..., 1:3] = (last - torch.arange(2)).clamp(min=0)
    ordered = drawn.sort(-1).values
    ordered[..., 1:][ordered.diff(dim=-1) == 0] = T  # twice is once
    ordered = ordered.clamp(max=T).sort(-1).values
    return torch.where(ordered < config.num_blocks(T), ordered, -1).int()


def made(case: Case, parts: list[torch.Tensor], device: str = "cuda"):
    """Forward and backward lists out of the kernels; memory that they leave alone is poisoned beforehand."""
    lists = parts[0].to(device)
    if case.packed:
        width = max(part.shape[-1] for part in parts)
        parts = [torch.nn.functional.pad(part, (0, width - part.shape[-1]), value=-1)[0] for part in parts]
        lists = torch.cat(parts, dim=1).to(device)
    for _ in range(2):
        poison(device)
        lists_made = both_lists(case, lists)
    return lists_made


def both_lists(case: Case, lists: torch.Tensor) -> tuple:
    """Forward and backward lists of the choice, by the kernels."""
    from nsa_layer.kernels.block_lists.make import backward_lists, forward_lists

    T, static, rows = max(case.lengths), case.static, {}
    if case.packed:
        tiles = [[-(-T // size) for T in case.lengths] for size in (case.q_tile, case.kv_tile)]
        static |= dict(zip(("cu_tiles", "cu_rows"), (starts(of, lists.device) for of in tiles)))
        rows = dict(rows=sum(tiles[1]))
    counts = (lists >= 0).sum(-1, dtype=torch.int32)
    forward = forward_lists(lists, counts, T, **static)
    return forward, backward_lists(lists, T, case.heads, longest=case.longest, **static, **rows)


def key_tiles(lists: torch.Tensor, T: int, case: Case):
    """Counts, and the tiles of keys of each tile of queries, ascending and filled up with 0, in the plainest way."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    N, ratio = -(-T // case.kv_tile), case.block_size // case.kv_tile
    blocks = torch.zeros(*lists.shape[:3], case.config.num_blocks(T) + 1, dtype=torch.bool)
    blocks.scatter_(-1, lists.long().remainder(blocks.shape[-1]), True)
    listed = blocks[..., :-1].repeat_interleave(ratio, -1)[..., :N]
    if case.causal:
        last = (torch.arange(lists.shape[2]) + 1) * case.q_tile
        listed &= torch.arange(N) * case.kv_tile < last[:, None]
    counts, width = listed.sum(-1, dtype=torch.int32), min(N, lists.shape[-1] * ratio)
    tiles = torch.arange(N, dtype=torch.int32).where(listed, N).sort(-1).values[..., :width]
    tiles = tiles.masked_fill(tiles == N, 0)
    return BlockSparseTensorsTorch(counts, tiles, block_size=(case.q_tile, case.kv_tile))


def assert_rows(case: Case, forward, counts: torch.Tensor, tiles: torch.Tensor, b: int) -> None:
    cnt, idx = forward.mask_block_cnt, forward.mask_block_idx
    if case.packed:
        first, last = forward.cu_total_m_blocks[b : b + 2].tolist()
        cnt, idx = cnt[:, first:last], idx[:, first:last]
    else:
        cnt, idx = cnt[b], idx[b]
    assert torch.equal(cnt, counts)
    width = min(idx.shape[-1], tiles.shape[-1])
    used = torch.arange(width) < counts.unsqueeze(-1)
    assert torch.equal(torch.where(used, idx[..., :width], 0), torch.where(used, tiles[..., :width], 0))


def assert_launch(backward, items: torch.Tensor, heads: tuple[int, int]) -> None:
    """Items of nothing stand at the end; the heads that share dk and dv take turns."""
    plan, (Hq, Hkv) = backward.plan, heads
    assert torch.equal(plan[: len(items)], items) and not plan[plan[:, 4] == plan[:, 3]].any()
    launched: dict[tuple[int, int, int], int] = {}
    for b, h, n, _, _, turn, *_ in items.tolist():
        key = b, h * Hkv // Hq, n
        assert turn == launched.get(key, 0)
        launched[key] = turn + 1


def trace_lists(fields_of_case: dict) -> None:
    """In a compiling worker: everything that `made` launches."""
    case = Case(**fields_of_case)
    shape = (case.heads[1], sum(map(case.config.num_tiles, case.lengths)), case.config.list_width(max(case.lengths)))
    with OnMeta():
        both_lists(case, torch.empty(shape if case.packed else (2, *shape), dtype=torch.int32, device="cuda"))


@pytest.mark.parametrize("case", [CASES[0], CASES[7], CASES[12]], ids=str)
def test_kernels_are_traced(compiler: Worker, case: Case) -> None:
    compiler.trace(trace_lists, asdict(case))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case}"[:100])
def test_rows_and_items_are_those_of_pytorch(case: Case) -> None:
    """Every row and item, in order, is that of PyTorch."""
    from flash_attn.cute.block_lists import transpose_lists
    from flash_attn.cute.lists.backward_plan import plan_backward

    parts = choice(case)
    forward, backward = (each_tensor(lists, torch.Tensor.cpu) for lists in made(case, parts))
    Hq, Hkv = case.heads
    planned = Hq > Hkv
    assert (backward.plan is not None) == planned
    items = backward.plan[backward.plan[:, 4] > backward.plan[:, 3]] if planned else None
    numbers = [b for b, T in enumerate(case.lengths) if T] if case.packed else [0, 1]
    for at, b in enumerate(numbers):
        T, lists = (case.lengths[b], parts[at]) if case.packed else (case.lengths[0], parts[0][b : b + 1])
        one = key_tiles(lists, T, case)
        assert_rows(case, forward, one.mask_block_cnt[0], one.mask_block_idx[0], b)
        N = -(-T // case.kv_tile)
        tensors = transpose_lists(one, N)
        sizes = dict(num_heads=Hq, num_heads_kv=Hkv, num_q_blocks=lists.shape[2], longest=case.longest)
        expected = plan_backward(tensors, **sizes)
        rows = int(backward.cu_total_n_blocks[b])
        assert int(backward.cu_total_n_blocks[b + 1]) - rows == N
        starts = backward.cu_block_idx_offsets[:, rows : rows + N]
        counts = expected.mask_block_cnt[0]
        assert torch.equal(backward.mask_block_cnt[:, rows : rows + N], counts)
        ours, theirs = backward.mask_block_idx, expected.mask_block_idx
        used = torch.arange(theirs.shape[-1]) < counts.unsqueeze(-1)
        at_entries = torch.where(used, starts.unsqueeze(-1) + torch.arange(theirs.shape[-1]), 0)
        assert torch.equal(torch.where(used, ours[at_entries], 0), torch.where(used, theirs[0], 0))
        if planned:
            own = items[items[:, 0] == b]
            theirs = expected.plan[expected.plan[:, 4] > expected.plan[:, 3]]
            assert torch.equal(own[:, 1:6], theirs[:, 1:6])
            place = (own[:, 6].long() & 0xFFFFFFFF) | (own[:, 7].long() << 32)
            assert torch.equal(place, starts[own[:, 1].long() * starts.shape[0] // Hq, own[:, 2].long()])
    if planned:
        assert_launch(backward, items, case.heads)


def widths_of_rows(T: int, block_size: int) -> tuple[int, int]:
    """In a compiling worker: the width of forward's rows with room for every block, and what attention allows."""
    from nsa_layer.kernels.block_lists.make import forward_lists

    config = NSAConfig(block_size=block_size, q_tile=128)
    lists = torch.empty(1, 2, config.num_tiles(T), config.list_width(T), dtype=torch.int32, device="cuda")
    counts = torch.empty(lists.shape[:-1], dtype=torch.int32, device="cuda")
    lists = forward_lists(lists, counts, T, block_size=block_size, q_tile=128, kv_tile=128, causal=True)
    return lists.mask_block_idx.shape[-1], -(-T // 128)


@pytest.mark.parametrize(("T", "block_size"), [(257, 256), (890, 256), (100, 512), (1024, 256)])
def test_no_more_room_than_the_sequence_has_tiles(compiler: Worker, T: int, block_size: int) -> None:
    """The last block may reach past the end: its tiles there are no entries, and attention refuses room for them."""
    width, tiles = compiler.trace(widths_of_rows, T, block_size)
    assert width == tiles
