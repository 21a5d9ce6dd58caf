"""Random block lists, and the same things computed from them block by block in plain Python."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

Row = list[int]


@dataclass(frozen=True)
class ListCase:
    """What random lists look like."""

    B: int = 1
    H: int = 2
    M: int = 6
    N: int = 5
    density: float = 0.4  # of listed blocks
    full: float = 0.5  # of the listed blocks; 0 and no `keep_empty`: no full lists at all
    keep_empty: bool = True  # full lists are there though nothing is full
    sort: bool = True
    spare: int = 0  # places past the longest row
    seed: int = 0


def list_cases(**more: st.SearchStrategy) -> st.SearchStrategy[ListCase]:
    """Small cases of every kind; `more` draws what is otherwise left as it is."""
    return st.builds(
        ListCase,
        B=st.integers(1, 2),
        H=st.integers(1, 3),
        M=st.integers(1, 7),
        N=st.integers(1, 7),
        density=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
        full=st.sampled_from([0.0, 0.5, 1.0]),
        keep_empty=st.booleans(),
        spare=st.integers(0, 3),
        seed=st.integers(0, 1 << 30),
        **more,
    )


def random_rows(case: ListCase) -> dict[str, list[list[list[Row]]]]:
    """{"mask", "full"}: for each batch, head and query block the key blocks listed."""
    draw = random.Random(case.seed)
    rows: dict[str, list[list[list[Row]]]] = {"mask": [], "full": []}
    for _ in range(case.B):
        for kind in rows:
            rows[kind].append([[[] for _ in range(case.M)] for _ in range(case.H)])
        for h in range(case.H):
            for m in range(case.M):
                listed = [n for n in range(case.N) if draw.random() < case.density]
                if not case.sort:
                    draw.shuffle(listed)
                for n in listed:
                    rows["full" if draw.random() < case.full else "mask"][-1][h][m].append(n)
    return rows


def transposed_rows(rows: dict[str, list[list[list[Row]]]], case: ListCase) -> dict[str, list[list[list[Row]]]]:
    draw = random.Random(case.seed + 1)
    result = {}
    for kind, batches in rows.items():
        result[kind] = [
            [[[m for m in range(case.M) if n in head[m]] for n in range(case.N)] for head in batch] for batch in batches
        ]
        if not case.sort:
            for row in (row for batch in result[kind] for head in batch for row in head):
                draw.shuffle(row)
    return result


def pack(rows: dict[str, list[list[list[Row]]]], case: ListCase, poison: int = -7) -> BlockSparseTensorsTorch:
    """Tensors of these rows; what no kernel may read holds `poison`."""
    tensors: list[torch.Tensor | None] = []
    for batches in rows.values():
        width = max((len(row) for batch in batches for head in batch for row in head), default=0) + case.spare
        if not width and batches is rows["full"] and not case.keep_empty:
            tensors += [None, None]
            continue
        counts = [[[len(row) for row in head] for head in batch] for batch in batches]
        padded = [
            [[row + [poison] * (max(width, 1) - len(row)) for row in head] for head in batch] for batch in batches
        ]
        tensors += [torch.tensor(counts, dtype=torch.int32), torch.tensor(padded, dtype=torch.int32)]
    return BlockSparseTensorsTorch(*tensors, block_size=(128, 128))


def random_lists(case: ListCase) -> tuple[BlockSparseTensorsTorch, BlockSparseTensorsTorch]:
    """Forward lists and backward lists of the same blocks."""
    rows = random_rows(case)
    return pack(rows, case), pack(transposed_rows(rows, case), case)


def unpack(cnt: torch.Tensor | None, idx: torch.Tensor | None) -> list[list[list[Row]]] | None:
    """Rows of the entries in use."""
    if cnt is None or idx is None:
        return None
    return [
        [[row[:count] for row, count in zip(rows, counts, strict=True)] for rows, counts in zip(*head, strict=True)]
        for head in zip(idx.tolist(), cnt.tolist(), strict=True)
    ]
