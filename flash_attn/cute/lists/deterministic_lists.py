"""Semaphore values in a caller's lists for deterministic backward: checks, and merged lists for SM90."""

from typing import Any, Optional

import torch

from flash_attn.cute.lists.entries import LIST_KINDS
from flash_attn.cute.lists.formats import Packing, blocks_before
from flash_attn.cute.lists.write_order import merged_lists

SM90 = 9  # arch // 10


def prepare(
    lists: Any,
    arch: int,
    deterministic: bool,
    *,
    seqlen_q: Any,
    block_q: int,
    cu_seqlens_q: Optional[torch.Tensor] = None,
    seqused_q: Optional[torch.Tensor] = None,
) -> Any:
    """Check the semaphore values that deterministic backward needs, and merge mask and full blocks for SM90.

    seqlen_q: queries of the longest sequence; a tensor if the host does not know it. block_q: queries of a block.
    cu_seqlens_q, seqused_q: int32 [B + 1] and [B], starts and lengths of packed sequences. None: all have `seqlen_q`.
    """
    if lists.plan is not None:
        if deterministic and lists.dq_write_order is None:
            raise ValueError("deterministic=True needs a plan that was made with plan_backward(deterministic=True)")
        return lists
    if not deterministic:
        return lists
    lists = require_write_order(lists)
    if arch // 10 != SM90:
        return lists
    across = None
    if lists.mask_block_idx.ndim == 2 and lists.cu_total_n_blocks is not None:
        lengths = Packing((cu_seqlens_q, None), (seqused_q, None), (None, None))
        batch, device = lists.cu_total_n_blocks.shape[0] - 1, lists.mask_block_cnt.device
        across = blocks_before(lengths, 0, block_q, seqlen_q, batch=batch, device=device)
    num_q_blocks = None if isinstance(seqlen_q, torch.Tensor) else -(-seqlen_q // block_q)
    return merged_lists(lists, descending=not lists.spt, num_q_blocks=num_q_blocks, cu_total_m_blocks=across)


def require_write_order(lists: Any) -> Any:
    """Check semaphore values, and expand them and the index lists to one shape.

    Errors that upstream raises too have its messages: programs match on them.
    """
    if lists.mask_block_cnt is None or lists.mask_block_idx is None:
        raise ValueError("mask_block_cnt and mask_block_idx must be provided for block sparsity.")
    changed: dict[str, Optional[torch.Tensor]] = {}
    for _, _, idx_name, name, _ in LIST_KINDS:
        order, idx = getattr(lists, name), getattr(lists, idx_name)
        if idx is None:
            changed[name] = None
        elif order is None:
            raise ValueError(_missing(name, idx_name, lists.spt))
        else:
            changed |= zip((name, idx_name), _fitted(name, order, idx), strict=True)
    if lists.spt is None:
        raise ValueError(
            "deterministic block-sparse backward requires block_sparse_tensors.spt to match dq_write_order direction: "
            "True where key blocks are launched from the right, False from the left; got spt=None"
        )
    if not isinstance(lists.spt, bool):
        raise ValueError(f"spt must be a bool when provided, got spt={lists.spt!r}")
    return lists._replace(**changed)


def _missing(name: str, idx_name: str, spt: Any) -> str:
    where = "in block_sparse_tensors" if name == "dq_write_order" else "when full blocks are present"
    also = "" if spt is None else "; spt requires dq_write_order to be provided"
    return (
        f"deterministic block-sparse backward requires {name} {where}: for each entry of {idx_name} how many key "
        f"blocks add to the same query block's dq first; compute_dq_write_order gives it{also}"
    )


def _fitted(name: str, order: torch.Tensor, idx: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Semaphore values and their indices, expanded to one shape."""
    if order.dtype != torch.int32:
        raise ValueError(f"{name} must have dtype torch.int32, got {order.dtype}")
    if order.device != idx.device:
        raise ValueError(f"{name} must be on the same device as block sparse tensors, {idx.device}, got {order.device}")
    fits = order.ndim == idx.ndim and order.shape[-1] == idx.shape[-1]
    leading = idx.ndim - 2  # dimensions for batch and head; stacked and ragged lists have none of their own
    if not fits or any(
        have != want and have != 1 and (want != 1 or at >= leading)
        for at, (have, want) in enumerate(zip(order.shape, idx.shape, strict=True))
    ):
        raise ValueError(
            f"{name} with shape {order.shape} cannot be expanded to expected shape {tuple(idx.shape)}, that of the "
            "index list"
        )
    shape = torch.broadcast_shapes(order.shape, idx.shape)
    return order.expand(shape), idx.expand(shape)
