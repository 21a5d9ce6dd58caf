"""Block lists of packed sequences: checks, and conversion of all forms to the one that kernels read.

Rows of all sequences are concatenated. A caller's lists have one of four forms, distinguished by their ranks:

    padded    counts [B, H, rows], entries [B, H, rows, n]
    compact   counts [H, total rows], entries [H, total rows, n]
    stacked   counts [H, total rows], entries [H, L]: a row has an entry for each block of its sequence
    ragged    counts [H, total rows], entries [L], and [H, total rows] offsets of the rows (CSR)

Kernels read padded and ragged ones; `as_ragged` makes ragged lists of the others without copying entries. Errors that
upstream raises too have its messages, which programs match on. Nothing here reads the values of a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from flash_attn.cute.lists import entries as list_entries
from flash_attn.cute.lists.entries import LIST_KINDS, LISTS, ORDERS, STARTS, ListKind

if TYPE_CHECKING:  # which imports this module
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

MOST_IN_SHAPE = 2**31 - 1
LAUNCHED = (
    *LISTS, "cu_total_m_blocks", STARTS[0], *ORDERS, "cu_total_n_blocks", STARTS[1], "plan",
    "mask_block_bits",
)  # fmt: skip
FORMS = {(3, 4): "padded", (2, 3): "compact", (2, 2): "stacked", (2, 1): "ragged"}


@dataclass(frozen=True)
class Direction:
    """Forward or backward lists: which side, queries or keys, has the rows; entries are of the other one."""

    argument: str
    rows_before: str  # the field with the number of rows before each sequence
    side: int  # of block_size, and of the lengths: 0 queries, 1 keys


FORWARD = Direction("block_sparse_tensors", "cu_total_m_blocks", 0)
BACKWARD = Direction("block_sparse_tensors_bwd", "cu_total_n_blocks", 1)


@dataclass(frozen=True)
class Packing:
    """The lengths of a call's sequences, each a pair for (queries, keys)."""

    starts: tuple[torch.Tensor | None, torch.Tensor | None]  # cu_seqlens [B + 1], or None
    used: tuple[torch.Tensor | None, torch.Tensor | None]  # seqused [B], or None
    longest: tuple[int | None, int | None]  # the largest, where the host knows it

    def varies(self, side: int) -> bool:
        """True if lengths on this side may differ between sequences."""
        return self.starts[side] is not None or self.used[side] is not None

    def lengths(self, side: int) -> torch.Tensor | None:
        """[B]; None if all sequences have the length of the tensors."""
        if self.used[side] is not None:
            return self.used[side]
        return None if self.starts[side] is None else self.starts[side].diff()


def packing(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k) -> Packing | None:
    """The lengths of packed sequences; None where neither side is packed."""
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return None
    longest = tuple(m if isinstance(m, int) else None for m in (max_seqlen_q, max_seqlen_k))
    return Packing((cu_seqlens_q, cu_seqlens_k), (seqused_q, seqused_k), longest)


def fit(
    tensors: BlockSparseTensorsTorch,
    direction: Direction,
    packed: Packing | None,
    *,
    batch: int,
    heads: int,
    block_size: tuple[int, int],
    across: int,
    on_gpu: bool = True,
) -> BlockSparseTensorsTorch:
    """Check lists, and return them padded or ragged, with every broadcast dimension expanded.

    block_size: (queries, keys) of a block. across: length of every sequence in the direction that rows list, unless
    `packed` has it. on_gpu: refuse lists on the CPU; all tensors have to be on one device in any case.
    """
    name, other = direction.argument, 1 - direction.side
    form, block = _form(name, tensors), block_size[direction.side]
    if on_gpu and not tensors.mask_block_cnt.is_cuda:
        device = tensors.mask_block_cnt.device
        raise ValueError(f"mask_block tensors must live on CUDA: {name}.mask_block_cnt is on {device}")
    lead = (batch, heads) if form == "padded" else (heads,)
    rows = tensors.mask_block_cnt.shape[-1]
    longest = packed.longest[direction.side] if packed is not None else None
    if form == "padded" and longest is not None and rows * block < longest:
        raise ValueError(f"{name}.mask_block_cnt has {rows} rows of {block} tokens, but a sequence has {longest}")
    fitted = {}
    for kind in LIST_KINDS:
        fitted |= _fit_pair(name, tensors, kind, form, (*lead, rows))
    for kind in LIST_KINDS:
        fitted[kind.order] = _fit_order(name, kind.order, getattr(tensors, kind.order), fitted[kind.idx])
    if tensors.mask_block_bits is not None:
        fitted["mask_block_bits"] = tensors.mask_block_bits.expand(*fitted["mask_block_idx"].shape, -1)
    if tensors.spt is not None and not isinstance(tensors.spt, bool):
        raise ValueError(f"spt must be a bool when provided: {name}.spt is {tensors.spt!r}")
    if tensors.spt is not None and tensors.dq_write_order is None:
        raise ValueError(f"spt requires dq_write_order to be provided: {name}.spt is {tensors.spt}")
    if form != "padded":
        _need_starts(direction, tensors, direction.rows_before, batch)
    varies = packed is not None and packed.varies(other)
    if form == "stacked" and (varies or tensors.cu_block_idx_offsets is not None):
        when = f"with cu_seqlens_{'qk'[other]} or seqused_{'qk'[other]} "
        _need_starts(direction, tensors, "cu_block_idx_offsets", batch, when)
    if form == "ragged":
        for field in STARTS:
            if field == STARTS[0] or getattr(tensors, field) is not None:
                fitted[field] = _fit_row_offsets(name, tensors, field, heads, rows)
    tensors = tensors._replace(**fitted)
    if form == "padded":
        return tensors
    before = None
    if form == "stacked":
        device = tensors.mask_block_cnt.device
        before = blocks_before(packed, other, block_size[other], across, batch=batch, device=device)
    return _addressable(as_ragged(tensors, direction.rows_before, before))


