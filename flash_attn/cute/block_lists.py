"""Block lists from masks, windows and FlexAttention's BlockMask; their transpose; a picture of them.

Forward lists hold, for every query block, the key blocks to visit: *mask* blocks, in which the kernel applies the
mask_mod, and *full* blocks, in which it applies none. Backward lists hold the query blocks of every key block, and are
the transpose of the forward lists.

    forward = lists_from_window(T, T, 2047, 0, block_size=(128, 128))
    backward = transpose_lists(forward, T // 128)
    flash_attn_func(q, k, v, mask_mod=..., block_sparse_tensors=forward, block_sparse_tensors_bwd=backward)

Lists are as wide as the longest row, not as the number of blocks. Rows are in ascending order. Bad arguments raise a
TypeError or ValueError that names them. Checks, semaphore values and plans can be imported from here too.
"""

import os
from typing import Any

import torch

from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.lists import entries as list_entries
from flash_attn.cute.lists.backward_plan import plan_backward
from flash_attn.cute.lists.entries import fields, flat_entries, padded_rows, scatter
from flash_attn.cute.lists.formats import cu_total_blocks
from flash_attn.cute.lists.validate_calls import validate_lists
from flash_attn.cute.lists.write_order import compute_dq_write_order, packed_write_order

__all__ = [
    "BlockSparseTensorsTorch",
    "compute_dq_write_order",
    "cu_total_blocks",
    "draw_lists",
    "lists_from_block_mask",
    "lists_from_blocks",
    "lists_from_dense",
    "lists_from_window",
    "packed_write_order",
    "plan_backward",
    "transpose_lists",
    "validate_lists",
]

BlockSize = tuple[int, int]
Width = int | tuple[int, int] | None


