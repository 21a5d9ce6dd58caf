"""A case's block lists: in each of the forms that the kernels take, of either direction, ordered or planned.

Of packed sequences "padded" is [B, H, rows of the longest, n]; "shared" the same with one list for all sequences;
"compact" [H, rows of all, n]; "stacked" [H, L], upstream's; "ragged" [L], with a start for every row.
"""

from itertools import accumulate
from random import Random
from typing import Any

import torch
from fa_cases import Case
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily

from flash_attn.cute.block_lists import compute_dq_write_order, packed_write_order
from flash_attn.cute.interface import _get_device_arch
from flash_attn.cute.lists.backward_plan import plan_backward
from fuzz.blocks import Table, lists_of_rows, rows_of

EVERY = slice(None)
Tables = list[tuple[Table, Table]]  # of each sequence, bool [heads, M, N]: listed, and full


def block(case: Case) -> tuple[int, int]:
    queries, keys = case.block or (256 if _get_device_arch() // 10 == 10 else 128, 128)
    return queries * case.q_tiles, keys


def blocks(case: Case, side: int) -> list[int]:
    """Blocks of queries, or of keys, that each sequence's lists are for."""
    tokens = [pair[side] for pair in case.lengths]
    if case.form == "shared":
        tokens = [max(tokens)] * len(tokens)
    return [-(-T // block(case)[side]) for T in tokens]


def tables(case: Case) -> Tables:
    """Three of four blocks, and the one in which the keys end; of "both" kinds each other one is full.

    With form "shared" the longest sequence's lists serve all, so that shorter ones have blocks listed that they do not
    hold.
    """
    found = []
    for b, (M, N) in enumerate(zip(blocks(case, 0), blocks(case, 1))):
        h, m, n = torch.meshgrid(*map(torch.arange, (case.list_heads, M, N)), indexing="ij")
        rank = (0 if case.form == "shared" else b) + 2 * h + m + n
        listed = (rank % 4 != 3) | (n == N - 1)
        full = {"both": (rank + h) % 2 == 0, "full": listed}.get(case.lists, torch.zeros_like(listed))
        found.append((listed, listed & full))
    return found


def lists_of(case: Case, given: Tables, backward: bool, only: slice = EVERY) -> Any:
    """Lists on the CPU, of all sequences or of those that `only` says; rows are in no order."""
    draw, across = Random(case.seed), blocks(case, 0 if backward else 1)
    kinds = {"mask": [listed & ~full for listed, full in given], "full": [full for _, full in given]}
    if case.lists == "no full":
        del kinds["full"]
    only = slice(0, 1) if case.form == "shared" else only
    rows = {
        kind: [[rows_of(t[h].mT if backward else t[h], draw) for t in of][only] for h in range(len(of[0]))]
        for kind, of in kinds.items()
    }
    form = "padded" if case.form == "shared" else case.form
    before = ("cu_total_m_blocks", "cu_total_n_blocks")[backward]
    width = 1 if case.packed else across[0]
    return lists_of_rows(rows, form, across[only], before, width=width, block_size=block(case))


def on_gpu(lists: Any) -> Any:
    return type(lists)(*map(_on_gpu, lists))


def _on_gpu(field: Any) -> Any:
    if not isinstance(field, torch.Tensor):
        return field
    if active_fake_mode() is not None:
        return torch.empty_strided(field.shape, field.stride(), dtype=field.dtype, device="cuda")
    own = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in field.stride())
    return field[own].cuda().expand(field.shape)


def forward_lists(case: Case, only: slice = EVERY) -> Any:
    """Key blocks of each query block; None where the case has no lists."""
    if case.lists is None:
        return None
    with unset_fake_temporarily():  # fake tensors have no lists in them
        lists = lists_of(case, tables(case), False, only)
    return on_gpu(lists)


def backward_lists(case: Case, only: slice = EVERY) -> Any:
    """The transpose: query blocks of each key block, with what the case's way of launching needs."""
    if case.lists is None:
        return None
    with unset_fake_temporarily():
        lists = lists_of(case, tables(case), True, only)
        if case.plan:
            lists = _planned(case, lists)
        elif case.deterministic and not case.packed:
            forward, spt = lists_of(case, tables(case), False), case.launch == "right to left"
            mask, full = compute_dq_write_order(*forward[:4], *lists[:4], spt=spt)
            lists = lists._replace(dq_write_order=mask, dq_write_order_full=full, spt=spt)
    return on_gpu(lists)


def ordered_backward_lists(case: Case, spt: bool) -> Any:
    """Backward lists of packed sequences with semaphore values, for deterministic backward in one pass and no plan."""
    with unset_fake_temporarily():
        lists = lists_of(case, tables(case), True)
        lists = packed_write_order(lists, num_q_blocks=max(blocks(case, 0)), spt=spt, cu_total_m_blocks=before(case))
    return on_gpu(lists)


def before(case: Case) -> torch.Tensor:
    """int32 [B + 1], the query blocks of all sequences before each one."""
    return torch.tensor([0, *accumulate(blocks(case, 0))], dtype=torch.int32)


def _planned(case: Case, lists: Any) -> Any:
    M, N = (max(blocks(case, side)) for side in (0, 1))
    schedule: Any = case.launch
    if schedule == "middle first":
        schedule = torch.tensor(sorted(range(N), key=lambda n: abs(n - N // 2)))
    return plan_backward(
        lists, num_heads=case.Hq, num_heads_kv=case.Hkv, num_q_blocks=M, listed=None if case.packed else M * N,
        deterministic=case.deterministic, schedule=schedule, per_group=case.per_group, longest=case.plan,
        **({"cu_total_m_blocks": before(case)} if case.form == "stacked" else {}),
    )  # fmt: skip
