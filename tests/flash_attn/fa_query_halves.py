"""Random lists of an odd number of 64 queries, in every form, and what either half of a tile of 128 lists."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.lists.query_halves import turn_of_add
from fuzz.blocks import Table, lists_of_rows, rows_of


@dataclass(frozen=True)
class Drawn:
    """Random lists, [sequence][head][row][entry] of each kind: in each direction a sequence has rows and blocks."""

    shapes: tuple[tuple[int, int], ...] = ((3, 4),)  # query blocks and key blocks of each sequence
    H: int = 2
    factor: int = 1  # halves of a block of queries
    form: str = "compact"
    density: float = 0.5
    full: float = 0.5
    with_full: bool = True
    seed: int = 0

    def listed(self) -> list[tuple[Table, Table]]:
        """The blocks listed, and those full, of each sequence: [H, query blocks, key blocks]."""
        draw = torch.Generator().manual_seed(self.seed)
        shared, longest = self.form == "shared", tuple(max(each) for each in zip(*self.shapes))
        found = []
        for shape in [longest] if shared else self.shapes:
            chance, kind = (torch.rand(self.H, *shape, generator=draw) for _ in range(2))
            listed = chance < self.density
            found.append((listed, listed & (kind < self.full) & self.with_full))
        return found * len(self.shapes) if shared else found


def tensors(case: Drawn, backward: bool) -> BlockSparseTensorsTorch:
    """The drawn lists in their form, in no order, expanded to heads and sequences as the kernels' callers see them."""
    draw, given = random.Random(case.seed + 1), case.listed()[: 1 if case.form == "shared" else None]
    own = {"mask": [listed & ~full for listed, full in given], "full": [full for _, full in given]}
    kinds = {
        name: [[rows_of(t[h].mT if backward else t[h], draw) for t in own[name]] for h in range(case.H)]
        for name in ("mask", "full")[: 1 + case.with_full]
    }
    padded, rows_before = case.form in ("padded", "shared"), "cu_total_n_blocks" if backward else "cu_total_m_blocks"
    across = [t.shape[1 if backward else 2] for t, _ in given]
    lists = lists_of_rows(
        kinds, "padded" if padded else case.form, across, rows_before, block_size=(64 * case.factor, 128)
    )
    of = {n: t for n, t in lists._asdict().items() if isinstance(t, torch.Tensor)} if padded else {}
    return lists._replace(**{n: t.expand(len(case.shapes), *t.shape[1:]) for n, t in of.items()})


def as_joined(case: Drawn, backward: bool) -> Any:
    """`tensors` in a form that can be joined: padded, or ragged."""
    from flash_attn.cute.lists.formats import as_ragged

    lists = tensors(case, backward)
    if case.form in ("padded", "shared"):
        return lists
    across = torch.tensor([0, *accumulate(shape[0 if backward else 1] for shape in case.shapes)])
    return as_ragged(lists, "cu_total_n_blocks" if backward else "cu_total_m_blocks", across)


def expected(case: Drawn, backward: bool, asked: bool) -> dict[tuple[int, int, int, int, int], int]:
    """{(sequence, head, kind, row, block): halves}, one query half after the other."""
    table: dict[tuple[int, int, int, int, int], int] = {}
    for sequence, (listed, full) in enumerate(case.listed()):
        for head, m, n in listed.nonzero().tolist():
            kind = int(full[head, m, n]) if asked else 0
            for half in range(m * case.factor, (m + 1) * case.factor):
                row, block = (n, half // 2) if backward else (half // 2, n)
                place = (sequence, head, kind, row, block)
                table[place] = table.get(place, 0) | 1 << half % 2
    return table


def tiles(case: Drawn, sequence: int) -> int:
    """Tiles of 128 queries that the sequence's rows of lists cover."""
    rows = max(m for m, _ in case.shapes) if case.form == "shared" else case.shapes[sequence][0]
    return (rows * case.factor + 1) // 2


def key_rows(case: Drawn) -> list[int]:
    longest = max(n for _, n in case.shapes)
    return [longest if case.form == "shared" else n for _, n in case.shapes]


@dataclass(frozen=True)
class Launched:
    """CTAs (or pairs) of one sequence's key blocks: `groups` a block, of which the last one's last are not launched.

    Attributes:
        number: of those that are. spt: from the last one to the first.
    """

    groups: int
    number: int
    spt: bool

    def order(self) -> list[int]:
        return list(range(self.number))[:: -1 if self.spt else 1]

    def release(self, cta: int) -> int:
        """By how much an add raises a semaphore: the last CTA of a block that is cut short stands for the rest too."""
        block, group = divmod(cta, self.groups)
        return 1 + (self.groups - self._own(block)) * (self.spt and group == 0)

    def lock(self, value: int, cta: int, twice: bool) -> int:
        """The value a CTA waits for, by the kernel's formula. twice: semaphore values are those of `turn_of_add`."""
        block, group = divmod(cta, self.groups)
        group = self._own(block) - 1 - group if self.spt else group
        if twice:
            value, group = turn_of_add(value, group, self.release(cta))
        return value * self.groups + group

    def _own(self, block: int) -> int:
        return min(self.groups, self.number - block * self.groups)


def adds(
    merged: BlockSparseTensorsTorch,
    head: int,
    first: int,
    launched: Launched,
    lock: Callable[[int, int, bool], int] | None = None,
) -> list[list[tuple[int, int]]]:
    """[(tile, semaphore's value to wait for)] of each CTA of a sequence, as it walks joined backward lists.

    Args:
        first: the sequence's first row. lock: in place of that of `launched`.
    """
    found: list[list[tuple[int, int]]] = [[] for _ in range(launched.number)]
    full = merged.full_block_cnt is not None
    kinds = [(merged.mask_block_cnt, merged.cu_block_idx_offsets)]
    kinds += [(merged.full_block_cnt, merged.cu_full_block_idx_offsets)] * full
    for cta, own in enumerate(found):
        row = first + cta // launched.groups
        for counts, starts in kinds:
            start = int(starts[head, row])
            for place in range(start, start + int(counts[head, row])):
                value, twice = int(merged.dq_write_order[place]), full and launched.groups > 1
                own.append((int(merged.mask_block_idx[place]) >> 2, (lock or launched.lock)(value, cta, twice)))
    return found


def assert_in_order(walks: list[list[tuple[int, int]]], launched: Launched) -> None:
    """CTAs that run one after the other, in the order of their launch, find the semaphores as they wait for them."""
    for tile in {tile for walk in walks for tile, _ in walk}:
        semaphore = 0
        for cta, lock in ((cta, lock) for cta in launched.order() for of, lock in walks[cta] if of == tile):
            assert lock == semaphore, f"CTA {cta} waits for {lock} of tile {tile}"
            semaphore += launched.release(cta)