def lists_from_dense(mask: torch.Tensor, block_size: BlockSize, *, width: Width = None) -> BlockSparseTensorsTorch:
    """Forward lists of the blocks in which a dense mask has a visible pair; full blocks where all pairs are visible.

    A block that reaches past the last key is never full: the kernels mask the end of the keys in mask blocks.

    Args:
        mask: bool [B, H, Sq, Sk] ([Sq, Sk] for all batches and heads alike), True where a query sees a key.
        block_size: (queries, keys) of a block.
        width: as in `lists_from_blocks`.
    """
    mask = _four_dimensions("mask", mask)
    rows, columns = list_entries.block_size(block_size)
    Sq, Sk = mask.shape[2:]
    missing = (0, -Sk % columns, 0, -Sq % rows)
    M, N = -(-Sq // rows), -(-Sk // columns)
    tiled = torch.nn.functional.pad(mask, missing).unflatten(2, (M, rows)).unflatten(4, (N, columns))
    listed = tiled.any(5).any(3)
    full = tiled.all(5)  # over the keys; rows past the last query do not count
    past = torch.arange(M * rows, device=mask.device).view(M, rows, 1) >= Sq
    return lists_from_blocks(listed, (full | past).all(3), block_size=block_size, width=width)


def lists_from_blocks(
    listed: torch.Tensor, full: torch.Tensor | None = None, *, block_size: BlockSize, width: Width = None
) -> BlockSparseTensorsTorch:
    """Forward lists of the blocks marked in a table of blocks.

    Args:
        listed: bool [B, H, M, N] ([M, N] for all batches and heads alike), the blocks to visit.
        full: bool of the same shape, the blocks that need no mask. None: all need it, and there are no full lists.
        width: of the index lists (or two widths, of mask and full lists), at least the longest row. None: the longest
            row, which synchronises with the host once.
        block_size: (queries, keys) of a block.
    """
    listed = _four_dimensions("listed", listed)
    block_size = list_entries.block_size(block_size)
    kinds = [listed]
    if full is not None:
        full = _four_dimensions("full", full)
        if full.shape != listed.shape:
            raise ValueError(f"full has shape {tuple(full.shape)}, expected that of listed, {tuple(listed.shape)}")
        kinds = [listed & ~full, listed & full]
    counts = [kind.sum(-1, dtype=torch.int32) for kind in kinds]
    tensors: list[torch.Tensor | None] = []
    for kind, cnt, wide in zip(kinds, counts, _widths(width, counts), strict=False):
        position = torch.where(kind, kind.cumsum(-1) - 1, wide).clamp(max=wide)
        idx = torch.zeros(*cnt.shape, wide + 1, dtype=torch.int32, device=cnt.device)
        block = torch.arange(kind.shape[3], dtype=torch.int32, device=cnt.device).expand(kind.shape)
        tensors += [cnt, idx.scatter_(-1, position, block)[..., :wide].contiguous()]
    return BlockSparseTensorsTorch(*tensors, block_size=block_size)


def lists_from_window(
    seqlen_q: int,
    seqlen_k: int,
    window_left: int | None,
    window_right: int | None,
    block_size: BlockSize,
    *,
    causal: bool = False,
    device: torch.device | str | None = None,
) -> BlockSparseTensorsTorch:
    """Forward lists [1, 1, M, width] of a sliding window, aligned at the ends of queries and keys.

    Query i stands at ``p = i + seqlen_k - seqlen_q`` and sees the keys ``p - window_left .. p + window_right``. Time
    and memory are proportional to the lists, which are made on the CPU and copied.

    Args:
        window_left, window_right: keys seen on each side. None or -1: all of them.
        causal: nothing to the right, whatever `window_right` is.
        block_size: (queries, keys) of a block.
        device: of the lists; None: the CPU.
    """
    list_entries.window_side("window_left", window_left)
    list_entries.window_side("window_right", window_right)
    list_entries.integer("seqlen_q", seqlen_q, least=0)
    list_entries.integer("seqlen_k", seqlen_k, least=0)
    rows, columns = list_entries.block_size(block_size)
    left = seqlen_q + seqlen_k if window_left in (None, -1) else window_left
    right = 0 if causal else seqlen_q + seqlen_k if window_right in (None, -1) else window_right
    first = torch.arange(0, seqlen_q, rows) + seqlen_k - seqlen_q
    last = (first + rows - 1).clamp(max=seqlen_k - 1)
    # Ranges of keys that some query of the block sees, and that every one sees.
    some = (first - left).clamp(min=0), (last + right).clamp(max=seqlen_k - 1)
    every = (last - left).clamp(min=0), (first + right).clamp(max=seqlen_k - 1)
    begin, end = _blocks(*some, columns)
    # A block is full if it lies within the second range.
    full_begin = torch.div(every[0] + columns - 1, columns, rounding_mode="floor").clamp(min=begin)
    full_end = torch.div(every[1] + 1, columns, rounding_mode="floor").clamp(min=full_begin)
    mask = _ranges(begin, full_begin, full_end, end)
    full = _ranges(full_begin, full_end, full_end, full_end)
    tensors = (t[None, None].to(device) for t in (*mask, *full))
    return BlockSparseTensorsTorch(*tensors, block_size=tuple(block_size))


def lists_from_block_mask(
    block_mask: Any, *, width: Width = None
) -> tuple[BlockSparseTensorsTorch, BlockSparseTensorsTorch]:
    """Forward and backward lists of a FlexAttention BlockMask (`torch.nn.attention.flex_attention`).

    The BlockMask's mask_mod is dropped: kernels need one written for them.

    Args:
        width: of the lists, as in `lists_from_blocks`; for both directions. None: the longest row of each, which
            synchronises with the host.
    """
    size = getattr(block_mask, "BLOCK_SIZE", None)
    if size is None:
        raise TypeError(f"block_mask must be a FlexAttention BlockMask, got {type(block_mask).__name__}")
    size = tuple(size)
    names = ("{}_num_blocks", "{}_indices", "full_{}_num_blocks", "full_{}_indices")
    forward, backward = ([getattr(block_mask, name.format(side)) for name in names] for side in ("kv", "q"))
    lists = _cut(forward, width, size)
    if backward[0] is None:
        return lists, transpose_lists(lists, -(-block_mask.seq_lengths[1] // size[1]), width=width)
    return lists, _cut(backward, width, size)


def transpose_lists(
    lists: Any, num_kv_blocks: int, *, width: Width = None, listed: int | None = None
) -> BlockSparseTensorsTorch:
    """Backward lists of the same blocks as forward lists (or forward lists of backward lists).

    Time and memory grow with the capacity of `lists` (or with `listed`), besides the result. Rows are in
    ascending order; broadcast batches and heads stay broadcast. Indices must be in range.

    Args:
        lists: with the fields of `BlockSparseTensorsTorch`.
        num_kv_blocks: key blocks, the rows of the result (query blocks, where `lists` are backward lists).
        width: of the index lists (or two widths, of mask and full lists), at least the longest row. None: the longest
            row, which synchronises with the host once. Give it to avoid that; the number of rows of `lists` is always
            enough.
        listed: upper bound of the blocks listed, all heads and batches together.
    """
    list_entries.integer("num_kv_blocks", num_kv_blocks, least=0)
    of = padded_rows(lists)
    M, kinds = of.N, len(of.counts)
    entries = flat_entries(of, None, of.capacity if listed is None else listed)
    rows = of.heads * num_kv_blocks  # of the result, of each kind
    head = torch.div(entries.row, max(M, 1), rounding_mode="floor")
    row = head.long() * num_kv_blocks + entries.block + rows * entries.is_full
    row = torch.where(entries.listed, row, rows * kinds)
    row, source = (row.int() if rows * kinds < 1 << 31 else row).sort(stable=True)
    ends = torch.searchsorted(row, torch.arange(rows * kinds, device=row.device, dtype=row.dtype), right=True)
    counts = ends.diff(prepend=ends.new_zeros(1)).int().view(kinds, *of.lead, num_kv_blocks)
    position = torch.arange(row.numel(), device=row.device) - torch.searchsorted(row, row)
    row, block = row.long(), (entries.row[source] % max(M, 1)).int()
    tensors: list[torch.Tensor] = []
    for kind, (cnt, wide) in enumerate(zip(counts, _widths(width, list(counts)), strict=False)):
        here = (row >= kind * rows) & (row < (kind + 1) * rows) & (position < wide)
        idx = scatter(block, (row - kind * rows) * wide + position, here, (*of.lead, num_kv_blocks, wide))
        tensors += [t.expand(*of.repeated, *t.shape[2:]) for t in (cnt.contiguous(), idx)]
    return BlockSparseTensorsTorch(*tensors, block_size=getattr(lists, "block_size", None))


def draw_lists(
    lists: Any,
    num_columns: int,
    *,
    batch: int = 0,
    head: int = 0,
    backward: bool = False,
    path: str | os.PathLike | None = None,
    ax: Any = None,
) -> Any:
    """A picture of one head's blocks: mask blocks light, full blocks dark, semaphore values written in small ones.

    Args:
        lists: with the fields of `BlockSparseTensorsTorch`.
        num_columns: blocks that a row can list: key blocks (query blocks, for backward lists).
        batch, head: indices of what is drawn.
        backward: rows are key blocks; they are drawn as columns.
        path: file to save it to.
        ax: matplotlib axes to draw on. None: new ones.

    Returns:
        The axes. Needs matplotlib.
    """
    list_entries.check_lists(fields(lists))
    list_entries.integer("num_columns", num_columns)
    for name, value, size in zip(("batch", "head"), (batch, head), lists.mask_block_cnt.shape, strict=False):
        if not 0 <= list_entries.integer(name, value, least=0) < size:
            raise ValueError(f"{name} must be in 0 .. {size - 1}, got {value}")

    import matplotlib.pyplot as plt

    picture, labels = _picture(lists, num_columns, batch, head, backward)
    if ax is None:
        _, ax = plt.subplots(figsize=(5, 5 * max(0.2, min(5.0, picture.shape[0] / picture.shape[1]))))
    ax.imshow(picture, cmap="Blues", vmin=0, vmax=2, interpolation="nearest")
    ax.set(xlabel="key block", ylabel="query block")
    if max(picture.shape) <= 40:
        for (m, n), lock in labels.items():
            ax.text(n, m, lock, ha="center", va="center", fontsize=7, color="white" if picture[m, n] > 1 else "black")
    if path is not None:
        ax.figure.savefig(path, dpi=150, bbox_inches="tight")
    return ax


def _picture(lists: Any, columns: int, batch: int, head: int, backward: bool) -> tuple[torch.Tensor, dict]:
    """1 for mask and 2 for full blocks [query blocks, key blocks], and semaphore values by (query block, key block)."""
    picture = torch.zeros(lists.mask_block_cnt.shape[2], columns, dtype=torch.int8)
    labels = {}
    for shade, kind in enumerate(list_entries.LIST_KINDS, 1):
        given = (getattr(lists, field, None) for field in (kind.cnt, kind.idx, kind.order))
        counts, idx, order = (None if t is None else t[batch, head].tolist() for t in given)
        for at in ((row, i) for row, count in enumerate(counts or ()) for i in range(count)):
            entry = at[0], idx[at[0]][at[1]]
            picture[entry] = shade
            if order is not None:
                labels[entry[::-1] if backward else entry] = str(order[at[0]][at[1]])
    return picture.T if backward else picture, labels


def _cut(tensors: list[torch.Tensor | None], width: Width, block_size: BlockSize) -> BlockSparseTensorsTorch:
    """Padded lists cut to the given widths, or to their longest row."""
    widths = _widths(width, [t for t in tensors[::2] if t is not None])
    cut = [t if i % 2 == 0 or t is None else t[..., : widths[i // 2]].contiguous() for i, t in enumerate(tensors)]
    return BlockSparseTensorsTorch(*cut, block_size=block_size)


def _widths(width: Width, counts: list[torch.Tensor]) -> list[int]:
    """Widths of mask and full lists; at least 1, because kernels want a dimension with stride 1."""
    list_entries.width(width)
    if width is None:
        longest = torch.stack([cnt.max() if cnt.numel() else cnt.new_zeros(()) for cnt in counts])
        return [max(1, wide) for wide in longest.tolist()]
    return [width, width] if isinstance(width, int) else list(width)


def _four_dimensions(name: str, mask: torch.Tensor) -> torch.Tensor:
    mask = list_entries.bool_table(name, mask)
    return mask if mask.ndim == 4 else mask[None, None]


def _blocks(first: torch.Tensor, last: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks (begin, end) that hold the keys first .. last; begin == end where there are none."""
    begin = torch.div(first, size, rounding_mode="floor")
    end = torch.div(last, size, rounding_mode="floor") + 1
    return begin, torch.where(first <= last, end, begin)


def _ranges(
    begin: torch.Tensor, skip: torch.Tensor, resume: torch.Tensor, end: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row the numbers begin .. skip - 1 and resume .. end - 1: counts, and a padded list."""
    before = (skip - begin).clamp(min=0)
    count = before + (end - resume).clamp(min=0)
    index = torch.arange(max(1, int(count.max()) if count.numel() else 1))
    numbers = torch.where(index < before.unsqueeze(-1), begin.unsqueeze(-1), (resume - before).unsqueeze(-1)) + index
    return count.int(), torch.where(index < count.unsqueeze(-1), numbers, 0).int()