def fit_forward(
    tensors: BlockSparseTensorsTorch,
    packed: Packing | None,
    *,
    batch: int,
    heads: int,
    tile_q: int,
    block_k: int,
    seqlen_k: int,
):
    """The fitted forward lists, and the number of the kernel's query tiles (of `tile_q`) per block."""
    block_q = tile_q if tensors.block_size is None else tensors.block_size[0]
    if block_q <= 0 or block_q % tile_q:
        raise ValueError(
            f"Varlen block sparsity requires sparse_block_size[0]={tile_q} (= q_stage * tile_m), or a multiple of it; "
            f"got {block_q}."
        )
    if tensors.block_size is None and tensors.mask_block_cnt.ndim == 3:
        raise ValueError("block_sparse_tensors.block_size is None: padded lists of packed sequences need it")
    size = (block_q, block_k)
    fitted = fit(tensors, FORWARD, packed, batch=batch, heads=heads, block_size=size, across=seqlen_k)
    return fitted, block_q // tile_q


def as_ragged(
    tensors: BlockSparseTensorsTorch, rows_before: str, across: torch.Tensor | None = None
) -> BlockSparseTensorsTorch:
    """Packed lists as ragged ones: offsets of rows are computed, and entries are not copied.

    rows_before: field with the number of rows before each sequence, integers [B + 1], or [B]. across: integers [B + 1],
    blocks before each sequence in the direction that rows list. Stacked lists need it: their rows have capacity for all
    blocks of their sequence.
    """
    if tensors.mask_block_bits is not None:
        idx, bits = tensors.mask_block_idx.contiguous(), tensors.mask_block_bits.contiguous().flatten(0, -2)
        tensors = tensors._replace(mask_block_idx=idx, mask_block_bits=bits)
    if tensors.mask_block_idx.ndim == 1:
        return tensors
    first = _stacked_starts(tensors, rows_before, across) if tensors.mask_block_idx.ndim == 2 else None
    changed: dict[str, torch.Tensor | None] = {}
    for _, _, idx_field, order_field, starts_field in LIST_KINDS:
        idx, order = getattr(tensors, idx_field), getattr(tensors, order_field)
        if idx is None:
            changed[starts_field] = None
            continue
        if order is not None:
            idx, order = torch.broadcast_tensors(idx, order)
        if idx.stride(-1) != 1 or (order is not None and order.stride() != idx.stride()):
            idx, order = idx.contiguous(), order if order is None else order.contiguous()
        changed[starts_field] = _starts(idx, first)
        changed |= {idx_field: _flat(idx), order_field: order if order is None else _flat(order)}
    return tensors._replace(**changed)


def _starts(idx: torch.Tensor, first: torch.Tensor | None) -> torch.Tensor:
    """int64 [H, rows], offsets of the rows of compact or stacked indices. first: [rows], those of one stacked head."""
    heads, rows, apart = idx.shape[0], idx.shape[1], idx.stride(1)
    if first is None:
        if heads > 1 and idx.stride(0) == rows * apart > 0:  # contiguous, as most are: one launch
            return torch.arange(0, heads * rows * apart, apart, device=idx.device).view(heads, rows)
        first = torch.arange(rows, device=idx.device) * apart
    if heads == 1 or idx.stride(0) == 0:
        return first.expand(heads, -1)
    return first + torch.arange(heads, device=idx.device).unsqueeze(1) * idx.stride(0)


