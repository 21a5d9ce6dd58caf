"""The block lists of a call: refused where no kernel reads them, and checked before the launch on request.

`validate=True` requests it, or an environment variable does for every call, where debugging asks for it.

Waits for the device, so it does not go into a CUDA graph.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from flash_attn.cute.lists.csr import is_packed, packed_rows, starts_of
from flash_attn.cute.lists.entries import KINDS, LISTS, ORDERS
from flash_attn.cute.lists.formats import BACKWARD, FORWARD, Direction, Packing, fit, packing
from flash_attn.cute.lists.rows import ListHeads
from flash_attn.cute.lists.validate import Side, check_sides, padded_sides, spread
from flash_attn.cute.lists.validate_plan import check_items
from flash_attn.cute.runtime.call_options import edges


def _gradient_needed(tensors) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def require_lists_for_gradient(forward, backward, *inputs, mask_mod, causal, window_size):
    """Refuse a gradient whose backward cannot walk the blocks that forward walked.

    A direction without lists runs dense, under the call's mask. Lists of the other direction may say the same as a
    mask_mod, causal or a window, and are taken at their word. Without any of them the gradient would be one of another
    function. Inference needs no backward lists.

    Returns:
        (left, right) of the window, causal or not, that such lists of one direction have to list all of, for
        `validate_call`; None where there is nothing to compare: under a mask_mod nobody but the kernel can say.

    Raises:
        ValueError: lists for one direction only, no mask, and one of `inputs` needs a gradient.
    """
    if (forward is None) == (backward is None) or not _gradient_needed(inputs):
        return None
    if mask_mod is not None:
        return None
    window = edges(causal, window_size)
    if window != (None, None):
        return window
    given, missing = (
        ("block_sparse_tensors", "block_sparse_tensors_bwd")
        if backward is None
        else ("block_sparse_tensors_bwd", "block_sparse_tensors")
    )
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


def refuse_unread(lists: Any, arch: int, *, qv: bool = False, backward: bool = False) -> None:
    """Refuse the lists of a call (or None) to kernels that do not read them, some of which would say nothing.

    What upstream asserts is in its words: programs match on them.

    Raises:
        NotImplementedError: another architecture than SM90, SM100 and SM110, or `qv`.
    """
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
        window: keys before and after its own that a query sees, where lists of one direction have to name all of them
            (see `validate_calls`); None: they need not.

    Raises:
        ValueError: naming the first wrong entry, see `validate_lists`; the sequence too, where sequences are packed.
        NotImplementedError: `requested`, and the keys lie in pages.
    """
    if not (requested or os.environ.get(ALWAYS) == "1") or (forward is None and backward is None):
        return
    if isinstance(q, FakeTensor):  # a kernel is being compiled, there are no lists
        return
    if page_table is not None:
        if requested:
            raise NotImplementedError("validate=True with page_table: lists over paged keys are not checked")
        return
    heads = q.shape[-2], k.shape[-2]
    if backward is not None and backward.plan is not None:
        check_items(backward, *heads)
    packed = packing(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, None, None)
    lengths = _lengths(packed, q, k)
    given = [lists for lists in (forward, backward) if lists is not None]
    if packed is None and not any(map(is_packed, given)):
        size = (_block("forward", forward, q.shape[1]), _block("backward", backward, k.shape[1]))
        sides = padded_sides(forward, backward, lengths[0], heads, q.shape[0], size)
        return check_sides(sides, window=window, lengths=lengths[:1])
    if any(lists.block_size is None for lists in given):
        raise ValueError("block_size is None: lists of packed sequences are checked with block_size=(queries, keys)")
    if not any(map(is_packed, given)):
        # One row count for all sequences, at least the longest's: rows and entries past a sequence's end do nothing.
        longest = [max(side) for side in zip(*lengths, strict=True)]
        for side, lists in enumerate((forward, backward)):
            if lists is not None:
                longest[side] = max(longest[side], lists.mask_block_cnt.shape[2] * lists.block_size[side])
        batch = 1 if window is None else len(lengths)
        sides = padded_sides(forward, backward, tuple(longest), heads, len(lengths), None, batch=batch)
    else:
        both = ((FORWARD, forward), (BACKWARD, backward))
        sides = [_packed_side(d, lists, packed, lengths, heads) for d, lists in both if lists is not None]
        most = max(side.rows.heads for side in sides)
        sides = [spread(side, (1, most)) for side in sides]
    check_sides(sides, window=window, lengths=lengths)


