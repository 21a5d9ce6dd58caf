"""Tables of blocks, the lists that hold them, and what can be read off a table without any cleverness."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate, product
from typing import Any

import torch

from fuzz.case import Blocks

POISON = -7  # stands where nothing may be read
Table = torch.Tensor  # bool [B, H, M, N]
Rows = list[list[list[list[int]]]]  # [head][sequence][row][entry]


def pattern_table(name: str, M: int, N: int, density: float, draw: random.Random) -> torch.Tensor:
    """The blocks, of M x N, or pairs of tokens that a pattern lists: bool [M, N]."""
    chance = torch.rand(M, N, generator=torch.Generator().manual_seed(draw.randrange(1 << 32))) < density
    width, cuts = 1 + int(density * N), sorted({0, *(draw.randrange(N + 1) for _ in range(3))})
    long, prefix = draw.randrange(max(N, 1)), 1 + draw.randrange(max(N, 1))
    m, n = torch.arange(M)[:, None], torch.arange(N)[None, :]
    here = m * N // max(M, 1)  # the place in a row that the diagonal goes through

    def document(place: torch.Tensor) -> torch.Tensor:
        return sum((place >= cut).int() for cut in cuts)

    rules = {
        "random": lambda: chance,
        "causal": lambda: n * M <= m * N,
        "window": lambda: (here - n >= 0) & (here - n <= width),
        "full": lambda: n >= 0,
        "empty": lambda: n < 0,
        "diagonal": lambda: (here == n) | chance & (n == 0),
        "anti-diagonal": lambda: (M - 1 - m) * N // max(M, 1) == n,
        "comb": lambda: n % 3 == m % 3,
        "one long column": lambda: (n == long) | (here == n),
        "one long row": lambda: (m == M // 2) | chance & (n % 4 == 0),
        "documents": lambda: document(here) == document(n),
        "prefix": lambda: (n < prefix) | (n * M <= m * N),
        "empty rows": lambda: (m % 2 == 1) & chance,
        "empty columns": lambda: (n % 2 == 1) & chance,
    }
    return rules[name]().expand(M, N)


def tiles_of(visible: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks [..., M, N] in which a mask [..., queries, keys] lets something through, and everything."""
    T_q, T_k = visible.shape[-2:]
    padded = torch.nn.functional.pad(visible, (0, -T_k % block[1], 0, -T_q % block[0]))
    # Past the end no key is visible, and no query exists: those neither need a block nor spoil a full one.
    padded[..., T_q:, :] = padded[..., T_q - 1 : T_q, :]
    blocks = padded.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0]))
    return blocks.any(-1).any(-2), blocks.all(-1).all(-2)


