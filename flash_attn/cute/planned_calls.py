"""Checks of a plan (`backward_plan`) against the call that it comes with. PyTorch only."""

from typing import Any

import torch

from flash_attn.cute.ordered_lists import SM90
from flash_attn.cute.packed_entries import is_packed


def check_plan(lists: Any, arch: int, *, batch: int, packed_k: bool) -> None:
    """Refuse a plan that a call cannot follow.

    Args:
        lists: backward lists as the caller gave them.
        batch: sequences of the call.
        packed_k: whether their keys lie one after the other.

    Raises:
        NotImplementedError: another architecture than SM90; or padded lists of packed sequences, whose rows past a
            sequence's end a plan would launch.
        ValueError: padded lists, and so their plan, of another number of sequences; or see `check_form`.
    """
    if lists.plan is None:
        return
    if arch // 10 != SM90:
        raise NotImplementedError(
            f"block_sparse_tensors.plan on sm_{arch}: only backward on SM90 follows a plan; give the lists without it"
        )
    check_form(lists)
    padded = not is_packed(lists)
    if padded and packed_k:
        raise NotImplementedError(
            "a plan of padded lists for packed sequences: give compact lists, [H, rows, n], or ragged ones, [L]"
        )
    made_for = max(x.shape[0] for x in (lists.mask_block_cnt, lists.full_block_cnt) if x is not None)
    if padded and made_for != batch:
        raise ValueError(
            f"block_sparse_tensors.plan was made of lists for {made_for} sequences, the call has {batch}: expand the "
            "lists before plan_backward"
        )


def check_form(lists: Any) -> None:
    """What tells of a plan, without a look into it, that `plan_backward` did not make it for these lists.

    Raises:
        ValueError: another type, shape or device.
    """
    plan, device = lists.plan, lists.mask_block_idx.device
    columns = 8 if lists.mask_block_idx.ndim == 1 else 6
    fits = plan.ndim == 2 and plan.shape[0] > 0 and plan.shape[1] == columns and plan.stride(1) == 1
    if plan.dtype != torch.int32 or not fits or plan.device != device:
        raise ValueError(
            f"block_sparse_tensors.plan is {plan.dtype} {tuple(plan.shape)} on {plan.device}, expected torch.int32 "
            f"[items, {columns}] on {device}, as plan_backward makes it of these lists"
        )
