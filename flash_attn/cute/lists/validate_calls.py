"""The block lists of a call: refused where no kernel reads them, and checked before the launch on request.

`validate=True` requests it, or an environment variable does for every call, where debugging asks for it.

Lists of packed sequences are taken apart into the lists of each sequence, backward lists with a plan into the lists
that the plan was made of; `validate` checks those. Waits for the device, so it does not go into a CUDA graph.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from flash_attn.cute.lists.backward_plan import check_form, check_launch
from flash_attn.cute.lists.csr import is_packed, packed_rows
from flash_attn.cute.lists.formats import BACKWARD, FORMS, FORWARD, Direction, as_ragged
from flash_attn.cute.lists.validate import NAMES, ORDERS, validate_coverage, validate_lists
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
    backward = _without_plan(backward, q.shape[-2], k.shape[-2])
    sequences = dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q, seqused_k=seqused_k)
    size = _check_entries(forward, backward, q, k, **sequences)
    if window is not None:
        _check_coverage(forward, backward, _lengths(q, k, **sequences), window, size)


def _check_entries(
    forward: Any, backward: Any, q: torch.Tensor, k: torch.Tensor, **sequences: OptionalTensor
) -> tuple[int, int]:
    """Everything that the lists alone tell is wrong. Returns (queries, keys) of a block."""
    heads = dict(num_heads=q.shape[-2], num_heads_kv=k.shape[-2])
    given = [(d, lists) for d, lists in ((FORWARD, forward), (BACKWARD, backward)) if lists is not None]
    packed = sequences["cu_seqlens_q"] is not None or sequences["cu_seqlens_k"] is not None
    if not packed and not any(is_packed(lists) for _, lists in given):
        size = (_block("forward", forward, q.shape[1]), _block("backward", backward, k.shape[1]))
        sizes = dict(seqlen_q=q.shape[1], seqlen_k=k.shape[1], batch_size=q.shape[0], block_size=size)
        validate_lists(forward, backward, **sizes, **heads)
        return size
    lengths = _lengths(q, k, **sequences)
    for _, lists in given:
        if lists.block_size is None:
            raise ValueError(
                "block_size is None: lists of packed sequences are checked with block_size=(queries, keys)"
            )
    if all(lists.mask_block_cnt.ndim == 3 for _, lists in given):
        # One row count for all sequences, at least the longest's: rows and entries past a sequence's end do nothing.
        seqlen_q, seqlen_k = (max(side) for side in zip(*lengths, strict=True))
        if forward is not None:
            seqlen_q = max(seqlen_q, forward.mask_block_cnt.shape[2] * forward.block_size[0])
        if backward is not None:
            seqlen_k = max(seqlen_k, backward.mask_block_cnt.shape[2] * backward.block_size[1])
        sizes = dict(seqlen_q=seqlen_q, seqlen_k=seqlen_k, batch_size=len(lengths))
        validate_lists(forward, backward, **sizes, **heads)
        return given[0][1].block_size
    unpacked = {d.argument: list(_sequences(d, lists, lengths)) for d, lists in given}
    for b, (seqlen_q, seqlen_k) in enumerate(lengths):
        own = [unpacked[d.argument][b] if d.argument in unpacked else None for d in (FORWARD, BACKWARD)]
        try:
            validate_lists(*own, seqlen_q=seqlen_q, seqlen_k=seqlen_k, batch_size=1, **heads)
        except ValueError as error:
            raise ValueError(f"sequence {b}, whose rows count from its start: {error}") from None
    return given[0][1].block_size


def _check_coverage(
    forward: Any,
    backward: Any,
    lengths: list[tuple[int, int]],
    window: tuple[int | None, int | None],
    size: tuple[int, int],
) -> None:
    """Lists of one direction name all that the mask shows, in each sequence."""
    direction, lists = (FORWARD, forward) if backward is None else (BACKWARD, backward)
    if is_packed(lists):
        sequences = list(_sequences(direction, lists, lengths))
    else:
        sequences = [_of_batch(lists, b) for b in range(len(lengths))]
    for b, (own, (seqlen_q, seqlen_k)) in enumerate(zip(sequences, lengths, strict=True)):
        sizes = dict(seqlen_q=seqlen_q, seqlen_k=seqlen_k, block_size=size)
        try:
            validate_coverage(own, window, backward=direction is BACKWARD, **sizes)
        except ValueError as error:
            raise ValueError(f"sequence {b}: {error}") from None


def _of_batch(lists: Any, b: int) -> Any:
    """Padded lists of one sequence, [1, H, rows]."""
    given = {name: getattr(lists, name) for name in NAMES if getattr(lists, name) is not None}
    return lists._replace(**{name: t.narrow(0, min(b, t.shape[0] - 1), 1) for name, t in given.items()})


def _lengths(q: torch.Tensor, k: torch.Tensor, **sequences: OptionalTensor) -> list[tuple[int, int]]:
    """Queries and keys of each sequence."""
    sides = []
    for side, tensor in (("q", q), ("k", k)):
        if sequences[f"seqused_{side}"] is not None:
            sides.append(sequences[f"seqused_{side}"].tolist())
        elif sequences[f"cu_seqlens_{side}"] is not None:
            sides.append(sequences[f"cu_seqlens_{side}"].diff().tolist())
        else:
            sides.append([tensor.shape[1]] * tensor.shape[0])
    batch = max(map(len, sides))
    return list(zip(*(lengths * (batch // len(lengths)) for lengths in sides), strict=True))


def _block(name: str, lists: Any, seqlen: int) -> int:
    """The size that a row stands for, where the lists do not say; kernels' own sizes are tried."""
    rows = None if lists is None else lists.mask_block_cnt.shape[-1]
    return next((size for size in USUAL_BLOCKS if rows is None or -(-seqlen // size) == rows), USUAL_BLOCKS[0])


@dataclass(frozen=True)
class _Rows:
    """Rows of one sequence: its first row, how many it has, and how many blocks a row can list."""

    sequence: int
    first: int
    number: int
    across: int


def _sequences(direction: Direction, lists: Any, lengths: Sequence[tuple[int, int]]) -> Iterator[Any]:
    """The lists of each sequence, [1, H, rows, width] and as wide as a row can get."""
    side, size, name = direction.side, lists.block_size, direction.argument
    form = FORMS.get((lists.mask_block_cnt.ndim, lists.mask_block_idx.ndim))
    if form is None:
        raise ValueError(
            f"{name}: mask_block_cnt {tuple(lists.mask_block_cnt.shape)} and mask_block_idx "
            f"{tuple(lists.mask_block_idx.shape)} are lists of no form known"
        )
    needed = [-(-own[side] // size[side]) for own in lengths]
    across = [-(-own[1 - side] // size[1 - side]) for own in lengths]
    if form == "padded":
        starts = [0] * len(lengths)
    else:
        starts = _row_starts(direction, lists, needed)
        _check_room(name, lists, form, starts, needed, across)
        before = torch.tensor(across, device=lists.mask_block_cnt.device)
        lists = as_ragged(lists, direction.rows_before, torch.nn.functional.pad(before.cumsum(0), (1, 0)))
    for b, first in enumerate(starts):
        rows = _Rows(b, first, needed[b], across[b])
        yield _of_sequence(name, lists, rows)


def _row_starts(direction: Direction, lists: Any, needed: list[int]) -> list[int]:
    name, field = direction.argument, direction.rows_before
    before = getattr(lists, field)
    if before is None or tuple(before.shape) != (len(needed) + 1,):
        shape = None if before is None else tuple(before.shape)
        raise ValueError(f"{name}.{field} is {shape}, expected [{len(needed) + 1}]: rows before each sequence")
    starts = before.tolist()
    for b, rows in enumerate(needed):
        if starts[b] < 0 or starts[b + 1] - starts[b] < rows:
            raise ValueError(
                f"{name}.{field}[{b}] = {starts[b]} and [{b + 1}] = {starts[b + 1]}, expected room for {rows} rows of "
                f"sequence {b}"
            )
    if starts[-1] > lists.mask_block_cnt.shape[-1]:
        raise ValueError(
            f"{name}.{field}[{len(needed)}] = {starts[-1]}, but mask_block_cnt has "
            f"{lists.mask_block_cnt.shape[-1]} rows"
        )
    return starts[:-1]


def _check_room(name: str, lists: Any, form: str, first: list[int], needed: list[int], across: list[int]) -> None:
    """Rows of compact and stacked lists end before the next row, or the next head, begins."""
    for cnt, idx in (NAMES[:2], NAMES[2:]):
        counts, indices = getattr(lists, cnt), getattr(lists, idx)
        if counts is None:
            continue
        if form == "compact" and (counts > indices.shape[-1]).any():
            h, row = (counts > indices.shape[-1]).nonzero()[0].tolist()
            raise ValueError(
                f"{name}.{cnt}[{h}, {row}] = {int(counts[h, row])}, expected at most the {indices.shape[-1]} that a "
                f"row of {idx} has room for"
            )
        for b, rows in enumerate(needed if form == "stacked" else ()):
            offsets = lists.cu_block_idx_offsets
            start = first[b] * across[b] if offsets is None else int(offsets[b])
            size = rows * across[b]
            if start < 0 or start + size > indices.shape[-1]:
                raise ValueError(
                    f"{name}.cu_block_idx_offsets[{b}] = {start}, expected 0 .. {indices.shape[-1] - size}: {idx} has "
                    f"{indices.shape[-1]} places a head, and {rows} rows need {across[b]} each"
                )


def _of_sequence(name: str, lists: Any, rows: _Rows) -> Any:
    fields: dict[str, Any] = dict.fromkeys((*NAMES, *ORDERS))
    padded = not is_packed(lists)
    for (cnt, idx), order in zip((NAMES[:2], NAMES[2:]), ORDERS, strict=True):
        if getattr(lists, cnt) is None:
            continue
        counts = getattr(lists, cnt)
        if padded:
            counts = counts[min(rows.sequence, counts.shape[0] - 1)]
        fields[cnt] = counts[:, rows.first : rows.first + rows.number][None]
        for tensor in (idx, order):
            if getattr(lists, tensor) is not None:
                entries = _entries(name, lists, tensor, idx, rows, fields[cnt][0])
                fields[tensor] = entries[None, ..., : rows.across]
    return lists._replace(
        **fields,
        cu_total_m_blocks=None,
        cu_total_n_blocks=None,
        cu_block_idx_offsets=None,
        cu_full_block_idx_offsets=None,
    )


def _entries(name: str, lists: Any, tensor: str, idx: str, rows: _Rows, counts: torch.Tensor) -> torch.Tensor:
    """[H, rows, width] of one sequence, out of an index list or of what is laid out like it."""
    entries, end = getattr(lists, tensor), rows.first + rows.number
    if not is_packed(lists):
        return entries[min(rows.sequence, entries.shape[0] - 1)][:, : rows.number]
    offsets, field = lists.cu_block_idx_offsets, "cu_block_idx_offsets"
    if idx == NAMES[3] and lists.cu_full_block_idx_offsets is not None:
        offsets, field = lists.cu_full_block_idx_offsets, "cu_full_block_idx_offsets"
    starts = offsets[:, rows.first : end].long()
    counts, starts = torch.broadcast_tensors(counts.clamp(0, rows.across), starts)
    past = (counts > 0) & ((starts < 0) | (starts + counts > entries.numel()))
    if past.any():
        h, r = past.nonzero()[0].tolist()
        raise ValueError(
            f"{name}.{field}[{h}, {rows.first + r}] = {int(starts[h, r])} with {int(counts[h, r])} entries, expected "
            f"them within the {entries.numel()} of {tensor}"
        )
    longest = max(1, int(counts.max())) if counts.numel() else 1
    place = torch.arange(min(longest, rows.across), device=entries.device)
    at = torch.where(place < counts.unsqueeze(-1), starts.unsqueeze(-1) + place, 0)
    return entries[at] if entries.numel() else at.int()


def _without_plan(lists: Any, num_heads: int, num_heads_kv: int) -> Any:
    """The lists that a plan was made of, once the plan is checked."""
    if lists is None or lists.plan is None:
        return lists
    check_form(lists)
    _check_plan(lists, num_heads_kv if lists.plan_per_group else num_heads)
    check_launch(lists, num_heads, num_heads_kv)
    lists = lists._replace(plan=None, plan_per_group=None)
    if lists.dq_write_order is None:
        return lists
    if lists.mask_block_idx.ndim == 1:
        lists = _as_compact(lists)
    return _by_kind(lists)._replace(spt=None)  # the plan has the launch


def _by_kind(lists: Any) -> Any:
    """Mask and full lists, by rising lock value, of a walk whose entries are ``2 * block + is_full``."""
    cnt, idx, locks = lists.mask_block_cnt, lists.mask_block_idx, lists.dq_write_order
    place = torch.arange(idx.shape[-1], device=idx.device)
    used = place < cnt.unsqueeze(-1)
    mask_first = torch.where(used, idx & 1, 2).argsort(dim=-1, stable=True)
    idx, locks, is_full = (t.gather(-1, mask_first) for t in (idx, locks.expand(idx.shape), used & (idx & 1 == 1)))
    fulls = is_full.sum(-1, dtype=torch.int32)
    masks = cnt - fulls
    shifted = (place + masks.unsqueeze(-1)).clamp(max=max(idx.shape[-1] - 1, 0))
    idx = idx >> 1
    values = (masks, idx, locks, fulls, idx.gather(-1, shifted), locks.gather(-1, shifted))
    return lists._replace(**dict(zip((*NAMES[:2], ORDERS[0], *NAMES[2:], ORDERS[1]), values, strict=True)))


def _as_compact(lists: Any) -> Any:
    """A ragged walk with lock values in rows of equal width."""
    cnt, starts = lists.mask_block_cnt, lists.cu_block_idx_offsets[:, : lists.mask_block_cnt.shape[1]].long()
    cnt, starts = torch.broadcast_tensors(cnt, starts)
    place = torch.arange(max(1, int(cnt.max())) if cnt.numel() else 1, device=cnt.device)
    used = place < cnt.unsqueeze(-1)
    at = starts.unsqueeze(-1) + place
    past = used & ((at < 0) | (at >= lists.mask_block_idx.numel()))
    if past.any():
        h, row, _ = past.nonzero()[0].tolist()
        raise ValueError(
            f"backward cu_block_idx_offsets[{h}, {row}] = {int(starts[h, row])} with {int(cnt[h, row])} entries, "
            f"expected them within the {lists.mask_block_idx.numel()} of mask_block_idx"
        )
    at = torch.where(used, at, 0)
    walks = {name: getattr(lists, name) for name in ("mask_block_idx", "dq_write_order")}
    rows = {name: walk[at] if walk.numel() else at.int() for name, walk in walks.items()}
    return lists._replace(mask_block_cnt=cnt, **rows, cu_block_idx_offsets=None)


def _check_plan(lists: Any, num_heads: int) -> None:
    """Each entry of each key block's walk is in one item of every query head; per group of every key/value head."""
    plan, rows = lists.plan.long(), packed_rows(lists) if is_packed(lists) else None
    batch, head, block, begin, end, _ = plan[:, :6].unbind(-1)
    if rows is not None:  # rows of all sequences as rows of one
        before = lists.cu_total_n_blocks.long()
        sequence = batch.clamp(0, before.numel() - 2)
        behind = block >= before.diff()[sequence]
        wrong = (batch != sequence) | behind
        counts, own_row = rows.rows.total().unsqueeze(0), before[sequence] + block
        batch = torch.zeros_like(batch)
    else:
        wrong, own_row = torch.zeros_like(batch, dtype=torch.bool), block
        counts = lists.mask_block_cnt if lists.full_block_cnt is None else lists.mask_block_cnt + lists.full_block_cnt
    counts = counts.long().repeat_interleave(num_heads // counts.shape[1], dim=1)
    B, H, N = counts.shape
    limits = torch.tensor([B, H, N], device=plan.device)
    place = torch.stack([batch, head, own_row], dim=-1)
    wrong |= ((place < 0) | (place >= limits)).any(-1) | (block < 0) | (begin < 0) | (begin > end)
    row = ((batch * H + head) * N + own_row).clamp(0, counts.numel() - 1)
    wrong |= end > counts.flatten()[row]
    if lists.mask_block_idx.ndim == 1:
        starts = rows.rows.starts[0].repeat_interleave(num_heads // rows.rows.heads, dim=0)
        low, high = plan[:, 6] & 0xFFFFFFFF, plan[:, 7]
        wrong |= (end > begin) & (starts.flatten()[row] != ((high << 32) | low))
    wrong &= plan.any(-1)  # what a plan has room for beyond its items is zeros
    if wrong.any():
        at = int(wrong.int().argmax())
        raise ValueError(
            f"backward plan[{at}] = {lists.plan[at].tolist()}, expected batch, head and key block within "
            f"{[B, H, N]} and entries within what the key block lists"
        )
    planned = torch.zeros(counts.numel() + 1, dtype=torch.long, device=plan.device)
    planned.scatter_add_(0, row, end - begin)
    short = planned[:-1] != counts.flatten()
    # Stretches of one walk that begin elsewhere than the one before ends overlap, or leave a gap.
    used = end > begin
    order = (row * (int(end.max()) + 1) + begin)[used].argsort()
    row, begin, end = (t[used][order] for t in (row, begin, end))
    same = torch.nn.functional.pad(row.diff() == 0, (1, 0)) if row.numel() else row.bool()
    short[row[begin != end.roll(1).where(same, 0)]] = True
    if short.any():
        at = int(short.int().argmax())
        raise ValueError(
            f"backward plan deals out {int(planned[at])} entries of key block {at % N} for batch {at // (H * N)} and "
            f"head {at // N % H}, expected the {int(counts.flatten()[at])} that it lists, each once"
        )