def each_tensor(lists: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The lists with each of their tensors changed."""
    return lists._replace(**{n: change(t) for n, t in lists._asdict().items() if isinstance(t, torch.Tensor)})


def table_of(lists: Any, columns: int) -> tuple[Table, Table]:
    """The blocks that lists hold, and the full ones; a block that is listed twice is an error."""
    B, H, rows = lists.mask_block_cnt.shape
    found = torch.zeros(2, B, H, rows, columns, dtype=torch.int64)
    for full, name in enumerate(("mask", "full")):
        cnt, idx = getattr(lists, f"{name}_block_cnt"), getattr(lists, f"{name}_block_idx")
        if cnt is None:
            continue
        cnt, idx = cnt.expand(B, H, rows), idx.expand(B, H, rows, idx.shape[-1])
        for b, h, row in product(range(B), range(H), range(rows)):
            for block in idx[b, h, row, : int(cnt[b, h, row])].tolist():
                found[full, b, h, row, block] += 1
    assert found.sum(0).max().item() <= 1 if found.numel() else True, "a block is listed twice"
    return found.sum(0).bool(), found[1].bool()


def launch_order(case: Blocks, listed: Table) -> list[int]:
    """The key blocks in the order of their launch."""
    order = list(range(case.N))
    if case.launch == "right to left":
        order.reverse()
    if case.launch == "longest first":
        counts = listed.sum((0, 1, 2)).tolist()
        order.sort(key=lambda n: -counts[n])
    if case.launch == "shuffled":
        random.Random(case.seed).shuffle(order)
    return order


def locks_of(listed: Table, order: list[int]) -> torch.Tensor:
    """For each pair of blocks, how many key blocks before this one in the order add to the same query block."""
    B, H, M, N = listed.shape
    locks = torch.zeros(B, H, M, N, dtype=torch.int64)
    for b, h, m in product(range(B), range(H), range(M)):
        added = 0
        for n in order:
            if listed[b, h, m, n]:
                locks[b, h, m, n] = added
                added += 1
    return locks


def rows_of(table: torch.Tensor, draw: random.Random | None = None) -> list[list[int]]:
    """The columns in each row of a table, rising, or in no order."""
    rows = [row.nonzero().flatten().tolist() for row in table]
    for row in rows if draw is not None else ():
        draw.shuffle(row)
    return rows


def lists_of_rows(
    kinds: dict[str, Rows],
    form: str,
    across: list[int],
    rows_before: str,
    *,
    width: int = 1,
    spare: int = 0,
    **fields: Any,
) -> Any:
    """Lists in a form, of the rows of "mask" and "full" blocks.

    across: blocks that a row of each sequence may list. width: of padded and compact rows, at least. spare: unused
        entries of the longest one, where it may list as many.
    """
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    for kind, rows in kinds.items():
        cnt, idx, starts = _formed(rows, form, across, width, spare)
        fields |= {f"{kind}_block_cnt": cnt, f"{kind}_block_idx": idx}
        if starts is not None:
            own_starts = form == "ragged" and kind == "full"
            fields["cu_full_block_idx_offsets" if own_starts else "cu_block_idx_offsets"] = starts
    if form != "padded":
        before = [0, *accumulate(map(len, kinds["mask"][0]))]
        fields[rows_before] = torch.tensor(before, dtype=torch.int32)
    return BlockSparseTensorsTorch(**fields)


def _formed(
    rows: Rows, form: str, across: list[int], width: int = 1, spare: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Counts, entries, and where sequences or rows start."""
    longest = max((len(row) for head in rows for own in head for row in own), default=0)
    width = max(width, longest, min(longest + spare, max(across)))

    def filled(row: list[int], width: int) -> list[int]:
        return row + [POISON] * (width - len(row))

    def int32(values: Any, *shape: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32).reshape(shape)

    heads, B = len(rows), len(rows[0])
    if form == "padded":
        most = max(1, *(len(own) for own in rows[0]))
        even = [[rows[h][b] + [[]] * (most - len(rows[h][b])) for h in range(heads)] for b in range(B)]
        cnt = [[[len(row) for row in own] for own in batch] for batch in even]
        idx = [[[filled(row, width) for row in own] for own in batch] for batch in even]
        return int32(cnt, B, heads, most), int32(idx, B, heads, most, width), None
    flat = [[row for own in head for row in own] for head in rows]
    total = len(flat[0])
    cnt = int32([[len(row) for row in head] for head in flat], heads, total)
    if form == "compact":
        return cnt, int32([[filled(row, width) for row in head] for head in flat], heads, total, width), None
    if form == "stacked":
        entries = [[e for b, own in enumerate(head) for row in own for e in filled(row, across[b])] for head in rows]
        starts = [0, *accumulate(len(own) * wide for own, wide in zip(rows[0], across, strict=True))]
        return cnt, int32(entries, heads, len(entries[0])), torch.tensor(starts)
    entries, starts = [POISON] * 3, []
    for head in flat:
        starts.append([])
        for row in head:
            starts[-1].append(len(entries))
            entries += [*row, POISON]
    return cnt, int32(entries, len(entries)), torch.tensor(starts, dtype=torch.int64).reshape(heads, total)