def _addressable(tensors: BlockSparseTensorsTorch) -> BlockSparseTensorsTorch:
    """Cap the length of flat entries at a 32-bit shape: kernels address them by int64 offsets and ignore the shape."""
    fields = (*(name for kind in LIST_KINDS for name in (kind.idx, kind.order)), "mask_block_bits")
    given = {name: getattr(tensors, name) for name in fields}
    longer = {name: t for name, t in given.items() if t is not None and t.shape[0] > MOST_IN_SHAPE}
    return tensors._replace(**{name: t.narrow(0, 0, MOST_IN_SHAPE) for name, t in longer.items()})


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A flat view of a tensor's memory: element (i, j) is at i * stride(0) + j."""
    if tensor.numel() == 0:
        return tensor.reshape(-1)
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.as_strided((length,), (1,))


def _stacked_starts(tensors: BlockSparseTensorsTorch, rows_before: str, across: torch.Tensor | None) -> torch.Tensor:
    """int64 [rows]: offsets of the rows of one head of stacked lists."""
    if across is None:
        side = "m" if rows_before == BACKWARD.rows_before else "n"
        raise ValueError(
            f"cu_total_{side}_blocks is None: rows of stacked lists, [H, L], are as wide as their sequence has blocks "
            "in the direction that they list"
        )
    row = torch.arange(tensors.mask_block_cnt.shape[1], device=tensors.mask_block_cnt.device)
    widths = across.long().diff()
    sequences = widths.shape[0]
    before = getattr(tensors, rows_before).long().narrow(0, 0, sequences)
    offsets = tensors.cu_block_idx_offsets
    if offsets is None:  # rows of all sequences are contiguous
        capacity = before.diff() * widths.narrow(0, 0, sequences - 1)
        offsets = torch.nn.functional.pad(capacity.cumsum(0), (1, 0))
    sequence = sequence_of_row(before, row)
    first, start, width = (t.long().index_select(0, sequence) for t in (before, offsets, widths))
    return start + (row - first) * width


