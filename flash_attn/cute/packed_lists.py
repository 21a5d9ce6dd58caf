"""Block lists of packed sequences: what a call may bring, checked and expanded before anything is launched.

What upstream refuses as well is refused in its words, followed by the argument and its value: programs match on them.
`list_rows` says which forms there are. Nothing here looks at the values in a tensor: a check that
waits for the device would keep the call out of a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from flash_attn.cute import list_arguments

if TYPE_CHECKING:  # which imports this module
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

FORMS = {(3, 4): "padded", (2, 3): "compact", (2, 2): "stacked", (2, 1): "ragged"}


@dataclass(frozen=True)
class Direction:
    """What is a row and what an entry, forward or backward."""

    argument: str
    rows_before: str  # the field with the number of rows before each sequence
    side: int  # of block_size, and of the lengths: 0 queries, 1 keys


FORWARD = Direction("block_sparse_tensors", "cu_total_m_blocks", 0)
BACKWARD = Direction("block_sparse_tensors_bwd", "cu_total_n_blocks", 1)


@dataclass(frozen=True)
class Packing:
    """Which lengths differ between sequences, and the largest (queries, keys) where the host knows it."""

    varies: tuple[bool, bool]
    longest: tuple[int | None, int | None]


def packing(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k) -> Packing | None:
    """None where the sequences are not packed: they have lists [B, H, rows, n] of the tensors' own lengths."""
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return None
    varies = tuple(a is not None or b is not None for a, b in ((cu_seqlens_q, seqused_q), (cu_seqlens_k, seqused_k)))
    return Packing(varies, tuple(m if isinstance(m, int) else None for m in (max_seqlen_q, max_seqlen_k)))


def fit(
    tensors: BlockSparseTensorsTorch,
    direction: Direction,
    packed: Packing | None,
    *,
    batch: int,
    heads: int,
    block: int,
) -> BlockSparseTensorsTorch:
    """The lists with every broadcast dimension expanded.

    block: tokens in the block that a row stands for.

    Raises:
        ValueError: a form, shape, dtype or device that does not fit, or an offset that is missing.
    """
    name = direction.argument
    form = _form(name, tensors)
    lead = (batch, heads) if form == "padded" else (heads,)
    rows = tensors.mask_block_cnt.shape[-1]
    longest = packed.longest[direction.side] if packed is not None else None
    if form == "padded" and longest is not None and rows * block < longest:
        raise ValueError(
            f"{name}.mask_block_cnt has {rows} rows of {block} tokens a sequence, but the longest has {longest}"
        )
    fitted = {}
    for kind in ("mask", "full"):
        fitted |= _fit_pair(name, tensors, kind, form, (*lead, rows))
    for field, like in (("dq_write_order", "mask_block_idx"), ("dq_write_order_full", "full_block_idx")):
        fitted[field] = _fit_order(name, field, getattr(tensors, field), fitted[like])
    if tensors.spt is not None and not isinstance(tensors.spt, bool):
        raise ValueError(f"spt must be a bool when provided: {name}.spt is {tensors.spt!r}")
    if tensors.spt is not None and tensors.dq_write_order is None:
        raise ValueError(f"spt requires dq_write_order to be provided: {name}.spt is {tensors.spt}")
    if form != "padded":
        _need_starts(direction, tensors, direction.rows_before, batch)
    across_varies = packed is not None and packed.varies[1 - direction.side]
    if form == "stacked" and (across_varies or tensors.cu_block_idx_offsets is not None):
        across = "qk"[1 - direction.side]
        when = f"with cu_seqlens_{across} or seqused_{across} "
        _need_starts(direction, tensors, "cu_block_idx_offsets", batch, when)
    if form == "ragged":
        for field in ("cu_block_idx_offsets", "cu_full_block_idx_offsets"):
            if field == "cu_block_idx_offsets" or getattr(tensors, field) is not None:
                fitted[field] = _fit_row_offsets(name, tensors, field, heads, rows)
    return tensors._replace(**fitted)


def fit_forward(tensors: BlockSparseTensorsTorch, packed: Packing | None, *, batch: int, heads: int, tile_q: int):
    """The fitted forward lists, and how many of the kernel's query tiles (of `tile_q`) make one of their blocks."""
    block_q = tile_q if tensors.block_size is None else tensors.block_size[0]
    if block_q <= 0 or block_q % tile_q:
        raise ValueError(
            f"Varlen block sparsity requires sparse_block_size[0]={tile_q} (= q_stage * tile_m), or a multiple of it; "
            f"got {block_q}."
        )
    if tensors.block_size is None and tensors.mask_block_cnt.ndim == 3:
        raise ValueError("block_sparse_tensors.block_size is None: padded lists of packed sequences need it")
    fitted = fit(tensors, FORWARD, packed, batch=batch, heads=heads, block=block_q)
    return fitted, block_q // tile_q


def fit_backward(tensors: BlockSparseTensorsTorch, packed: Packing | None, *, batch: int, heads: int, block_k: int):
    return fit(tensors, BACKWARD, packed, batch=batch, heads=heads, block=block_k)


def launch_arguments(tensors: BlockSparseTensorsTorch | None):
    """What a compiled kernel takes, in the order of BlockSparseTensors; None without lists."""
    if tensors is None:
        return None
    return (
        tensors.mask_block_cnt,
        tensors.mask_block_idx,
        tensors.full_block_cnt,
        tensors.full_block_idx,
        tensors.cu_total_m_blocks,
        tensors.cu_block_idx_offsets,
        tensors.dq_write_order,
        tensors.dq_write_order_full,
        tensors.cu_total_n_blocks,
        tensors.cu_full_block_idx_offsets,
        tensors.plan,
    )


