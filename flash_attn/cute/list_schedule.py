"""A model of deterministic block-sparse backward on the CPU: what its locks cost, and whether it ends.

CTAs, one a query head and key block, are launched in a given order onto as many slots as the GPU has multiprocessors;
whenever one ends, the next is launched. A CTA walks its entries in order. Each takes a step of computing and then an
add to dq, which waits until the adds with smaller lock values to the same query block are done. Computing runs one step
ahead of the adds, as in the kernels, where dq passes through one buffer in shared memory. At its end a CTA adds to dk
and dv; the query heads that share a key/value head take turns.

A time follows from the times of the CTAs waited for, so there is no clock: a CTA runs on until it meets a lock that
nobody has released yet, and goes on when somebody does.

`launch_order` tries orders in this model. Whatever it returns cannot deadlock: lock values follow the order in which
key blocks are launched, and of the query heads that share a key block the earlier is launched first, so that every wait
points to an earlier launch.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flash_attn.cute.list_arguments import integer, tensor
from flash_attn.cute.write_order import Walk, deterministic_walk

NEVER = float("-inf")
LONG = 4.0  # times the mean


@dataclass(frozen=True)
class Costs:
    """Times in steps; a step computes one query tile of the kernel (about 2.5 us).

    The defaults reproduce timings of SM90 backward on an H200: head dimension 128, query tiles of 64, blocks of 128.

    Attributes:
        add: from dq in shared memory until all of it is added in global memory.
        release: from there until a CTA that waits has seen it.
        start, end: of a CTA, before its first step and after its last.
        turn: a CTA's part of adding to dk and dv in turns.
        subtiles: query tiles of the kernel in a listed block.
    """

    add: float = 0.35
    release: float = 0.35
    start: float = 1.0
    end: float = 1.0
    turn: float = 1.5
    subtiles: int = 2


@dataclass(frozen=True)
class Stuck:
    """The earliest launched CTA that waits for what nobody in flight will release.

    Attributes:
        batch, head, key_block: of the CTA.
        query_block: of the entry that waits; None: it waits for its turn at dk and dv.
        lock, released: the value waited for, and the value reached.
        in_flight, unlaunched: CTAs.
    """

    batch: int
    head: int
    key_block: int
    query_block: int | None
    lock: int
    released: int
    in_flight: int
    unlaunched: int

    def __str__(self) -> str:
        what = "dk and dv" if self.query_block is None else f"query block {self.query_block}"
        return (
            f"batch {self.batch}, head {self.head}, key block {self.key_block} waits for lock value {self.lock} of "
            f"{what}, which is at {self.released}; {self.in_flight} CTAs in flight, {self.unlaunched} not launched"
        )


@dataclass(frozen=True)
class Simulated:
    """Outcome of a simulation, in steps.

    Attributes:
        time: until the last CTA ends; infinite if they get stuck.
        waiting: of all CTAs together, for locks and turns and the room that an add in waiting takes up.
        stuck: what waits forever, or None.
    """

    time: float
    waiting: float
    stuck: Stuck | None = None


@dataclass(frozen=True)
class Launch:
    """An order to launch CTAs in, and what the model says about it.

    Attributes:
        order: int32 [N], key blocks in the order of their launch: what `compute_dq_write_order` takes.
        ahead: how many of them are launched for all heads before the rest, because their lists are long.
        name: "left to right", "right to left" (upstream's spt), "longest first"; after "long ones, then", if `ahead`.
        interleave: query heads that are launched together, key block by key block.
        rows: int32 [B * H * N], ``(batch * H + head) * N + key_block`` of each CTA in the order of launch.
        simulated: deterministic backward with this order, each list walked by rising lock value.
        ratio: its time over that of the default mode, launched head by head from left to right.
    """

    order: torch.Tensor
    ahead: int
    name: str
    interleave: int
    rows: torch.Tensor
    simulated: Simulated
    ratio: float


def simulate(
    walk: Walk, rows: torch.Tensor | Sequence[int], *, group: int = 1, slots: int = 132, costs: Costs = Costs()
) -> Simulated:
    """How long the CTAs `rows`, launched in this order, take for their walks.

    Args:
        walk: on any device. Without lock values nothing waits, for turns neither: the default mode.
        rows: ``(batch * H + head) * N + key_block`` of every CTA.
        group: query heads that share a key/value head.
        slots: CTAs that run at a time.

    Raises:
        TypeError, ValueError: rows, group or slots that do not fit.
    """
    launch = _launched(walk, rows, group).tolist()
    integer("slots", slots)
    if walk.locks is None:
        return _unlocked(walk, launch, slots, costs)
    return _Simulation(walk, group, costs).run(launch, slots)


def waits_for_earlier_launches(walk: Walk, rows: torch.Tensor | Sequence[int], *, group: int = 1) -> bool:
    """Whether every wait points to a CTA launched earlier: enough for the GPU never to get stuck, whatever its timing.

    The earliest CTA in flight then waits for CTAs that have ended, so it goes on. Without locks nothing waits.

    Raises:
        TypeError, ValueError: as `simulate`.
    """
    rows = _launched(walk, rows, group).to(walk.cnt.device)
    if walk.locks is None:
        return True
    B, H, N = walk.cnt.shape
    position = torch.empty_like(rows).scatter_(0, rows, torch.arange(rows.numel(), device=rows.device))
    if (position.view(B * H // group, group, N).diff(dim=1) < 0).any():
        return False
    used = torch.arange(walk.entries.shape[3], device=rows.device) < walk.cnt.unsqueeze(-1)
    head = torch.arange(B * H, device=rows.device).view(B, H, 1, 1)
    block = (walk.entries.long() // 2 + head * (walk.entries.max() + 1 if used.any() else 1))[used]
    lock = walk.locks[used].long()
    by_lock = (block * (lock.max() + 1 if used.any() else 1) + lock).sort().indices
    same = block[by_lock].diff() == 0
    return bool((~same | (position.view(B, H, N, 1).expand_as(used)[used][by_lock].diff() > 0)).all())


def _launched(walk: Walk, rows: torch.Tensor | Sequence[int], group: int) -> torch.Tensor:
    """The rows as int64, each CTA of the walk once."""
    if not isinstance(walk, Walk):
        raise TypeError(f"walk has to be a Walk, got {type(walk).__name__}")
    launch = torch.as_tensor(rows)
    if launch.is_floating_point() or sorted(launch.flatten().tolist()) != list(range(walk.cnt.numel())):
        raise ValueError(f"rows must hold each of 0 .. {walk.cnt.numel() - 1} once, got {launch.numel()} numbers")
    if walk.cnt.shape[1] % integer("group", group):
        raise ValueError(f"group={group} must divide the {walk.cnt.shape[1]} query heads")
    return launch.flatten().long()


def launch_rows(
    order: torch.Tensor | Sequence[int], B: int, H: int, *, interleave: int = 1, group: int = 1, ahead: int = 0
) -> torch.Tensor:
    """CTAs in the order of launch, int32 [B * H * N], for one order of the key blocks.

    Sets of `interleave` query heads follow one another; within a set, key block by key block. A set takes its heads
    from different key/value heads as long as there are any: heads of one group would wait for one another's turns.

    Args:
        order: [N], a permutation of the key blocks.
        ahead: so many key blocks, the first in `order`, are launched for all heads before anything else.
    """
    order = torch.as_tensor(order, dtype=torch.int64).cpu()
    if sorted(order.tolist()) != list(range(order.numel())):
        raise ValueError(f"order must be a permutation of 0 .. {order.numel() - 1}, got {order.tolist()[:8]}...")
    if group < 1 or H % group:
        raise ValueError(f"group={group} must divide the {H} query heads")
    heads = torch.arange(B * H) * order.numel()
    by_turn = heads.view(-1, group).T.flatten() if interleave > 1 else heads
    sets = [(order[:ahead].view(-1, 1) + heads).flatten()]
    sets += [(order[ahead:].view(-1, 1) + some).flatten() for some in by_turn.split(max(interleave, 1))]
    return torch.cat(sets).int()


def long_rows_first(counts: torch.Tensor, *, times: float = LONG) -> torch.Tensor:
    """CTAs in an order for the default mode, int32 [B * H * N]: rows of many times the mean first, then head by head.

    A key block that all query blocks list, as the first one often is, takes long; started last, it is what everything
    waits for. For any device; does not synchronise.

    Args:
        counts: int32 [B, H, N], blocks listed.
        times: the mean, from which a row is long.

    Raises:
        TypeError: counts that are no tensor.
    """
    tensor("counts", counts)
    flat = counts.flatten()
    length = torch.where(flat > times * flat.double().mean(), flat, 0)
    return length.sort(descending=True, stable=True).indices.int()


def heads_in_l2(
    seqlen_q: int, head_dim: int, head_dim_v: int, *, element_size: int = 2, l2_bytes: int = 50 << 20
) -> int:
    """Query heads whose q, do and fp32 dq fit the L2 together, a power of two: as many as SM90 launches together.

    Raises:
        TypeError, ValueError: a size that is no int of at least 1.
    """
    sizes = dict(seqlen_q=seqlen_q, head_dim=head_dim, head_dim_v=head_dim_v, element_size=element_size)
    for name, size in (sizes | dict(l2_bytes=l2_bytes)).items():
        integer(name, size)
    one = seqlen_q * ((head_dim + head_dim_v) * element_size + head_dim * 4)
    return 1 << max(l2_bytes // one, 1).bit_length() - 1


def launch_order(
    lists: Any,
    *,
    group: int = 1,
    interleave: int | Sequence[int] = 1,
    slots: int = 132,
    costs: Costs = Costs(),
    num_q_blocks: int | None = None,
) -> Launch:
    """The order that ends first in the model, of left to right, right to left and longest first.

    Each is also tried with the key blocks ahead, for all heads, whose lists are many times as long as the mean.

    For lists that keep their shape (a window, a document structure) and lists that stand for many: it takes a second a
    candidate for a quarter of a million blocks, on the CPU.

    Args:
        lists: backward lists with the fields of `BlockSparseTensorsTorch`, for all query heads.
        group: query heads that share a key/value head.
        interleave: query heads launched together, or the numbers to try. `heads_in_l2` says how many fit the cache;
            the model knows no caches, and more heads always look better to it.
    """
    return min(_candidates(lists, group, interleave, slots, costs, num_q_blocks), key=lambda c: c.simulated.time)


def _candidates(
    lists: Any, group: int, interleave: int | Sequence[int], slots: int, costs: Costs, num_q_blocks: int | None
) -> Iterator[Launch]:
    lists = _on_cpu(lists)
    heads = lists.mask_block_cnt.shape[1]
    if group < 1 or heads % group:
        raise ValueError(f"group={group} must divide the {heads} query heads")
    counts = lists.mask_block_cnt if lists.full_block_cnt is None else lists.mask_block_cnt + lists.full_block_cnt
    B, H, N = counts.shape
    default = simulate(deterministic_walk(lists)._replace(locks=None), range(B * H * N), slots=slots, costs=costs)
    blocks = torch.arange(N, dtype=torch.int32)
    by_block = counts.sum((0, 1))
    longest = by_block.sort(descending=True, stable=True).indices.int()
    long = int((by_block > LONG * by_block.double().mean()).sum())
    orders = {"right to left": blocks.flip(0), "left to right": blocks, "longest first": longest}
    for name, ahead in [(name, ahead) for ahead in {0, long} for name in orders]:
        order = orders[name]
        if ahead:
            order = torch.cat([longest[:ahead], order[~torch.isin(order, longest[:ahead])]])
        descending = ahead > 0 or name != "right to left"
        walk = deterministic_walk(lists, order=order, num_q_blocks=num_q_blocks, descending=descending)
        for together in [interleave] if isinstance(interleave, int) else interleave:
            rows = launch_rows(order, B, H, interleave=together, group=group, ahead=ahead)
            simulated = simulate(walk, rows, group=group, slots=slots, costs=costs)
            ratio = simulated.time / default.time if default.time else 1.0
            yield Launch(order, ahead, "long ones, then " * (ahead > 0) + name, together, rows, simulated, ratio)


def _on_cpu(lists: Any) -> Any:
    names = ("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx")
    return lists._replace(**{name: t.cpu() for name in names if (t := getattr(lists, name)) is not None})


def _unlocked(walk: Walk, launch: list[int], slots: int, costs: Costs) -> Simulated:
    counts = walk.cnt.flatten().tolist()
    free = [0.0] * slots
    for row in launch:
        took = costs.start + counts[row] * costs.subtiles + costs.end
        heapq.heapreplace(free, free[0] + took)
    return Simulated(max(free), 0.0)


class _Simulation:
    """Locks and CTAs. A lock is a query tile of a head, or (after those) a key block of a key/value head."""

    def __init__(self, walk: Walk, group: int, costs: Costs):
        self.B, self.H, self.N = walk.cnt.shape
        self.group, self.costs = group, costs
        self.M = int(walk.entries.max()) // 2 + 1 if walk.entries.numel() else 1
        self.turns = self.B * self.H * self.M * costs.subtiles  # the first of the locks for dk and dv
        counts = walk.cnt.cpu().flatten()
        self.ends = (counts.long() * costs.subtiles).cumsum(0).tolist()
        used = torch.arange(walk.entries.shape[3]) < counts.unsqueeze(-1)
        heads = torch.arange(counts.numel()).div(max(self.N, 1), rounding_mode="floor")
        blocks = walk.entries.cpu().flatten(0, 2).long() // 2 + heads.unsqueeze(-1) * self.M
        tiles = blocks[used].unsqueeze(-1) * costs.subtiles + torch.arange(costs.subtiles)
        self.lock = tiles.flatten().tolist()
        self.value = walk.locks.cpu().flatten(0, 2)[used].repeat_interleave(costs.subtiles).tolist()
        locks = self.turns + (self.B * self.H // group) * self.N
        self.released = [0] * locks
        self.when = [NEVER] * locks
        self.at: dict[int, tuple[int, float, float, float]] = {}  # of a CTA that waits: see `walk`
        self.waiters: dict[tuple[int, int], list[int]] = {}
        self.waiting = 0.0

    def run(self, launch: list[int], slots: int) -> Simulated:
        free = [0.0] * slots
        last = 0.0
        for number, row in enumerate(launch):
            if not free:
                return self.stuck(launch, number)
            # Whoever still waits does so for a CTA yet to be launched, and cannot end before the first that has ended.
            begin = heapq.heappop(free)
            runnable = [(row, row and self.ends[row - 1], begin, begin + self.costs.start, NEVER)]
            while runnable:
                end = self.walk(*runnable.pop(), runnable)
                if end is not None:
                    heapq.heappush(free, end)
                    last = max(last, end)
        return self.stuck(launch, len(launch)) if self.at else Simulated(last, self.waiting)

    def walk(self, row: int, step: int, begin: float, computed: float, added: float, runnable: list) -> float | None:
        """Let a CTA go on at `step`, its computing and its latest add being done then; the time of its end, if it gets
        there. CTAs for which it releases a lock are added to `runnable`."""
        lock, value, released, when, waiters = self.lock, self.value, self.released, self.when, self.waiters
        add, release = self.costs.add, self.costs.release
        last = self.ends[row]
        while step < last:
            k, v = lock[step], value[step]
            if released[k] != v:
                return self.wait(row, k, v, step, begin, computed, added)
            computed += 1.0
            if added > computed:  # the buffer is taken until then
                computed = added
            added = max(computed, when[k] + release) + add
            released[k], when[k] = v + 1, added
            if waiters and (k, v + 1) in waiters:
                self.wake(k, v + 1, runnable)
            step += 1
        return self.take_turn(row, begin, computed, added, runnable)

    def take_turn(self, row: int, begin: float, computed: float, added: float, runnable: list) -> float | None:
        end = max(computed, added) + self.costs.end
        own = self.costs.start + self.costs.end + (self.ends[row] - (row and self.ends[row - 1]))
        if self.group > 1:
            head, block = divmod(row, self.N)
            k, v = self.turns + head // self.group * self.N + block, head % self.group
            if self.released[k] != v:
                return self.wait(row, k, v, self.ends[row], begin, computed, added)
            end = max(end, self.when[k] + self.costs.release) + self.costs.turn
            own += self.costs.turn
            self.released[k], self.when[k] = v + 1, end
            self.wake(k, v + 1, runnable)
        self.waiting += end - begin - own
        return end

    def wait(self, row: int, k: int, v: int, *state: Any) -> None:
        self.at[row] = (k, v, *state)
        self.waiters.setdefault((k, v), []).append(row)

    def wake(self, k: int, v: int, runnable: list) -> None:
        for row in self.waiters.pop((k, v), ()):
            runnable.append((row, *self.at.pop(row)[2:]))

    def stuck(self, launch: list[int], launched: int) -> Simulated:
        row = next(row for row in launch if row in self.at)
        k, v = self.at[row][:2]
        query_block = None if k >= self.turns else k // self.costs.subtiles % self.M
        head, key_block = divmod(row, self.N)
        place = (*divmod(head, self.H), key_block, query_block)
        report = Stuck(*place, v, self.released[k], len(self.at), len(launch) - launched)
        return Simulated(float("inf"), float("inf"), report)
