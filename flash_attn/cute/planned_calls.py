"""What a call of block-sparse backward asks of a plan, and where a plan for SM100 launches key blocks. PyTorch only."""

from typing import Any

import torch

from flash_attn.cute.packed_entries import is_packed

SM90 = 9  # arch // 10


def check_plan(lists: Any, arch: int, *, deterministic: bool, batch: int, varlen_k: bool) -> None:
    """Refuse what a plan (see `backward_plan.plan_backward`) cannot do in a call.

    Args:
        lists: backward lists as the caller gave them.
        batch: sequences of the call.
        varlen_k: whether sequences may have fewer keys than padded lists have rows for.

    Raises:
        NotImplementedError: the plan was made for another architecture; or ``deterministic=True`` on SM100 with padded
            lists of packed sequences, whose rows past a sequence's end have lock values that no CTA passes on.
        ValueError: padded lists, and so their plan, of another number of sequences.
    """
    if lists.plan is None:
        return
    sm90, padded = arch // 10 == SM90, not is_packed(lists)
    if sm90 == bool(lists.plan_whole):
        made = "SM100, which walks lists whole" if lists.plan_whole else "SM90, which may cut walks and joins lists"
        raise NotImplementedError(
            f"block_sparse_tensors.plan on sm_{arch}: it was made for {made}; plan_backward(..., arch={arch}) makes one"
        )
    if padded and lists.mask_block_cnt.shape[0] != batch:
        raise ValueError(
            f"block_sparse_tensors.plan was made of lists for {lists.mask_block_cnt.shape[0]} sequences, the call has "
            f"{batch}: expand the lists before plan_backward"
        )
    if padded and varlen_k and deterministic and not sm90:
        raise NotImplementedError(
            f"deterministic=True on sm_{arch} with a plan of padded lists for sequences of varying length: give "
            "compact lists, [H, rows, n], or ragged ones, [L]"
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
