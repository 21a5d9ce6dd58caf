"""Planned backward on SM100 run on the CPU, CTA after CTA in the order of their launch: what each would wait for.

The scheduler and the lock values are the kernel's own (`planned_kernels`). That CTAs that wait for nothing when they
run one after the other never wait for a later one is the proof that nothing hangs, however they run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

FIELDS = (
    "mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx", "cu_total_n_blocks", "cu_block_idx_offsets",
    "cu_full_block_idx_offsets", "dq_write_order", "dq_write_order_full",
)  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """A call as the kernel sees it: lists with a plan for SM100 and lock values, and tiles of 128 queries and keys."""

    lists: Any
    heads: int  # query heads
    group: int  # of them, to a key/value head
    lengths: tuple[tuple[int, int], ...]  # queries and keys of each sequence
    packed: bool = False
    used: bool = False  # lengths are given as seqused, in sequences with room for more
    subtiles: int = 1  # tiles of a key block
    pair: int = 1  # CTAs of a cluster
    query_tiles: int = 1  # of a block of queries
    halves: bool = False  # lists are those that `query_halves` joins


@dataclass(frozen=True)
class Ran:
    """What happened.

    Attributes:
        tiles: (key tile, head, sequence) of each CTA that had work.
        waited: for what nobody had released.
        adds: {(sequence, head, query tile): key tiles that added to it, in their order}; a pair is its first tile.
    """

    tiles: list[tuple[int, int, int]]
    waited: list[str]
    adds: dict[tuple[int, int, int], list[int]]


def tiles_of(length: int) -> int:
    return -(-length // 128)


def run(launch: Launch) -> Ran:
    """The kernel's CTAs, one after the other."""
    with unset_fake_temporarily():
        return _Run(launch).ran()


class _Run:
    def __init__(self, launch: Launch) -> None:
        from cutlass.cute.runtime import from_dlpack

        self.launch = launch
        self.out = torch.empty(256, 2, dtype=torch.int32)
        self.walk = None
        values = (getattr(launch.lists, name) for name in FIELDS)
        self.tensors = [None if t is None else from_dlpack(t.contiguous()) for t in (*values, self.out)]

    def launched(self) -> list[tuple[int, int, int]]:
        import cutlass.cute as cute
        from cutlass import Int32
        from cutlass.cute.runtime import from_dlpack
        from planned_kernels import launched_tiles

        launch = self.launch
        keys = torch.tensor([k for _, k in launch.lengths], dtype=torch.int32)
        starts = torch.nn.functional.pad(keys.cumsum(0, dtype=torch.int32), (1, 0)) if launch.packed else None
        used = keys if launch.used else None
        out = torch.full((launch.lists.plan.shape[0] * launch.subtiles, 4), -1, dtype=torch.int32)
        tensors = [None if t is None else from_dlpack(t) for t in (launch.lists.plan.contiguous(), starts, used, out)]
        tiles = Int32(tiles_of(launch.lengths[0][1]))
        cute.compile(launched_tiles, *tensors, tiles, launch.subtiles, launch.pair)(*tensors, tiles)
        assert set(out[:, 3].tolist()) <= {0, 1}, "a CTA of the grid was not asked"
        return [tuple(row[:3]) for row in out.tolist() if row[3]]

    def adds(self, tile: int, head: int, sequence: int) -> list[tuple[int, int]]:
        """(query tile, lock value) of each add of a key tile's CTA, query tiles within the sequence."""
        import cutlass.cute as cute
        from cutlass import Int32
        from planned_kernels import adds

        launch, (queries, keys) = self.launch, self.launch.lengths[sequence]
        list_head = head * launch.lists.mask_block_cnt.shape[-2] // launch.heads
        at = sequence, list_head, tile, keys, tiles_of(queries), self.release(tile, sequence)
        numbers = [Int32(number) for number in at]
        if self.walk is None:
            static = launch.query_tiles, launch.subtiles, launch.pair, launch.halves
            self.walk = cute.compile(adds, *self.tensors, *numbers, *static)
        self.out.fill_(-1)
        self.walk(*self.tensors, *numbers)
        return [(m, lock) for m, lock in self.out.tolist() if 0 <= m < tiles_of(queries)]

    def ran(self) -> Ran:
        launch, tiles, waited = self.launch, self.launched(), []
        released, turns, adds = Counter(), Counter(), {}
        for tile, head, sequence in tiles:
            if tile % launch.pair == 0:  # a pair of CTAs waits and releases as one
                for m, lock in self.adds(tile, head, sequence):
                    place = sequence, head, m
                    if released[place] != lock:
                        waited.append(f"tile {tile} waits for {lock} at {place}, which is at {released[place]}")
                    released[place] += self.release(tile, sequence)
                    adds.setdefault(place, []).append(tile)
            turn = sequence, head // launch.group, tile
            if turns[turn] != head % launch.group:
                waited.append(f"head {head} waits for its turn at {turn}, which is at {turns[turn]}")
            turns[turn] += 1
        return Ran(tiles, waited, adds)

    def release(self, tile: int, sequence: int) -> int:
        """What the kernel adds to a semaphore: for tiles of the last key block that there are not, too."""
        launch = self.launch
        groups, total = launch.subtiles // launch.pair, -(-tiles_of(launch.lengths[sequence][1]) // launch.pair)
        group, last = tile // launch.pair, (total - 1) // groups
        if groups > 1 and group // groups == last and group % groups == 0:
            return 1 + groups - (total - last * groups)
        return 1
