"""Slots in caches, and rows moved there and back: kernels compile; `test_kvcache` has their numbers."""

from __future__ import annotations

import pytest
import torch
from fa_compile import Worker

from nsa_layer.kernels.cache_rows.complete import complete_blocks
from nsa_layer.kernels.cache_rows.invalidate import invalidate_rows
from nsa_layer.kernels.cache_rows.locate import CacheSlots, locate
from nsa_layer.kernels.cache_rows.move import append, clear, gather


def trace(moves: bool) -> tuple[int, ...]:
    def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    seqlens, starts, pages = (make(*shape, dtype=torch.int32) for shape in ((3,), (4,), (3, 4)))
    caches, x = ((make(*lead, 2, 128), make(*lead, 2, 64)) for lead in ((3, 256), (21,)))
    given = dict(cache=caches[0], table=pages, cmp_cache=caches[0], cmp_table=pages, adds=True)
    given |= dict(span=32, stride=16, window=64)
    slots = make(len(CacheSlots), 3, dtype=torch.int32)
    if not moves:
        slots = locate(seqlens, T=7, cu_seqlens=starts, **given)
        invalidate_rows(x[0], [make(2, 21, dtype=torch.float32)] * 3, slots, starts)
        return tuple(slots.shape)
    blocks = make(3, 16, 2, 128), None
    append((*x, None, None, None, None), (*caches, None, None, *blocks), (pages, pages), slots, (starts, None))
    beside = None, None, make(3, 256, 2, 65).narrow(-1, 1, 64)
    new = None, None, make(3, 7, 2, 64)
    append((*new, *[None] * 3), (*beside, None, *blocks), (None, None), slots, behind="rows")
    append((*new, *[None] * 3), (*beside, *[None] * 3), (pages, None), slots, behind="block")
    complete_blocks(caches, blocks, (pages, pages), slots, block_size=32, stride=16, most=3)
    gather(caches, x, pages, slots, (CacheSlots.START, CacheSlots.END), starts)
    clear(x, slots, CacheSlots.END, starts)
    clear(caches, slots, CacheSlots.END)
    return tuple(slots.shape)


@pytest.mark.parametrize("moves", [False, True])
def test_kernels_are_traced(compiler: Worker, moves: bool) -> None:
    assert compiler.trace(trace, moves) == (len(CacheSlots), 3)
