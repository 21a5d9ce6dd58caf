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
from fuzz.blocks import Rows, lists_of_rows


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

    def listed(self) -> list[list[dict[tuple[int, int], int]]]:
        """{(query block, key block): 0 for mask, 1 for full} of each sequence's heads."""
        draw = random.Random(self.seed)
        same = self.form == "shared"
        longest = tuple(max(each) for each in zip(*self.shapes))
        found = []
        for M, N in self.shapes if not same else (longest,) * len(self.shapes):
            blocks = [
                {
                    (m, n): int(self.with_full and draw.random() < self.full)
                    for m in range(M)
                    for n in range(N)
                    if draw.random() < self.density
                }
                for _ in range(self.H)
            ]
            found.append(found[0] if same and found else blocks)
        return found


def tensors(case: Drawn, backward: bool) -> BlockSparseTensorsTorch:
    """The drawn lists in their form, in no order, expanded to heads and sequences as the kernels' callers see them."""
    draw, turn = random.Random(case.seed + 1), (lambda m, n: (n, m)) if backward else (lambda m, n: (m, n))
    sizes = [turn(*shape) for shape in case.shapes]
    if case.form == "shared":
        sizes = [tuple(max(each) for each in zip(*sizes))] * len(sizes)
    kinds: dict[str, Rows] = {}
    for kind, name in enumerate(("mask", "full")[: 1 + case.with_full]):
        kinds[name] = heads = []
        for head in range(case.H):
            heads.append([])
            for of, (rows, _) in zip(case.listed(), sizes, strict=True):
                table: list[list[int]] = [[] for _ in range(rows)]
                for place, own in of[head].items():
                    if own == kind:
                        row, block = turn(*place)
                        table[row].append(block)
                for row in table:
                    draw.shuffle(row)
                heads[-1].append(table)
    padded, rows_before = case.form in ("padded", "shared"), "cu_total_n_blocks" if backward else "cu_total_m_blocks"
    if case.form == "shared":
        kinds = {name: [sequences[:1] for sequences in heads] for name, heads in kinds.items()}
    form, across = "padded" if padded else case.form, [across for _, across in sizes]
    lists = lists_of_rows(kinds, form, across, rows_before, block_size=(64 * case.factor, 128))
    given = {n: t for n, t in lists._asdict().items() if isinstance(t, torch.Tensor)} if padded else {}
    return lists._replace(**{n: t.expand(len(case.shapes), *t.shape[1:]) for n, t in given.items()})


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
    for sequence, heads in enumerate(case.listed()):
        for head, blocks in enumerate(heads):
            for (m, n), kind in blocks.items():
                for half in range(m * case.factor, (m + 1) * case.factor):
                    row, block = (n, half // 2) if backward else (half // 2, n)
                    place = (sequence, head, kind if asked else 0, row, block)
                    table[place] = table.get(place, 0) | 1 << half % 2
    return table


def tiles(case: Drawn, sequence: int) -> int:
    """Of 128 queries, that the sequence's rows of lists cover."""
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
        """What a CTA waits for, by the formula in the kernel. twice: lock values are those of `turn_of_add`."""
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
