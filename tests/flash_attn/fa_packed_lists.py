"""A packed case's block lists in each of the forms that the kernels take.

"padded" [B, H, rows of the longest, n]; "shared" the same with one list for all sequences; "compact"
[H, rows of all, n]; "stacked" [H, L], upstream's; "ragged" [L], with a start for every row.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from fa_cases import Case, _int32, _to_gpu, block, block_lists, transposed

NOWHERE = 1 << 20  # stands where no kernel may read
EVERY = slice(None)
Rows = list[list[list[int]]]  # [sequence][row][entry]


def packed_forward_lists(case: Case, only: slice = EVERY) -> Any:
    """The key blocks of each query block, of all sequences or of those that `only` says."""
    across = [-(-T_k // block(case)[1]) for _, T_k in case.lengths]
    return _tensors(case, _heads(case, only, lambda rows, T_k: rows), across[only], "cu_total_m_blocks")


def packed_backward_lists(case: Case, only: slice = EVERY, device: str = "cuda") -> Any:
    """The transpose."""
    across = [-(-T_q // block(case)[0]) for T_q, _ in case.lengths]
    heads = _heads(case, only, lambda rows, T_k: transposed(rows, -(-T_k // block(case)[1])))
    return _tensors(case, heads, across[only], "cu_total_n_blocks", device)


def ordered_backward_lists(case: Case, spt: bool) -> Any:
    """Backward lists with lock values, for deterministic backward in one pass without a plan."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    from flash_attn.cute.block_lists import packed_write_order

    before = query_blocks_before(case)
    with unset_fake_temporarily():
        lists = packed_backward_lists(case, device="cpu")
        most = int(before.diff().max())
        lists = packed_write_order(lists, num_q_blocks=most, spt=spt, cu_total_m_blocks=before)
    return type(lists)(*(_to_gpu(field) for field in lists))


def query_blocks_before(case: Case) -> torch.Tensor:
    """int32 [B + 1] on the CPU, of all sequences before each one."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        return _int32([0, *accumulate(-(-T_q // block(case)[0]) for T_q, _ in case.lengths)], "cpu")


def _heads(case: Case, only: slice, turned: Callable[[list[list[int]], int], Any]) -> list[dict[str, Rows]]:
    keys = [T_k for _, T_k in case.lengths]
    if case.form == "shared":
        keys = [max(keys)] * len(keys)
    lists = block_lists(case)
    return [
        {kind: [turned(of[head], T_k) for of, T_k in zip(batches, keys)][only] for kind, batches in lists.items()}
        for head in range(case.list_heads)
    ]


def _tensors(
    case: Case, heads: list[dict[str, Rows]], across: list[int], rows_before: str, device: str = "cuda"
) -> Any:
    kinds = {"mask": [head["partial"] for head in heads]}
    if case.lists != "no full":
        kinds["full"] = [head["full"] for head in heads]
    return lists_of_rows(kinds, case.form, across, rows_before, device, block_size=block(case))


def lists_of_rows(
    kinds: dict[str, list[Rows]], form: str, across: list[int], rows_before: str, device: str = "cpu", **fields: Any
) -> Any:
    """Lists in a form, of the rows of "mask" and "full" blocks of each head; across: blocks that a row may list."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    for kind, of_heads in kinds.items():
        counts, indices, starts = FORMS[form](of_heads, across)
        fields |= {f"{kind}_block_cnt": _int32(counts, device), f"{kind}_block_idx": _int32(indices, device)}
        if starts is not None:
            field = "cu_full_block_idx_offsets" if form == "ragged" and kind == "full" else "cu_block_idx_offsets"
            fields[field] = torch.tensor(starts, dtype=torch.int64, device=device)
    if form not in ("padded", "shared"):
        (sequences, *_) = kinds["mask"]
        fields[rows_before] = _int32([0, *accumulate(map(len, sequences))], device)
    return BlockSparseTensorsTorch(**fields)


def _padded(heads: list[Rows], across: list[int]) -> tuple[Any, Any, None]:
    longest = max(len(rows) for rows in heads[0])
    return _rectangle([[rows + [[]] * (longest - len(rows)) for rows in sequence] for sequence in zip(*heads)])


def _shared(heads: list[Rows], across: list[int]) -> tuple[Any, Any, None]:
    return _rectangle([[sequences[0] for sequences in heads]])


def _rectangle(lists: list[list[list[list[int]]]]) -> tuple[Any, Any, None]:
    """[sequence][head][row], each sequence with as many rows."""
    width = max(1, max(len(row) for sequence in lists for head in sequence for row in head))
    counts = [[[len(row) for row in head] for head in sequence] for sequence in lists]
    return counts, [[[_filled(row, width) for row in head] for head in sequence] for sequence in lists], None


def _compact(heads: list[Rows], across: list[int]) -> tuple[Any, Any, None]:
    flat = [[row for rows in sequences for row in rows] for sequences in heads]
    width = max(1, max(len(row) for rows in flat for row in rows))
    return [[len(row) for row in rows] for rows in flat], [[_filled(row, width) for row in rows] for rows in flat], None


def _stacked(heads: list[Rows], across: list[int]) -> tuple[Any, Any, list[int]]:
    counts = [[len(row) for rows in sequences for row in rows] for sequences in heads]
    indices = [
        [entry for rows, width in zip(sequences, across) for row in rows for entry in _filled(row, width)]
        for sequences in heads
    ]
    return counts, indices, [0, *accumulate(len(rows) * width for rows, width in zip(heads[0], across))]


def _ragged(heads: list[Rows], across: list[int]) -> tuple[Any, Any, list[list[int]]]:
    """Heads one after the other, and a gap before each row that only a right start steps over."""
    counts, entries, starts = [], [NOWHERE] * 5, []
    for sequences in heads:
        flat = [row for rows in sequences for row in rows]
        counts.append([len(row) for row in flat])
        starts.append([])
        for row in flat:
            starts[-1].append(len(entries))
            entries += [*row, NOWHERE]
    return counts, entries, starts


def _filled(row: list[int], width: int) -> list[int]:
    return row + [NOWHERE] * (width - len(row))


FORMS: dict[str, Callable[[list[Rows], list[int]], tuple[Any, Any, Any]]] = {
    "padded": _padded,
    "shared": _shared,
    "compact": _compact,
    "stacked": _stacked,
    "ragged": _ragged,
}
