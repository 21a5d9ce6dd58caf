"""The model of deterministic backward: against a queue of events, on deadlocks, and on measured ratios."""

from __future__ import annotations

import heapq
import random
import time

import pytest
import torch
from fa_lists import ListCase, random_lists
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_attn.cute.block_lists import lists_from_blocks, transpose_lists
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.list_schedule import (
    Costs,
    Simulated,
    heads_in_l2,
    launch_order,
    launch_rows,
    long_rows_first,
    simulate,
    waits_for_earlier_launches,
)
from flash_attn.cute.write_order import Walk, deterministic_walk, merged_walk

# Exact in binary, so that two ways to add them up agree.
COSTS = Costs(add=0.25, release=0.5, start=1.0, end=0.75, turn=1.5, subtiles=2)


class Clock:
    """The same model as a queue of events: what happens next in time happens next."""

    def __init__(self, walk: Walk, launch: list[int], group: int, slots: int, costs: Costs):
        self.walk, self.todo, self.group, self.slots, self.costs = walk, list(launch), group, slots, costs
        self.N = walk.cnt.shape[2]
        self.queue: list[tuple] = []
        self.released: dict[tuple, int] = {}
        self.parked: dict[tuple, list[tuple]] = {}
        self.running: set[int] = set()
        self.waiting = self.last = 0.0

    def push(self, when: float, event: str, *of: object) -> None:
        heapq.heappush(self.queue, (when, len(self.queue), random.random(), event, of))

    def run(self) -> Simulated:
        for _ in range(self.slots):
            self.start(0.0)
        while self.queue:
            now, _, _, event, of = heapq.heappop(self.queue)
            getattr(self, event)(now, *of)
        if self.running or self.todo:
            return Simulated(float("inf"), float("inf"))
        return Simulated(self.last, self.waiting)

    def start(self, now: float) -> None:
        if not self.todo:
            return
        row = self.todo.pop(0)
        self.running.add(row)
        count = int(self.walk.cnt.flatten()[row])
        entries, locks = (t.flatten(0, 2)[row, :count].tolist() for t in self.walk[1:])
        both = zip(entries, locks, strict=True)
        tiles = [((row // self.N, m // 2, u), v) for m, v in both for u in range(self.costs.subtiles)]
        ideal = self.costs.start + len(tiles) + self.costs.end + (self.costs.turn if self.group > 1 else 0)
        self.next_step(now + self.costs.start, now + self.costs.start, row, tiles, now + ideal)

    def next_step(self, now: float, computed: float, row: int, tiles: list, ideal: float) -> None:
        """The buffer is free; the step before was computed at `computed`."""
        if tiles:
            done = max(now, computed + 1)
            self.push(done, "add", done, row, tiles, ideal)
        else:
            self.push(now + self.costs.end, "turn", row, ideal)

    def add(self, now: float, computed: float, row: int, tiles: list, ideal: float) -> None:
        if self.may(tiles[0], "add", computed, row, tiles, ideal):
            self.push(now + self.costs.add, "added", computed, row, tiles, ideal)

    def added(self, now: float, computed: float, row: int, tiles: list, ideal: float) -> None:
        self.push(now + self.costs.release, "release", tiles[0][0])
        self.next_step(now, computed, row, tiles[1:], ideal) if tiles[1:] else self.finish(now, computed, row, ideal)

    def finish(self, now: float, computed: float, row: int, ideal: float) -> None:
        self.push(max(now, computed) + self.costs.end, "turn", row, ideal)

    def turn(self, now: float, row: int, ideal: float) -> None:
        head, block = divmod(row, self.N)
        key = ("turn", head // self.group, block)
        if self.group == 1:
            self.end(now, row, ideal)
        elif self.may((key, head % self.group), "turn", row, ideal):
            self.push(now + self.costs.turn, "turned", key, row, ideal)

    def turned(self, now: float, key: tuple, row: int, ideal: float) -> None:
        self.push(now + self.costs.release, "release", key)
        self.end(now, row, ideal)

    def end(self, now: float, row: int, ideal: float) -> None:
        self.waiting += now - ideal
        self.last = max(self.last, now)
        self.running.remove(row)
        self.start(now)

    def may(self, lock: tuple, *event: object) -> bool:
        if self.released.get(lock[0], 0) == lock[1]:
            return True
        self.parked.setdefault(lock, []).append(event)
        return False

    def release(self, now: float, key: tuple) -> None:
        self.released[key] = self.released.get(key, 0) + 1
        for event in self.parked.pop((key, self.released[key]), []):
            self.push(now, *event)


CASES = st.builds(
    ListCase,
    B=st.integers(1, 2),
    H=st.sampled_from([1, 2, 4]),
    M=st.integers(1, 9),
    N=st.integers(1, 9),
    density=st.sampled_from([0.0, 0.3, 1.0]),
    sort=st.booleans(),
    seed=st.integers(0, 1 << 30),
)


@settings(max_examples=150, deadline=None)
@given(CASES, st.integers(1, 6), st.integers(1, 4), st.booleans(), st.randoms(use_true_random=False))
def test_same_as_by_the_clock(case: ListCase, slots: int, interleave: int, shuffle: bool, draw: random.Random) -> None:
    """Also where lock values know nothing of the launch order, and CTAs get stuck or nearly so."""
    _, backward = random_lists(case)
    group = draw.choice([g for g in (1, 2, 4) if case.H % g == 0])
    order = draw.sample(range(case.N), case.N)
    walk = deterministic_walk(backward, order=torch.tensor(order))
    rows = launch_rows(order, case.B, case.H, interleave=interleave, group=group).tolist()
    if shuffle:
        draw.shuffle(rows)
    model = simulate(walk, rows, group=group, slots=slots, costs=COSTS)
    clock = Clock(walk, rows, group, slots, COSTS).run()
    assert (model.time, model.waiting) == (clock.time, clock.waiting)
    assert (model.stuck is not None) == (clock.time == float("inf"))
    safe = waits_for_earlier_launches(walk, rows, group=group)
    assert safe or shuffle
    assert model.stuck is None or not safe
    # One CTA at a time gets stuck exactly if it waits for a later one.
    for launch in (rows, rows[::-1]):
        one_by_one = simulate(walk, launch, group=group, slots=1, costs=COSTS)
        assert (one_by_one.stuck is None) == waits_for_earlier_launches(walk, launch, group=group)


def window(N: int, blocks: int, H: int) -> BlockSparseTensorsTorch:
    """Causal: key block n is listed by the query blocks n .. n + blocks."""
    cnt = torch.tensor([min(blocks + 1, N - n) for n in range(N)], dtype=torch.int32)
    idx = (torch.arange(N).view(-1, 1) + torch.arange(blocks + 1)).clamp(max=N - 1).int()
    return BlockSparseTensorsTorch(cnt.expand(1, H, N), idx.expand(1, H, N, blocks + 1))


def selected(N: int, count: int, H: int) -> BlockSparseTensorsTorch:
    """Causal: every query block lists `count` random key blocks up to its own."""
    torch.manual_seed(0)
    score = torch.rand(H, N, N).masked_fill(torch.ones(N, N).triu(1).bool(), -1.0)
    listed = torch.zeros(H, N, N, dtype=torch.bool).scatter_(-1, score.topk(min(count, N)).indices, True)
    listed = (listed & (score >= 0)).transpose(1, 2)
    cnt, idx = listed.sum(-1, dtype=torch.int32), listed.int().sort(dim=-1, descending=True, stable=True).indices.int()
    return BlockSparseTensorsTorch(cnt[None], idx[None, :, :, : int(cnt.max())].contiguous())


def test_a_chain() -> None:
    """Two CTAs that walk the same query blocks in the same order: the second is one add and one release behind."""
    both = BlockSparseTensorsTorch(*window(2, 0, 1)[:2])
    both = both._replace(
        mask_block_cnt=both.mask_block_cnt * 0 + 2, mask_block_idx=torch.tensor([[[[0, 1], [0, 1]]]]).int()
    )
    walk = deterministic_walk(both, descending=False)
    alone = COSTS.start + 4 + COSTS.add + COSTS.end
    assert simulate(walk, [0, 1], slots=2, costs=COSTS).time == alone + COSTS.add + COSTS.release
    assert simulate(walk, [0, 1], slots=1, costs=COSTS) == Simulated(2 * alone, 2 * COSTS.add)
    assert simulate(walk._replace(locks=None), [1, 0], slots=1, costs=COSTS).time == 2 * (alone - COSTS.add)


def test_launched_against_the_lock_values() -> None:
    walk = deterministic_walk(window(8, 3, 1))
    stuck = simulate(walk, range(7, -1, -1), slots=2, costs=COSTS).stuck
    assert (stuck.batch, stuck.head, stuck.key_block, stuck.query_block) == (0, 0, 7, 7)
    assert (stuck.lock, stuck.released, stuck.in_flight, stuck.unlaunched) == (3, 0, 2, 6)
    assert "head 0, key block 7 waits for lock value 3 of query block 7, which is at 0" in str(stuck)
    assert simulate(walk, range(7, -1, -1), slots=8, costs=COSTS).stuck is None


def test_query_heads_that_launch_key_blocks_in_different_orders() -> None:
    """The turns at dk and dv are locks as well: with interleaved heads, an order for each head of a group deadlocks."""
    N, H, deadlocks = 40, 4, 0
    for seed in range(10):
        draw = random.Random(seed)
        orders = [draw.sample(range(N), N) for _ in range(H)]
        walk = deterministic_walk(selected(N, 8, H), order=torch.tensor(orders))
        interleaved = [h * N + orders[h][i] for i in range(N) for h in range(H)]
        by_head = [h * N + orders[h][i] for h in range(H) for i in range(N)]
        assert simulate(walk, by_head, group=H, slots=16).stuck is None
        outcome = simulate(walk, interleaved, group=H, slots=16)
        deadlocks += outcome.stuck is not None
        shared = deterministic_walk(selected(N, 8, H), order=torch.tensor(orders[0]))
        rows = launch_rows(orders[0], 1, H, interleave=H, group=H)
        assert simulate(shared, rows, group=H, slots=16).stuck is None
    assert deadlocks == 10


@pytest.mark.parametrize(
    "B,H,interleave,group,expected",
    [
        (1, 2, 1, 1, [2, 0, 1, 5, 3, 4]),
        (1, 2, 2, 1, [2, 5, 0, 3, 1, 4]),
        (1, 4, 2, 2, [2, 8, 0, 6, 1, 7, 5, 11, 3, 9, 4, 10]),  # heads 0 and 2 have keys of their own
        (2, 2, 3, 2, [2, 8, 5, 0, 6, 3, 1, 7, 4, 11, 9, 10]),
        (1, 4, 1, 4, [2, 0, 1, 5, 3, 4, 8, 6, 7, 11, 9, 10]),
    ],
)
def test_launch_rows(B: int, H: int, interleave: int, group: int, expected: list[int]) -> None:
    assert launch_rows([2, 0, 1], B, H, interleave=interleave, group=group).tolist() == expected


def test_some_launched_ahead() -> None:
    rows = launch_rows([2, 0, 1], 1, 4, interleave=2, group=2, ahead=1)
    assert rows.tolist() == [2, 5, 8, 11, 0, 6, 1, 7, 3, 9, 4, 10]


def with_a_long_list(N: int, H: int, k: int) -> BlockSparseTensorsTorch:
    """Causal: the query block's own, `k` random ones, and the first, which so has the longest list."""
    torch.manual_seed(0)
    score = torch.rand(H, N, N)
    score[:, :, 0] = score[:, torch.arange(N), torch.arange(N)] = 2.0
    score = score.masked_fill(torch.ones(N, N).triu(1).bool(), -1.0)
    listed = torch.zeros(H, N, N, dtype=torch.bool).scatter_(-1, score.topk(min(k + 2, N)).indices, True) & (score >= 0)
    return transpose_lists(lists_from_blocks(listed[None], block_size=(128, 128)), N)


def test_long_rows_first() -> None:
    """In the default mode the long row of each head, launched first, is not what the end waits for."""
    lists = with_a_long_list(256, 8, 6)
    rows = long_rows_first(lists.mask_block_cnt)
    assert rows[:8].tolist() == [h * 256 for h in range(8)]
    rest = rows[8:][lists.mask_block_cnt.flatten()[rows[8:].long()] <= 4 * lists.mask_block_cnt.double().mean()]
    assert (rest.diff() > 0).all()
    walk = merged_walk(lists)
    head_by_head, long_first = simulate(walk, range(8 * 256)).time, simulate(walk, rows).time
    ideal = float((walk.cnt * 2 + 2).sum()) / 132
    assert long_first < 1.05 * max(ideal, 256 * 2)
    assert head_by_head > 1.3 * long_first


def test_launch_order_puts_long_lists_ahead() -> None:
    launch = launch_order(with_a_long_list(128, 8, 12), group=4, interleave=2, slots=32)
    assert launch.name == "long ones, then right to left" and launch.ahead >= 1 and launch.order[0] == 0
    assert launch.rows[:8].tolist() == [h * 128 for h in range(8)]
    assert launch.simulated.stuck is None


def test_heads_in_l2() -> None:
    """What SM90 launches together at head dimension 128."""
    assert [heads_in_l2(T, 128, 128) for T in (1024, 8192, 16384, 32768, 65536)] == [32, 4, 2, 1, 1]


# Measured on an H200, deterministic over default (32 query heads, 8 key/value heads, head dimension 128).
MEASURED = {
    ("window", 16384): {"up": 3.2, "up, rising": 1.14, "down": 3.0, "down, rising": 1.11},
    ("window", 65536): {"up": 6.8, "up, rising": 1.04, "down": 6.7, "down, rising": 1.04},
    ("selected", 16384): {"up": 2.9, "up, rising": 1.66, "down": 1.7, "down, rising": 1.31},
    ("selected", 65536): {"up": 2.5, "up, rising": 1.38, "down": 1.4, "down, rising": 1.21},
}


def as_walked(lists: BlockSparseTensorsTorch, spt: bool) -> Walk:
    """By query block, in the direction of the launch."""
    walk = deterministic_walk(lists, spt=spt)
    key = walk.entries.long() * (-1 if spt else 1)
    key = key.masked_fill(torch.arange(key.shape[3]) >= walk.cnt.unsqueeze(-1), 1 << 40)
    order = key.sort(-1).indices
    return Walk(walk.cnt, walk.entries.gather(-1, order), walk.locks.gather(-1, order))


@pytest.mark.parametrize(
    "name,T", [pytest.param(*case, marks=pytest.mark.sweep if case[1] > 16384 else ()) for case in MEASURED]
)
def test_measured_ratios(name: str, T: int) -> None:
    """The model gives the measured ratios to within an eighth. Those include what runs before and after the kernel."""
    N, H, group = T // 128, 32, 4
    before_and_after = 400 * T / 65536  # steps: 1.0 ms at 65,536 tokens, 2.5 us a step
    lists = window(N, 16, H) if name == "window" else selected(N, 8, H)
    default = simulate(merged_walk(lists), range(H * N)).time + before_and_after
    ratios = {}
    for way, spt in (("up", False), ("down", True)):
        order = range(N)[:: -1 if spt else 1]
        rows = launch_rows(order, 1, H, interleave=heads_in_l2(T, 128, 128))
        for walk_name, walk in ((way, as_walked(lists, spt)), (way + ", rising", deterministic_walk(lists, spt=spt))):
            took = simulate(walk, rows, group=group).time + before_and_after
            ratios[walk_name] = took / default
    for way, measured in MEASURED[name, T].items():
        assert measured / 1.12 <= ratios[way] <= measured * 1.12, (way, ratios)


def test_launch_order() -> None:
    lists = selected(32, 8, 8)
    launch = launch_order(lists, group=4, interleave=[1, 2], slots=16)
    assert launch.name == "right to left" and launch.order.tolist() == list(range(31, -1, -1))
    assert launch.interleave == 2 and launch.simulated.stuck is None
    assert launch.rows.tolist() == launch_rows(launch.order, 1, 8, interleave=2, group=4).tolist()
    walk = deterministic_walk(lists, spt=True)
    assert launch.simulated == simulate(walk, launch.rows, group=4, slots=16)
    default = simulate(merged_walk(lists), range(8 * 32), slots=16)
    assert launch.ratio == launch.simulated.time / default.time


def test_a_plan_follows_the_order() -> None:
    from flash_attn.cute import block_lists

    lists = with_a_long_list(128, 8, 12)
    order = block_lists.launch_order(lists, group=4, interleave=2, slots=32).order
    assert order.tolist() not in (list(range(128)), list(range(127, -1, -1)))
    options = dict(num_heads=8, num_heads_kv=2, num_q_blocks=128, longest=1 << 20, deterministic=True)
    plan = block_lists.plan_backward(lists, schedule=order, **options).plan
    listed = lists.mask_block_cnt[0] + (0 if lists.full_block_cnt is None else lists.full_block_cnt[0])
    for head in range(8):
        launched = [n for b, h, n, *_ in plan[plan[:, 4] > plan[:, 3]].tolist() if (b, h) == (0, head)]
        assert launched == [n for n in order.tolist() if listed[head, n]]


def test_launch_order_starts_with_what_takes_longest() -> None:
    """A key block in the middle with a long list of its own: launched first, it is not what the end waits for."""
    N = 33
    cnt = torch.ones(1, 1, N, dtype=torch.int32)
    idx = torch.arange(N, 2 * N, dtype=torch.int32).view(1, 1, N, 1).repeat(1, 1, 1, N)
    cnt[..., N // 2], idx[..., N // 2, :] = N, torch.arange(N)
    launch = launch_order(BlockSparseTensorsTorch(cnt, idx), slots=8)
    assert launch.name == "longest first" and launch.order[0] == N // 2


def test_a_quarter_of_a_million_blocks_take_seconds() -> None:
    lists = window(512, 16, 32)
    begin = time.perf_counter()
    simulate(deterministic_walk(lists), range(32 * 512), group=4)
    assert time.perf_counter() - begin < 10


def test_errors() -> None:
    walk = deterministic_walk(window(4, 1, 2))
    with pytest.raises(ValueError, match=r"rows must hold each of 0 \.\. 7 once, got 7 numbers"):
        simulate(walk, range(7))
    with pytest.raises(ValueError, match=r"order must be a permutation of 0 \.\. 2"):
        launch_rows([0, 1, 1], 1, 2)
    with pytest.raises(ValueError, match="group=3 must divide the 4 query heads"):
        launch_rows([0, 1], 1, 4, group=3)
