"""SM90 forward over lists with bits and keys on pages: the kernel, refusals, and the bits of keys that lie together."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from fa_bits import TokenCase, listed_blocks, union_lists
from fa_compile import Worker, WorkerError, built_kernels
from fa_cubin import cubins, frames
from test_query_bits import attend, lists_of_fakes, tensors

CASE = TokenCase(((300, 768),) * 2, G=4)


def options(page: int) -> dict[str, torch.Tensor]:
    """A table of two sequences' pages in any order, and the position of their first queries."""
    table = torch.randperm(2 * 768 // page, device="cpu").int().view(2, -1)
    return dict(page_table=table.cuda(), q_offset=torch.full((2,), 468, dtype=torch.int32, device="cuda"))


def compiled(page: int) -> None:
    q, k, v = tensors(CASE)
    k, v = (x.flatten(0, 1).unflatten(0, (-1, page)) for x in (k, v))
    table = torch.empty(2, 768 // page, dtype=torch.int32, device="cuda")
    offset = torch.empty(2, dtype=torch.int32, device="cuda")
    attend(CASE, (q, k, v), lists_of_fakes(CASE), page_table=table, q_offset=offset)


def frames_of(page: int) -> list[list[int]]:
    from flash_attn.cute import interface

    return [frames(cubin) for cubin in cubins(partial(compiled, page), interface._flash_attn_fwd)]


def kernels_of(page: int) -> list[tuple[int, int, bool, bool]]:
    with built_kernels("FlashAttentionForwardSm90", traced=True) as kernels:
        compiled(page)
    return [(kernel.list_parts, kernel.list_words, kernel.use_tma_KV, kernel.overlap_tiles) for kernel in kernels]


def test_the_kernel_is_that_of_keys_that_lie_together(compiler_sm90: Worker) -> None:
    assert compiler_sm90.trace(kernels_of, 192) == [(1, 1, True, True)]


@pytest.mark.sweep
def test_registers_suffice(compiler_sm90: Worker) -> None:
    assert compiler_sm90.run(frames_of, 64) == [[0]]


def test_a_block_on_two_pages_is_refused(compiler_sm90: Worker) -> None:
    with pytest.raises(WorkerError, match="pages of a multiple of 64 keys, got 96") as caught:
        compiler_sm90.trace(compiled, 96)
    assert caught.value.kind == "NotImplementedError"


@pytest.mark.gpu
@pytest.mark.parametrize("page", [64, 192])
def test_bits_are_those_of_keys_that_lie_together(page: int) -> None:
    q, k, v = tensors(CASE)
    lists, given = union_lists(CASE, listed_blocks(CASE, "cuda")), options(page)
    want = attend(CASE, (q, k, v), lists, q_offset=given["q_offset"])
    places = given["page_table"].long().flatten()
    pages = [torch.empty_like(x.flatten(0, 1).unflatten(0, (-1, page))) for x in (k, v)]
    for to, x in zip(pages, (k, v)):
        to[places] = x.flatten(0, 1).unflatten(0, (-1, page))
    got = attend(CASE, (q, *pages), lists, **given)
    assert all(torch.equal(x, y) for x, y in zip(got, want))
