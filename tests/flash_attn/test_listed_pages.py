"""SM90 forward over lists with bits and keys on pages: the kernel, refusals, and the bits of keys that lie together."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from fa_compile import Worker, WorkerError, built_kernels
from fa_cubin import stacks
from fa_tokens import TokenCase, listed_blocks, union_lists
from test_query_bits import attend, fake_lists
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fuzz.attention import make_inputs

BATCH = TokenCase(((300, 768),) * 2, G=4)
PACK = TokenCase(((300, 768), (1, 768), (77, 768)), G=4, form="compact")


def options(case: TokenCase, page: int, device: str = "cuda") -> dict[str, torch.Tensor | None]:
    """A table of the sequences' pages in any order, and the position of their first queries."""
    table = torch.randperm(len(case.lengths) * 768 // page, device="cpu").int().view(len(case.lengths), -1)
    offset = torch.tensor([S - T for T, S in case.lengths], device="cpu").int()
    found = dict(page_table=table.to(device), q_offset=offset.to(device))
    return found if case.form is None else found | dict(cu_seqlens_k=None)


def in_pages(x: torch.Tensor, page: int) -> torch.Tensor:
    return x.flatten(0, -3).unflatten(0, (-1, page))


def compiled(case: TokenCase, page: int) -> None:
    x = make_inputs(case.plain)
    with unset_fake_temporarily():
        shapes = {name: x if x is None else x.shape for name, x in options(case, page, "cpu").items()}
    given = {name: x if x is None else torch.empty(x, dtype=torch.int32, device="cuda") for name, x in shapes.items()}
    attend(case, replace(x, k=in_pages(x.k, page), v=in_pages(x.v, page)), fake_lists(case), **given)


def frames_of(case: TokenCase, page: int) -> list[list[int]]:
    return stacks(partial(compiled, case, page))


def kernels_of(case: TokenCase, page: int) -> list[tuple[int, int, bool, bool]]:
    with built_kernels("FlashAttentionForwardSm90", traced=True) as kernels:
        compiled(case, page)
    return [(kernel.list_parts, kernel.list_words, kernel.use_tma_KV, kernel.overlap_tiles) for kernel in kernels]


@pytest.mark.parametrize("case", [BATCH, PACK], ids=["batch", "pack"])
def test_the_kernel_is_that_of_keys_that_lie_together(compiler_sm90: Worker, case: TokenCase) -> None:
    assert compiler_sm90.trace(kernels_of, case, 192) == [(1, 1, True, case is BATCH)]


@pytest.mark.sweep
@pytest.mark.parametrize("case", [BATCH, PACK], ids=["batch", "pack"])
def test_registers_suffice(compiler_sm90: Worker, case: TokenCase) -> None:
    assert compiler_sm90.run(frames_of, case, 64) == [[0]]


def test_a_block_on_two_pages_is_refused(compiler_sm90: Worker) -> None:
    with pytest.raises(WorkerError, match="pages of a multiple of 64 keys, got 96") as caught:
        compiler_sm90.trace(compiled, BATCH, 96)
    assert caught.value.kind == "NotImplementedError"


@pytest.mark.gpu
@pytest.mark.parametrize("page", [64, 192])
@pytest.mark.parametrize("case", [BATCH, PACK], ids=["batch", "pack"])
def test_bits_are_those_of_keys_that_lie_together(case: TokenCase, page: int) -> None:
    x = make_inputs(case.plain)
    lists, given = union_lists(case, listed_blocks(case)), options(case, page)
    want = attend(case, x, lists, q_offset=given["q_offset"])
    pages = {name: torch.empty_like(in_pages(getattr(x, name), page)) for name in "kv"}
    for name, to in pages.items():
        to[given["page_table"].long().flatten()] = in_pages(getattr(x, name), page)
    got = attend(case, replace(x, **pages), lists, **given)
    assert all(torch.equal(x, y) for x, y in zip(got, want))