def offset_types(tensors: BlockSparseTensorsTorch) -> tuple:
    """What compiled code depends on in the offsets: part of the compile key."""
    offsets = (
        tensors.cu_total_m_blocks,
        tensors.cu_total_n_blocks,
        tensors.cu_block_idx_offsets,
        tensors.cu_full_block_idx_offsets,
    )
    kinds = tuple(None if t is None else (t.dtype, *(stride == 0 for stride in t.stride())) for t in offsets)
    return *kinds, tensors.plan is not None


def cu_total_blocks(cu_seqlens: torch.Tensor, block_size: int) -> torch.Tensor:
    """[B + 1] int32: how many blocks of `block_size` tokens the sequences before each one have.

    With the queries' cu_seqlens this is cu_total_m_blocks, with the keys' cu_total_n_blocks.
    """
    list_arguments.integer("block_size", block_size)
    if list_arguments.tensor("cu_seqlens", cu_seqlens).ndim != 1 or cu_seqlens.is_floating_point():
        raise ValueError(f"cu_seqlens is {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}, expected integers [B + 1]")
    blocks = (cu_seqlens.diff() + block_size - 1) // block_size
    return torch.nn.functional.pad(blocks.cumsum(0, dtype=torch.int32), (1, 0))


def blocks_across(
    tensors: BlockSparseTensorsTorch,
    block: int,
    *,
    seqlen: int,
    cu_seqlens: torch.Tensor | None,
    seqused: torch.Tensor | None,
) -> torch.Tensor | None:
    """int64 [B + 1]: blocks of all sequences before each one, in the direction that rows list; how wide rows are.

    As the kernels count them. None for lists that are not stacked, which do not need it.

    Args:
        block: tokens of a block in that direction.
        seqlen: of every sequence, where neither `cu_seqlens` nor `seqused` says.
    """
    if FORMS.get((tensors.mask_block_cnt.ndim, tensors.mask_block_idx.ndim)) != "stacked":
        return None
    if seqused is None and cu_seqlens is None:
        before = tensors.cu_total_m_blocks if tensors.cu_total_n_blocks is None else tensors.cu_total_n_blocks
        lengths = torch.full_like(before.narrow(0, 1, before.shape[0] - 1), seqlen)
    else:
        lengths = cu_seqlens.diff() if seqused is None else seqused
    blocks = (lengths.long() + block - 1) // block
    return torch.nn.functional.pad(blocks.cumsum(0), (1, 0))


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


def _fit_pair(name: str, tensors: BlockSparseTensorsTorch, kind: str, form: str, shape: tuple[int, ...]) -> dict:
    fields = f"{kind}_block_cnt", f"{kind}_block_idx"
    counts, indices = (getattr(tensors, field) for field in fields)
    if (counts is None) != (indices is None):
        raise ValueError(f"{fields[0]} and {fields[1]} must both be provided or both be None, in {name}")
    if counts is None:
        return dict.fromkeys(fields)
    for field, tensor in zip(fields, (counts, indices)):
        _check(name, f"{kind}_block tensors", field, tensor, tensors.mask_block_cnt.device, (torch.int32,))
    width = indices.shape[-1:]
    if indices.ndim != tensors.mask_block_idx.ndim:
        raise ValueError(
            f"{name}.{fields[1]} has {indices.ndim} dimensions, mask_block_idx {tensors.mask_block_idx.ndim}"
        )
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
    """[heads, rows] out of one start a row; a last one, where the last row ends, may stand behind them."""
    offsets = getattr(tensors, field)
    if offsets is None or offsets.ndim != 2 or offsets.shape[1] not in (rows, rows + 1):
        raise ValueError(
            f"{name}.{field} has to be [H, {rows}] or [H, {rows + 1}] for entries of one dimension, got "
            f"{None if offsets is None else tuple(offsets.shape)}"
        )
    _check(name, field, field, offsets, tensors.mask_block_cnt.device, (torch.int32, torch.int64))
    return _expanded(f"{name}.{field}", offsets, (heads, offsets.shape[1]), 1)


def _need_starts(
    direction: Direction, tensors: BlockSparseTensorsTorch, field: str, batch: int, when: str = ""
) -> None:
    """[B + 1], where sequences start. Kernels read the first B; backward lists are also taken apart by their shape."""
    name, tensor = direction.argument, getattr(tensors, field)
    if tensor is None:
        raise ValueError(f"Varlen block sparsity {when}requires {name}.{field}, with shape ({batch + 1},); got None")
    fits = tensor.shape[0] >= batch if direction is FORWARD and tensor.ndim == 1 else tensor.shape == (batch + 1,)
    if not fits:
        raise ValueError(f"{name}.{field} has to have shape ({batch + 1},), got {tuple(tensor.shape)}")
    _check(name, field, field, tensor, tensors.mask_block_cnt.device, (torch.int32, torch.int64))


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
    if not tensor.is_cuda:
        raise ValueError(f"{what} must live on CUDA: {name}.{field} is on {tensor.device}")
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(f"{name}.{field} has to be contiguous in its last dimension, got strides {tensor.stride()}")


def _expanded(name: str, tensor: torch.Tensor, shape: tuple[int, ...], shared: int) -> torch.Tensor:
    """The tensor in `shape`; its first `shared` dimensions, of sequences and heads, may be 1."""
    same = [have == want or (have == 1 and at < shared) for at, (have, want) in enumerate(zip(tensor.shape, shape))]
    if tensor.ndim != len(shape) or not all(same):
        share = f"; only the first {shared} of its dimensions may be 1 instead" if shared else ""
        raise ValueError(f"{name} with shape {tensor.shape} cannot be expanded to expected shape {shape}{share}")
    return tensor.expand(shape)
