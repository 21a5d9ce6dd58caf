"""The block lists of an attention call: in each of the forms that the kernels take, of either direction, ordered or
planned.

Packed, "padded" is [B, H, rows of the longest, n]; "shared" the same with one list for all sequences; "compact" [H,
rows of all, n]; "stacked" [H, L], upstream's; "ragged" [L], with a start for every row.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from random import Random
from typing import Any
from unittest.mock import patch

import torch
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fuzz.blocks import Table, each_tensor, lists_of_rows, pattern_table, rows_of
from fuzz.case import Attention, Blocks

EVERY = slice(None)
Tables = list[tuple[Table, Table]]  # of each sequence, bool [heads, M, N]: listed, and full


def block(case: Attention) -> tuple[int, int]:
    if case.block is None:
        from flash_attn.cute.interface import _get_device_arch

        return (256 if _get_device_arch() // 10 == 10 else 128) * case.q_tiles, 128
    return case.block[0] * case.q_tiles, case.block[1]


def blocks(case: Attention, side: int) -> list[int]:
    """Blocks of queries, or of keys, that each sequence's lists are for."""
    tokens = [pair[side] for pair in case.lengths]
    if case.form == "shared":
        tokens = [max(tokens)] * len(tokens)
    return [-(-T // block(case)[side]) for T in tokens]


def tables(case: Attention) -> Tables:
    return _tables(case, tuple(blocks(case, 0)), tuple(blocks(case, 1)))


@lru_cache(maxsize=8)
def _tables(case: Attention, rows: tuple[int, ...], columns: tuple[int, ...]) -> Tables:
    """A pattern, or three of four blocks, and the one in which the keys end; of "both" kinds some are full.

    With form "shared" the longest sequence's lists serve all, so that shorter ones have blocks listed that they do not
    hold.
    """
    found: Tables = []
    draw = Random(case.seed)
    for b, (M, N) in enumerate(zip(rows, columns)):
        if found and case.form == "shared":
            found.append(found[0])
            continue
        h, m, n = torch.meshgrid(*map(torch.arange, (case.list_heads, M, N)), indexing="ij")
        rank = b + 2 * h + m + n
        listed, chosen = (rank % 4 != 3) | (n == N - 1), (rank + h) % 2 == 0
        if case.pattern != "three of four":
            listed = torch.stack(
                [pattern_table(case.pattern, M, N, case.density, draw) for _ in range(case.list_heads)]
            )
            chosen = torch.tensor([draw.random() < case.full for _ in range(listed.numel())]).bool().view(listed.shape)
        full = {"both": chosen, "full": listed}.get(case.lists, torch.zeros_like(listed))
        found.append((listed, listed & full))
    return found


def lists_of(case: Attention, given: Tables, backward: bool, only: slice = EVERY) -> Any:
    """Lists on the CPU, of all sequences or of those that `only` says."""
    draw, across = Random(case.seed) if case.shuffle else None, blocks(case, 0 if backward else 1)
    kinds = {"mask": [listed & ~full for listed, full in given], "full": [full for _, full in given]}
    if case.lists == "no full":
        del kinds["full"]
    form, only = ("padded", slice(0, 1)) if case.form == "shared" else (case.form, only)
    rows = {
        kind: [[rows_of(t[h].mT if backward else t[h], draw) for t in of][only] for h in range(len(of[0]))]
        for kind, of in kinds.items()
    }
    before = ("cu_total_m_blocks", "cu_total_n_blocks")[backward]
    width = across[0] if not case.packed and case.spare is None else 1
    spare = 0 if case.packed else case.spare or 0
    return lists_of_rows(rows, form, across[only], before, width=width, spare=spare, block_size=block(case))


def sides(case: Attention) -> tuple[Any, Any]:
    """Forward and backward lists, on the CPU."""
    return lists_of(case, tables(case), False), lists_of(case, tables(case), True)


def both_directions(case: Blocks) -> tuple[Any, Any]:
    """Forward lists, and backward lists of the same blocks."""
    heads = case.H if case.repeat else -1
    forward, backward = (each_tensor(lists, lambda t: t.expand(-1, heads, *t.shape[2:])) for lists in sides(case.call))
    return forward, backward


def block_tables(case: Blocks) -> tuple[Table, Table]:
    """Listed blocks, and those of them that are full."""
    listed, full = (torch.stack(kind).expand(-1, case.H, -1, -1) for kind in zip(*tables(case.call)))
    return listed, full


def on_gpu(lists: Any) -> Any:
    return each_tensor(lists, on_device)


def on_device(t: torch.Tensor, device: Any = "cuda") -> torch.Tensor:
    """A copy with the same strides of 0; without values under FakeTensorMode."""
    if active_fake_mode() is not None:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
    own = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in t.stride())
    return t[own].to(device).expand(t.shape)


def forward_lists(case: Attention, only: slice = EVERY, device: Any = "cuda") -> Any:
    """Key blocks of each query block; None where the case has no lists."""
    if case.lists is None:
        return None
    with unset_fake_temporarily():  # fake tensors have no lists in them
        lists = lists_of(case, tables(case), False, only)
    return each_tensor(lists, lambda t: on_device(t, device))


def backward_lists(case: Attention, only: slice = EVERY, device: Any = "cuda") -> Any:
    """The transpose: query blocks of each key block, with what the case's way of launching needs."""
    if case.lists is None:
        return None
    with unset_fake_temporarily():
        lists = lists_of(case, tables(case), True, only)
        if case.plan:
            lists = _planned(case, lists)
        elif case.ordered:
            lists = _ordered(case, lists)
        if case.passes is not None:  # autograd has no argument for it
            lists = lists._replace(passes=case.passes)
    return each_tensor(lists, lambda t: on_device(t, device))


def before(case: Attention) -> torch.Tensor:
    """int32 [B + 1], the query blocks of all sequences before each one."""
    return torch.tensor([0, *accumulate(blocks(case, 0))], dtype=torch.int32)


def _ordered(case: Attention, lists: Any) -> Any:
    """With semaphore values, for deterministic backward in one pass and no plan."""
    from flash_attn.cute.block_lists import packed_write_order
    from flash_attn.cute.lists.write_order import compute_dq_write_order

    spt = case.launch == "right to left"
    if lists.mask_block_cnt.ndim == 2:
        most = max(1, *blocks(case, 0))
        return packed_write_order(lists, num_q_blocks=most, spt=spt, cu_total_m_blocks=before(case))
    forward = lists_of(case, tables(case), False)
    mask, full = compute_dq_write_order(*forward[:4], *lists[:4], spt=spt)
    return lists._replace(dq_write_order=mask, dq_write_order_full=full, spt=spt)


def _planned(case: Attention, lists: Any) -> Any:
    from flash_attn.cute.lists.backward_plan import plan_backward

    M, N = max(1, *blocks(case, 0)), lists.mask_block_cnt.shape[-1]
    schedules = {
        "middle first": lambda: torch.tensor(sorted(range(N), key=lambda n: abs(n - N // 2))),
        "shuffled": lambda: torch.randperm(N, generator=torch.Generator().manual_seed(case.seed)),
    }
    return plan_backward(
        lists, num_heads=case.Hq, num_heads_kv=case.Hkv, num_q_blocks=M, listed=None if case.packed else M * N,
        deterministic=case.ordered, schedule=schedules.get(case.launch, lambda: case.launch)(), longest=case.plan,
        per_group=case.per_group, cu_total_m_blocks=before(case) if case.form == "stacked" else None,
    )  # fmt: skip


def in_two_passes(case: Attention) -> bool:
    """True if SM90 backward takes two passes over the case's lists."""
    from flash_attn.cute.bwd_sm90 import two_pass

    if case.lists is None or case.compress is not None:
        return False
    q, v = (
        torch.empty(1, 1, heads, D, dtype=getattr(torch, case.dtype), device="meta")
        for heads, D in ((case.Hq, case.D), (case.Hkv, case.Dv or case.D))
    )
    forward, backward = sides(case)
    options = dict(arch=90, q=q, v=v, deterministic=case.deterministic)
    with patch.dict(os.environ, FLASH_ATTENTION_NUM_SMS="132"):
        return two_pass.use_split_dq(case.passes, forward=forward, backward=backward, **options)


@lru_cache(maxsize=None)
def two_passes(kind: Attention, blocks: int = 9) -> bool:
    """`in_two_passes` of a kind of kernels, for rows of forward lists of this capacity: 9 blocks are many."""
    if kind.lists is None:
        return False
    T_k = blocks * kind.block[1]
    sizes = dict(packed=((128, T_k),)) if kind.packed else dict(T_k=T_k)
    return in_two_passes(replace(kind, **sizes, pattern="full", full=1.0, spare=0))


def passes_by_capacity(kind: Attention) -> bool:
    """True if the capacity of forward lists decides: few blocks take two passes, more take one."""
    return two_passes(kind, 1) != two_passes(kind)
