"""Random lists of an odd number of 64 queries, in every form, and what either half of a tile of 128 lists."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from fa_packed_lists import FORMS

from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch


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
    kinds: dict[str, Any] = {}
    for kind, name in enumerate(("mask", "full")[: 1 + case.with_full]):
        heads = []
        for head in range(case.H):
            sequences = []
            for of, (rows, _) in zip(case.listed(), sizes, strict=True):
                table: list[list[int]] = [[] for _ in range(rows)]
                for place, own in of[head].items():
                    if own == kind:
                        row, block = turn(*place)
                        table[row].append(block)
                for row in table:
                    draw.shuffle(row)
                sequences.append(table)
            heads.append(sequences)
        counts, indices, offsets = FORMS[case.form](heads, [across for _, across in sizes])
        kinds |= {
            f"{name}_block_cnt": torch.tensor(counts, dtype=torch.int32),
            f"{name}_block_idx": torch.tensor(indices, dtype=torch.int32),
        }
        if offsets is not None:
            field = "cu_full_block_idx_offsets" if case.form == "ragged" and kind else "cu_block_idx_offsets"
            kinds[field] = torch.tensor(offsets)
    lists = BlockSparseTensorsTorch(**kinds, block_size=(64 * case.factor, 128))
    if case.form in ("padded", "shared"):
        B = len(case.shapes)
        return lists._replace(
            **{name: getattr(lists, name).expand(B, -1, *(-1,) * (2 if name.endswith("idx") else 1)) for name in kinds}
        )
    before = torch.tensor([0, *accumulate(rows for rows, _ in sizes)], dtype=torch.int32)
    return lists._replace(**{"cu_total_n_blocks" if backward else "cu_total_m_blocks": before})


def across(case: Drawn, backward: bool) -> torch.Tensor:
    return torch.tensor([0, *accumulate(shape[0 if backward else 1] for shape in case.shapes)])


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
