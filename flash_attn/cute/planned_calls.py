"""What a call of block-sparse backward asks of a plan, and where a plan for SM100 launches key blocks. PyTorch only."""

from typing import Any

import torch

from flash_attn.cute.ordered_lists import SM90
from flash_attn.cute.packed_entries import is_packed


def check_plan(lists: Any, arch: int, *, deterministic: bool, batch: int, varlen_k: bool, packed_k: bool) -> None:
    """Refuse what a plan (see `backward_plan.plan_backward`) cannot do in a call.

    Args:
        lists: backward lists as the caller gave them.
        batch: sequences of the call.
        varlen_k: whether sequences may have fewer keys than padded lists have rows for.
        packed_k: whether they lie one after the other, too.

    Raises:
        NotImplementedError: the plan was made for another architecture; or padded lists, which may have rows past a
            sequence's end: of packed sequences on SM90, where a plan launches those rows, and of any with
            ``deterministic=True`` on SM100, where no CTA passes on their lock values.
        ValueError: padded lists, and so their plan, of another number of sequences; or see `check_form`.
    """
    if lists.plan is None:
        return
    check_form(lists)
    sm90, padded = arch // 10 == SM90, not is_packed(lists)
    if sm90 == bool(lists.plan_whole):
        made = "SM100, which walks lists whole" if lists.plan_whole else "SM90, which may cut walks and joins lists"
        raise NotImplementedError(
            f"block_sparse_tensors.plan on sm_{arch}: it was made for {made}; plan_backward(..., arch={arch}) makes one"
        )
    if padded and (packed_k if sm90 else varlen_k and deterministic):
        mode = "" if sm90 else "deterministic=True and "
        raise NotImplementedError(
            f"{mode}a plan of padded lists for sequences of varying length on sm_{arch}: give compact lists, "
            "[H, rows, n], or ragged ones, [L]"
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


def launch_places(lists: Any) -> torch.Tensor:
    """For each row of each query head which one of that head is launched, integers [Hq, rows].

    Rows are those of all sequences, one after the other. The plan in `lists` is one for SM100, with an item for each.
    """
    plan, (B, N) = lists.plan, (1, lists.mask_block_cnt.shape[-1])
    row = plan.select(1, 2).long()
    if is_packed(lists):
        row = row + lists.cu_total_n_blocks.long().index_select(0, plan.select(1, 0))
    else:
        B = lists.mask_block_cnt.shape[0]
    by_head = row.view(B, -1, N).argsort(dim=-1)  # of a permutation: its inverse
    return (by_head + torch.arange(B, device=plan.device).view(B, 1, 1) * N).transpose(0, 1).flatten(1)