def _lengths(packed: Packing | None, q: torch.Tensor, k: torch.Tensor) -> list[tuple[int, int]]:
    """Queries and keys of each sequence."""
    sides = []
    for side, tensor in enumerate((q, k)):
        lengths = None if packed is None else packed.lengths(side)
        sides.append([tensor.shape[1]] * tensor.shape[0] if lengths is None else lengths.tolist())
    batch = max(map(len, sides))
    return list(zip(*(lengths * (batch // len(lengths)) for lengths in sides), strict=True))


def _block(name: str, lists: Any, seqlen: int) -> int:
    """The size that a row stands for, where the lists do not say; kernels' own sizes are tried."""
    rows = None if lists is None else lists.mask_block_cnt.shape[-1]
    return next((size for size in USUAL_BLOCKS if rows is None or -(-seqlen // size) == rows), USUAL_BLOCKS[0])


def _packed_side(
    direction: Direction,
    lists: Any,
    packed: Packing | None,
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
) -> Side:
    """The rows of all sequences; those that none of them needs list nothing."""
    own, field = direction.side, direction.rows_before
    if lists.mask_block_cnt.ndim == 3:
        lists = _compact(direction, lists, len(lengths))
    fitted = fit(
        lists, direction, packed, batch=len(lengths), heads=ListHeads.of(lists, *heads).count,
        block_size=lists.block_size, across=lengths[0][1 - own], on_gpu=False,
    )  # fmt: skip
    blocks = [[-(-length[side] // lists.block_size[side]) for length in lengths] for side in (own, 1 - own)]
    _check_room(direction, fitted, blocks[0])
    rows, device = packed_rows(fitted, rows_before=field), fitted.mask_block_cnt.device
    needed, across = (torch.tensor(of, device=device).index_select(0, rows.sequence) for of in blocks)
    counts = tuple(torch.where(rows.block < needed, counts, 0) for counts in rows.rows.counts)
    return Side(
        "forward" if direction is FORWARD else "backward", lists, replace(rows.rows, counts=counts),
        (1, rows.rows.heads), rows.locks, rows.sequence, rows.block, across, columns=max(blocks[1]),
        block_size=tuple(lists.block_size), sequences=len(lengths),
        starts=tuple(starts_of(lists, kind) for kind in KINDS),
    )  # fmt: skip


def _compact(direction: Direction, lists: Any, batch: int) -> Any:
    """Padded lists as compact ones of `batch` sequences."""
    given = {name: getattr(lists, name) for name in (*LISTS, *ORDERS) if getattr(lists, name) is not None}
    flat = {name: t.expand(batch, *t.shape[1:]).transpose(0, 1).flatten(1, 2) for name, t in given.items()}
    rows = lists.mask_block_cnt.shape[2]
    before = torch.arange(batch + 1, device=lists.mask_block_cnt.device) * rows
    return lists._replace(**flat, **{direction.rows_before: before})


def _check_room(direction: Direction, lists: Any, needed: list[int]) -> None:
    """There are rows for the blocks of every sequence."""
    name, rows = f"{direction.argument}.{direction.rows_before}", lists.mask_block_cnt.shape[-1]
    starts = getattr(lists, direction.rows_before).tolist()
    if len(starts) != len(needed) + 1:
        raise ValueError(f"{name} has shape ({len(starts)},), expected ({len(needed) + 1},): rows before each sequence")
    for b, number in enumerate(needed):
        if starts[b] < 0 or starts[b + 1] - starts[b] < number:
            raise ValueError(
                f"{name}[{b}] = {starts[b]} and [{b + 1}] = {starts[b + 1]}, expected room for {number} rows of "
                f"sequence {b}"
            )
    if starts[-1] > rows:
        raise ValueError(f"{name}[{len(needed)}] = {starts[-1]}, but mask_block_cnt has {rows} rows")
