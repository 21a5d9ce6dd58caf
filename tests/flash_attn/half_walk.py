"""The walk, masks and waits of SM100's kernels over lists of halves: their own functions, on the CPU by a worker."""

from __future__ import annotations

from typing import Any

import torch
from fa_query_halves import Drawn, Launched, adds, as_joined, key_rows, tiles
from torch._subclasses.fake_tensor import unset_fake_temporarily


def walked_by_kernels(case: Drawn, backward: bool) -> dict[tuple[int, int, int, int, int], int]:
    """{(sequence, head, kind, row, block): halves that see it}, of all rows of the case's joined lists."""
    import cutlass.cute as cute
    from cutlass import Int32
    from half_kernels import walk_backward, walk_forward

    from flash_attn.cute.lists import query_halves

    merge = query_halves.merged_backward if backward else query_halves.merged_forward
    found = {}
    with unset_fake_temporarily():
        lists = merge(as_joined(case, backward), asked=True)
        out = torch.empty(64, 4, dtype=torch.int32)
        arguments = _arguments(lists, out)
        walk = cute.compile(walk_backward if backward else walk_forward, *arguments, *map(Int32, (0, 0, 0)))
        rows = key_rows(case) if backward else [tiles(case, sequence) for sequence in range(len(case.shapes))]
        places = ((s, head, row) for s, of in enumerate(rows) for head in range(case.H) for row in range(of))
        for sequence, head, row in places:
            out.fill_(-1)
            walk(*arguments, *map(Int32, (sequence, head, row)))
            for kind, block, first, second in out.tolist():
                where = sequence, head, kind, row, block
                assert where not in found
                if kind >= 0:
                    found[where] = first + 2 * second
    return found


def adds_by_kernel(case: Drawn, launched: Launched) -> list[list[list[tuple[int, int]]]]:
    """`adds` of the heads of the case's first sequence, with the semaphore values of SM100's kernel."""
    import cutlass.cute as cute
    from cutlass import Int32
    from cutlass.cute.runtime import from_dlpack
    from half_kernels import wait_of_add

    from flash_attn.cute.lists import query_halves

    with unset_fake_temporarily():
        order, out = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
        tables = from_dlpack(order), from_dlpack(out)
        wait = cute.compile(wait_of_add, launched.groups, launched.spt, *tables, *map(Int32, (0, 0, 0)))

        def lock(value: int, cta: int, twice: bool) -> int:
            assert twice
            order.fill_(value)
            wait(*tables, *map(Int32, (cta, launched.release(cta), launched.number * 128 - 7)))
            (of_mask, of_full) = out.tolist()
            assert of_mask == of_full
            return of_mask

        lists = query_halves.merged_backward(
            as_joined(case, True), asked=True, ordered=True, spt=launched.spt, groups=launched.groups
        )
        return [adds(lists, head, 0, launched, lock) for head in range(case.H)]


def _arguments(lists: Any, out: torch.Tensor) -> list[Any]:
    from cutlass.cute.runtime import from_dlpack

    before = lists.cu_total_m_blocks if lists.cu_total_n_blocks is None else lists.cu_total_n_blocks
    given = *lists[:4], before, lists.cu_block_idx_offsets, lists.cu_full_block_idx_offsets, out
    return [from_dlpack(t.contiguous()) for t in given]


def hidden(halves: int) -> dict[str, list[set[float]]]:
    """The scores of each query of a tile that are left of scores of 1, forward and backward."""
    from cutlass import Int32
    from cutlass.cute.runtime import from_dlpack
    from half_kernels import hide_backward, hide_forward

    found = {}
    with unset_fake_temporarily():
        for name, hide in (("forward", hide_forward), ("backward", hide_backward)):
            out = torch.zeros(128, 128)
            hide(from_dlpack(out), Int32(halves))
            found[name] = [set(row) for row in out.tolist()]
    return found
