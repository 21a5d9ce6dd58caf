"""Checks of a call's block lists: refuses those that no kernel reads, and validates entries on request.

`validate=True` requests it for a call, and the environment variable `ALWAYS` for all calls.

Validation synchronises with the host, so it cannot be captured in a CUDA graph.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from flash_attn.cute.lists.backward_plan import check_work_tiles
from flash_attn.cute.lists.csr import is_packed, packed_rows, starts_of
from flash_attn.cute.lists.entries import LIST_KINDS, LISTS, ORDERS, padded_rows
from flash_attn.cute.lists.formats import BACKWARD, FORWARD, Direction, Packing, fit
from flash_attn.cute.lists.query_bits import has_bits, refuse_bits
from flash_attn.cute.lists.rows import ListHeads
from flash_attn.cute.lists.validate import Side, check_sides
from flash_attn.cute.lists.write_order import as_launch_order
from flash_attn.cute.runtime.call_options import edges


def _gradient_needed(tensors) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def require_lists_for_gradient(forward, backward, *inputs, mask_mod, causal, window_size):
    """Refuse a gradient where backward would not visit the blocks that forward visited.

    A direction without lists runs dense, under the call's mask: mask_mod, causal or a window then has to be equivalent
    to the lists of the other direction. Inference needs no backward lists.

    Returns:
        (left, right) of the causal mask or window that lists of one direction have to cover, for `validate_call`; None
        if there is nothing to compare, as with a mask_mod, which only the kernel evaluates.
    """
    if _gradient_needed(inputs):
        refuse_bits("backward: call under torch.no_grad(), or compute the gradient apart", forward, backward)
    if (forward is None) == (backward is None) or mask_mod is not None or not _gradient_needed(inputs):
        return None
    window = edges(causal, window_size)
    if window != (None, None):
        return window
    arguments = FORWARD.argument, BACKWARD.argument
    given, missing = arguments if backward is None else reversed(arguments)
    raise ValueError(
        f"{missing} is None while {given} is given, nothing is masked and a gradient is needed: forward and backward "
        f"would attend to different blocks. Pass both (backward lists are the transpose: query blocks for each key "
        f"block), or the mask that the lists stand for (mask_mod, causal or window_size), or call under "
        f"torch.no_grad()."
    )


ALWAYS = "FLASH_ATTENTION_CUTE_VALIDATE_LISTS"  # "1": every call's lists are checked
READ_BY = (9, 10, 11)  # arch // 10
USUAL_BLOCKS = (128, 256, 64, 192)
OptionalTensor = torch.Tensor | None


def refuse_unread(lists: Any, arch: int, *, qv: bool = False, backward: bool = False, forward: Any = None) -> None:
    """Refuse a call's lists (or None) if its kernel does not read them; upstream's own errors keep its messages.

    forward: the lists of the forward pass, in a backward call that has them.
    """
    if backward:
        refuse_bits("backward", lists, forward)
    elif arch // 10 != 9:
        refuse_bits(f"kernels for sm_{arch}, only by forward for SM 9.0", lists)
    if lists is None:
        return
    if arch // 10 not in READ_BY:
        raise NotImplementedError(
            f"Block sparsity {'backward ' if backward else ''}not supported on SM {arch // 10}.{arch % 10}: only "
            f"kernels for SM 9.0, 10.0 and 11.0 read block_sparse_tensors"
        )
    if qv:
        raise NotImplementedError(
            f"block sparsity is not supported with qv: its kernels for sm_{arch} read no block_sparse_tensors"
        )
    if arch // 10 != 9 and lists.block_size is not None and lists.block_size[0] % 128 == 64:
        raise NotImplementedError(
            f"block_size {lists.block_size} on sm_{arch}: tiles of SM100 have 128 queries; list blocks of a multiple "
            f"of 128 queries (a pair of blocks lists what either does, the rest is left to a mask_mod)"
        )


def validate_call(
    requested: bool,
    forward: Any,
    backward: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    cu_seqlens_q: OptionalTensor = None,
    cu_seqlens_k: OptionalTensor = None,
    seqused_q: OptionalTensor = None,
    seqused_k: OptionalTensor = None,
    page_table: OptionalTensor = None,
    window: tuple[int | None, int | None] | None = None,
) -> None:
    """Check the lists of a call to flash_attn_func or flash_attn_varlen_func, if `requested` or under `ALWAYS`.

    Args:
        window: (left, right) that lists of one direction have to cover, as `require_lists_for_gradient` returns it;
            None: no such check.

    Raises:
        ValueError: naming the first wrong entry, see `validate_lists`; the sequence too, where sequences are packed.
        NotImplementedError: `requested` with paged keys or lists with bits.
    """
    if forward is None and backward is None or torch.compiler.is_compiling():  # the operator checks when it runs
        return
    if not (requested or os.environ.get(ALWAYS) == "1"):
        return
    if isinstance(q, FakeTensor):  # a kernel is being compiled, there are no lists
        return
    if page_table is not None or has_bits(forward):
        if requested:
            what = "mask_block_bits: lists with bits" if page_table is None else "page_table: lists over paged keys"
            raise NotImplementedError(f"validate=True with {what} are not checked")
        return
    heads = q.shape[-2], k.shape[-2]
    if backward is not None and backward.plan is not None:
        check_work_tiles(backward, *heads)
    known = Packing((cu_seqlens_q, cu_seqlens_k), (seqused_q, seqused_k), (None, None))
    packed = None if cu_seqlens_q is None and cu_seqlens_k is None else known
    lengths = _lengths(known, q, k)
    batch = 1 if window is None or len(set(lengths)) == 1 else len(lengths)
    given = [lists for lists in (forward, backward) if lists is not None]
    padded, size, rows = not any(map(is_packed, given)), None, (q.shape[1], k.shape[1])
    if packed is None and padded:
        size = (_block(forward, rows[0]), _block(backward, rows[1]))
    elif any(lists.block_size is None for lists in given):
        raise ValueError("block_size is None: lists of packed sequences are checked with block_size=(queries, keys)")
    elif padded:  # all sequences have equally many rows: those past a sequence's end are not read
        longest = [max(side) for side in zip(*lengths, strict=True)]
        for side, lists in enumerate((forward, backward)):
            if lists is not None:
                longest[side] = max(longest[side], lists.mask_block_cnt.shape[2] * lists.block_size[side])
        rows = tuple(longest)
    if padded:
        sides = _padded_sides(forward, backward, rows, heads, len(lengths), size, batch=batch)
    else:
        both = ((FORWARD, forward), (BACKWARD, backward))
        sides = [_packed_side(d, lists, packed, lengths, heads) for d, lists in both if lists is not None]
        most = max(side.rows.heads for side in sides)
        sides = [side.spread((1, most)) for side in sides]
    check_sides(sides, window=window, lengths=lengths)


def validate_lists(
    forward: Any,
    backward: Any = None,
    *,
    seqlen_q: int,
    seqlen_k: int,
    num_heads: int,
    num_heads_kv: int | None = None,
    batch_size: int | None = None,
    block_size: tuple[int, int] | None = None,
    ascending: bool = False,
    order: torch.Tensor | None = None,
) -> None:
    """Check counts, indices, duplicates, that `backward` is the transpose of `forward`, and its semaphore values.

    Args:
        forward, backward: lists with the fields of `BlockSparseTensorsTorch`; None: not checked.
        seqlen_q, seqlen_k: queries and keys of a sequence.
        num_heads: query heads; the lists' head dimension is that, 1, or `num_heads_kv`.
        batch_size: None: any.
        block_size: (queries, keys) of a block, for lists without; lists of different block sizes are not compared.
        ascending: also require ascending indices in every row.
        order: launch order of the key blocks (see `compute_dq_write_order`), which the semaphore values have to follow.
            None: that of ``backward.spt``; if that is None too, any order.

    Raises:
        ValueError: naming the tensor, and the first wrong entry by its indices and value.
        NotImplementedError: packed lists (``cu_total_m_blocks``).
    """
    lengths, heads = (seqlen_q, seqlen_k), (num_heads, num_heads_kv or 1)
    sides = _padded_sides(forward, backward, lengths, heads, batch_size, block_size, order=order)
    check_sides(sides, ascending=ascending, order=order)


def _padded_sides(
    forward: Any,
    backward: Any,
    lengths: tuple[int, int],
    heads: tuple[int, int],
    batch_size: int | None,
    block_size: tuple[int, int] | None,
    *,
    order: torch.Tensor | None = None,
    batch: int = 1,
) -> list[Side]:
    """Lists [B, H, rows, width] as sides, without batches and heads that all of them broadcast.

    lengths: (queries, keys). heads: (Hq, Hkv). batch: sequences with rows of their own even if they share lists.
    """
    sides, leads = [], [(batch, 1)]
    for name, lists in (("forward", forward), ("backward", backward)):
        if lists is None:
            continue
        size = getattr(lists, "block_size", None) or block_size
        if size is None:
            raise ValueError(f"{name} block_size is None: give block_size=(queries, keys)")
        N, columns = _check_shapes(name, lists, lengths, heads, batch_size, size)
        rows = padded_rows(lists, locks=name == "backward")
        across = torch.full((N,), columns, device=rows.block.device)
        sides.append(Side(name, lists, rows, rows.lead, across, columns, tuple(size)))
        leads.append(rows.lead)
    if order is not None and backward is not None:
        leads.append(tuple(as_launch_order(False, order, sides[-1].rows.N, order.device).shape[:2]))
    common = tuple(map(max, zip(*leads)))
    return [side.spread(common) for side in sides]


def _check_shapes(
    name: str, lists: Any, lengths: tuple[int, int], heads: tuple[int, int], batch_size: int | None, size: Sequence[int]
) -> tuple[int, int]:
    """Check shapes; returns the number of rows and the number of blocks that a row can list."""
    if getattr(lists, "cu_total_m_blocks", None) is not None:
        raise NotImplementedError(f"{name} cu_total_m_blocks is given: packed lists are not checked, only [B, H, rows]")
    blocks = [-(-length // own) for length, own in zip(lengths, size, strict=True)]
    rows, columns = blocks if name == "forward" else reversed(blocks)
    heads = sorted({1, *heads})
    batches = sorted({1, batch_size or lists.mask_block_cnt.shape[0]})
    for tensor_name in (*LISTS, *ORDERS):
        tensor = getattr(lists, tensor_name, None)
        if tensor is None:
            continue
        what = f"{name} {tensor_name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
        if tensor.dtype != torch.int32 or tensor.ndim != (3 if tensor_name.endswith("cnt") else 4):
            raise ValueError(f"{what}, expected int32 with dimensions [B, H, rows], and width where it holds a list")
        if tensor.device != lists.mask_block_cnt.device:
            raise ValueError(f"{what}, expected {lists.mask_block_cnt.device} like mask_block_cnt")
        if tensor.shape[0] not in batches or tensor.shape[1] not in heads or tensor.shape[2] != rows:
            raise ValueError(
                f"{what}, expected B of {batches}, H of {heads} and {rows} rows, for seqlen_q={lengths[0]}, "
                f"seqlen_k={lengths[1]} and block_size={tuple(size)}"
            )
        most = max(columns, 1)  # kernels want a dimension with stride 1, so lists of nothing are that wide too
        if tensor.ndim == 4 and tensor.shape[3] > most:
            raise ValueError(f"{what}, expected a width of at most {most}: a row cannot list more blocks")
    ordered = getattr(lists, ORDERS[0], None) is not None
    for _, cnt, idx, order, _ in LIST_KINDS:
        counts, indices, locks = (getattr(lists, field, None) for field in (cnt, idx, order))
        if (counts is None) != (indices is None):
            raise ValueError(f"{name} {cnt} and {idx} must be given together")
        shapes = [None if t is None else tuple(t.shape) for t in (locks, indices)]
        if ordered and shapes[0] != shapes[1]:
            raise ValueError(f"{name} {order} is {shapes[0]}, expected the shape of {idx}, {shapes[1]}")
    return rows, columns


def _lengths(known: Packing, q: torch.Tensor, k: torch.Tensor) -> list[tuple[int, int]]:
    """Queries and keys of each sequence."""
    sides = []
    for side, tensor in enumerate((q, k)):
        lengths = known.lengths(side)
        sides.append([tensor.shape[1]] * tensor.shape[0] if lengths is None else lengths.tolist())
    batch = max(map(len, sides))
    return list(zip(*(lengths * (batch // len(lengths)) for lengths in sides), strict=True))


def _block(lists: Any, seqlen: int) -> int:
    """Block size of lists without block_size: the first of the kernels' usual ones that gives their row count."""
    rows = None if lists is None else lists.mask_block_cnt.shape[-1]
    return next((size for size in USUAL_BLOCKS if rows is None or -(-seqlen // size) == rows), USUAL_BLOCKS[0])


def _packed_side(
    direction: Direction, lists: Any, packed: Packing | None, lengths: list[tuple[int, int]], heads: tuple[int, int]
) -> Side:
    """Packed lists as a side; rows past a sequence's last block are emptied."""
    own, field = direction.side, direction.rows_before
    if lists.mask_block_cnt.ndim == 3:
        lists = _compact(direction, lists, len(lengths))
    fitted = fit(
        lists, direction, packed, batch=len(lengths), heads=ListHeads.of(lists, *heads).count,
        block_size=lists.block_size, across=lengths[0][1 - own], on_gpu=False,
    )  # fmt: skip
    blocks = [[-(-length[side] // lists.block_size[side]) for length in lengths] for side in (own, 1 - own)]
    _check_capacity(direction, fitted, blocks[0])
    rows, device = packed_rows(fitted, rows_before=field), fitted.mask_block_cnt.device
    needed, across = (torch.tensor(of, device=device).index_select(0, rows.sequence) for of in blocks)
    rows = replace(rows, counts=tuple(torch.where(rows.block < needed, counts, 0) for counts in rows.counts))
    name = "forward" if direction is FORWARD else "backward"
    starts = tuple(starts_of(lists, kind) for kind in LIST_KINDS)
    return Side(name, lists, rows, rows.lead, across, max(blocks[1]), tuple(lists.block_size), starts)


def _compact(direction: Direction, lists: Any, batch: int) -> Any:
    """Padded lists as compact ones of `batch` sequences."""
    given = {name: getattr(lists, name) for name in (*LISTS, *ORDERS) if getattr(lists, name) is not None}
    flat = {name: t.expand(batch, *t.shape[1:]).transpose(0, 1).flatten(1, 2) for name, t in given.items()}
    rows = lists.mask_block_cnt.shape[2]
    before = torch.arange(batch + 1, device=lists.mask_block_cnt.device) * rows
    return lists._replace(**flat, **{direction.rows_before: before})


def _check_capacity(direction: Direction, lists: Any, needed: list[int]) -> None:
    """Check that there are rows for the blocks of every sequence."""
    name, rows = f"{direction.argument}.{direction.rows_before}", lists.mask_block_cnt.shape[-1]
    starts = getattr(lists, direction.rows_before).tolist()
    if len(starts) != len(needed) + 1:
        raise ValueError(f"{name} has shape ({len(starts)},), expected ({len(needed) + 1},): rows before each sequence")
    for b, number in enumerate(needed):
        if starts[b] < 0 or starts[b + 1] - starts[b] < number:
            raise ValueError(
                f"{name}[{b}] = {starts[b]} and [{b + 1}] = {starts[b + 1]}, expected capacity for {number} rows of "
                f"sequence {b}"
            )
    if starts[-1] > rows:
        raise ValueError(f"{name}[{len(needed)}] = {starts[-1]}, but mask_block_cnt has {rows} rows")