def sequence_of_row(before: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Index of the sequence of each row. before: [B], number of rows before each sequence."""
    return (torch.searchsorted(before, row, right=True, out_int32=before.dtype == torch.int32) - 1).clamp(min=0)


def launch_arguments(tensors: BlockSparseTensorsTorch | None):
    """The arguments of a compiled kernel, in the order of BlockSparseTensors; None without lists."""
    return None if tensors is None else tuple(getattr(tensors, field) for field in LAUNCHED)


def offset_types(tensors: BlockSparseTensorsTorch) -> tuple:
    """Part of the compile key: dtypes and broadcast strides of the offsets, and whether there is a plan."""
    offsets = (tensors.cu_total_m_blocks, tensors.cu_total_n_blocks, *(getattr(tensors, field) for field in STARTS))
    kinds = tuple(None if t is None else (t.dtype, *(stride == 0 for stride in t.stride())) for t in offsets)
    return *kinds, tensors.plan is not None


def cu_total_blocks(cu_seqlens: torch.Tensor, block_size: int) -> torch.Tensor:
    """[B + 1] int32: number of blocks of `block_size` tokens before each packed sequence, and in all.

    With the queries' cu_seqlens this is cu_total_m_blocks, with the keys' cu_total_n_blocks.

    Args:
        cu_seqlens: integers [B + 1], starts of the packed sequences and their total.

    Raises:
        TypeError, ValueError: an argument is bad; the message names it.
    """
    list_entries.integer("block_size", block_size)
    if list_entries.tensor("cu_seqlens", cu_seqlens).ndim != 1 or cu_seqlens.is_floating_point():
        raise ValueError(f"cu_seqlens is {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}, expected integers [B + 1]")
    blocks = (cu_seqlens.diff() + block_size - 1) // block_size
    return torch.nn.functional.pad(blocks.cumsum(0, dtype=torch.int32), (1, 0))


def blocks_before(
    packed: Packing | None, side: int, block: int, seqlen: int, *, batch: int, device: torch.device
) -> torch.Tensor:
    """int64 [B + 1]: number of blocks before each sequence, and in all.

    side: 0 for queries, 1 for keys. block: tokens per block on that side. seqlen: length of each of `batch` sequences,
    unless `packed` has lengths.
    """
    lengths = None if packed is None else packed.lengths(side)
    if lengths is None:
        lengths = torch.full((batch,), seqlen, device=device)
    return torch.nn.functional.pad(((lengths.long() + block - 1) // block).cumsum(0), (1, 0))


def _form(name: str, tensors: BlockSparseTensorsTorch) -> str:
    counts, indices = tensors.mask_block_cnt, tensors.mask_block_idx
    if counts is None or indices is None:
        raise ValueError(f"mask_block_cnt and mask_block_idx must be provided for block sparsity. {name} lacks them")
    form = FORMS.get((counts.ndim, indices.ndim))
    if form is None:
        raise ValueError(
            f"{name}: mask_block_cnt {tuple(counts.shape)} and mask_block_idx {tuple(indices.shape)} are lists of no "
            f"form known: [B, H, rows] and [B, H, rows, n], or [H, total rows] and [H, total rows, n], [H, L] or [L]"
        )
    return form


def _fit_pair(name: str, tensors: BlockSparseTensorsTorch, kind: ListKind, form: str, shape: tuple[int, ...]) -> dict:
    fields = kind.cnt, kind.idx
    counts, indices = (getattr(tensors, field) for field in fields)
    if (counts is None) != (indices is None):
        raise ValueError(f"{fields[0]} and {fields[1]} must both be provided or both be None, in {name}")
    if counts is None:
        return dict.fromkeys(fields)
    for field, tensor in zip(fields, (counts, indices)):
        _check(name, f"{kind.name}_block tensors", field, tensor, tensors.mask_block_cnt.device, (torch.int32,))
    width = indices.shape[-1:]
    if indices.ndim != tensors.mask_block_idx.ndim:
        ranks = f"{indices.ndim} dimensions, mask_block_idx {tensors.mask_block_idx.ndim}"
        raise ValueError(f"{name}.{fields[1]} has {ranks}")
    whole = {"padded": (*shape, *width), "compact": (*shape, *width), "stacked": (shape[0], *width), "ragged": width}
    shared = {"padded": 2, "ragged": 0}.get(form, 1)
    return {
        fields[0]: _expanded(f"{name}.{fields[0]}", counts, shape, len(shape) - 1),
        fields[1]: _expanded(f"{name}.{fields[1]}", indices, whole[form], shared),
    }


def _fit_order(name: str, field: str, order: torch.Tensor | None, like: torch.Tensor | None) -> torch.Tensor | None:
    if order is None or like is None:  # there is nothing to order
        return None
    _check(name, field, field, order, like.device, (torch.int32,))
    return _expanded(f"{name}.{field}", order, tuple(like.shape), like.ndim - 1)


def _fit_row_offsets(name: str, tensors: BlockSparseTensorsTorch, field: str, heads: int, rows: int) -> torch.Tensor:
    """Offsets of rows, [heads, rows] or [heads, rows + 1] with the end of the last row."""
    offsets = getattr(tensors, field)
    if offsets is None or offsets.ndim != 2 or offsets.shape[1] not in (rows, rows + 1):
        raise ValueError(
            f"{name}.{field} must be [H, {rows}] or [H, {rows + 1}] for entries of one dimension, got "
            f"{None if offsets is None else tuple(offsets.shape)}"
        )
    _check(name, field, field, offsets, tensors.mask_block_cnt.device, (torch.int32, torch.int64))
    return _expanded(f"{name}.{field}", offsets, (heads, offsets.shape[1]), 1)


def _need_starts(direction: Direction, lists: BlockSparseTensorsTorch, field: str, batch: int, when: str = "") -> None:
    """Check the starts of sequences, [B + 1]. Kernels read the first B, so forward's may have any length from B on."""
    name, tensor = direction.argument, getattr(lists, field)
    if tensor is None:
        raise ValueError(f"Varlen block sparsity {when}requires {name}.{field}, with shape ({batch + 1},); got None")
    fits = tensor.shape[0] >= batch if direction is FORWARD and tensor.ndim == 1 else tensor.shape == (batch + 1,)
    if not fits:
        raise ValueError(f"{name}.{field} must have shape ({batch + 1},), got {tuple(tensor.shape)}")
    _check(name, field, field, tensor, lists.mask_block_cnt.device, (torch.int32, torch.int64))


def _check(
    name: str, what: str, field: str, tensor: torch.Tensor, device: torch.device, dtypes: tuple[torch.dtype, ...]
) -> None:
    if tensor.dtype not in dtypes:
        types = " or ".join(map(str, dtypes))
        raise ValueError(f"{what} must have dtype {types}: {name}.{field} is {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(
            f"{what} must be on the same device as block sparse tensors: {name}.{field} is on {tensor.device}, "
            f"mask_block_cnt on {device}"
        )
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(f"{name}.{field} must be contiguous in its last dimension, got strides {tensor.stride()}")


def _expanded(name: str, tensor: torch.Tensor, shape: tuple[int, ...], shared: int) -> torch.Tensor:
    """The tensor in `shape`; its first `shared` dimensions, of sequences and heads, may be 1."""
    same = [have == want or (have == 1 and at < shared) for at, (have, want) in enumerate(zip(tensor.shape, shape))]
    if tensor.ndim != len(shape) or not all(same):
        share = f"; only the first {shared} of its dimensions may be 1 instead" if shared else ""
        raise ValueError(f"{name} with shape {tensor.shape} cannot be expanded to expected shape {shape}{share}")
    return tensor.expand(shape)
