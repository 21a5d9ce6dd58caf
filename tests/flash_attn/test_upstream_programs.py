"""Programs for upstream with its open pull requests, as they would be written there: they compile here unchanged.

They know nothing of this repository: upstream's names and places of import, its packed lists (a row has room for each
block of its sequence), and its function for the order of deterministic adds, called by position.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fa_compile import Worker, noted

LENGTHS = ((300, 300), (1, 129), (700, 640), (257, 900))
HQ, HKV = 6, 2  # a group that no other test compiles, so that these are not in a worker's cache


def blocks(block: tuple[int, int]) -> tuple[list[int], list[int]]:
    """Query and key blocks of each sequence."""
    return [-(-T_q // block[0]) for T_q, _ in LENGTHS], [-(-T_k // block[1]) for _, T_k in LENGTHS]


def before(numbers: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(numbers)], dtype=torch.int32, device="cuda")


def both_kinds(counts: tuple[int, ...], indices: tuple[int, ...]) -> list[torch.Tensor]:
    """Counts and indices of mask blocks, and of full ones."""
    return [torch.empty(shape, dtype=torch.int32, device="cuda") for shape in (counts, indices) * 2]


def packed_lists(block: tuple[int, int]) -> dict[str, Any]:
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    rows, columns = blocks(block)
    cells = [m * n for m, n in zip(rows, columns, strict=True)]
    forward = BlockSparseTensorsTorch(
        *both_kinds((HQ, sum(rows)), (HQ, sum(cells))),
        block_size=block,
        cu_total_m_blocks=before(rows),
        cu_block_idx_offsets=before(cells),
    )
    backward = BlockSparseTensorsTorch(
        *both_kinds((HQ, sum(columns)), (HQ, sum(cells))),
        block_size=block,
        cu_total_n_blocks=before(columns),
        cu_block_idx_offsets=before(cells),
    )
    return dict(block_sparse_tensors=forward, block_sparse_tensors_bwd=backward)


def packed_ordered_lists(block: tuple[int, int]) -> dict[str, Any]:
    """The same with an order of deterministic adds, in a call that one pass alone can do."""
    given = packed_lists(block)
    backward = given["block_sparse_tensors_bwd"]
    orders = [torch.empty_like(idx) for idx in (backward.mask_block_idx, backward.full_block_idx)]
    given["block_sparse_tensors_bwd"] = backward._replace(
        dq_write_order=orders[0], dq_write_order_full=orders[1], spt=True
    )
    return given | dict(deterministic=True, softcap=20.0)


def ordered_lists(block: tuple[int, int]) -> dict[str, Any]:
    """Padded lists for deterministic backward; every sequence lists every block of the longest."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch, compute_dq_write_order

    def every(rows: int, columns: int) -> list[torch.Tensor]:
        shape = len(LENGTHS), HQ, rows
        idx = torch.arange(columns, dtype=torch.int32).repeat(*shape, 1)
        cnt = torch.full(shape, columns, dtype=torch.int32)
        return [cnt, idx, torch.zeros_like(cnt), torch.zeros_like(idx)]

    M, N = map(max, blocks(block))
    with unset_fake_temporarily():
        forward, backward = every(M, N), every(N, M)
        orders = compute_dq_write_order(*forward, *backward, True)
    forward, backward, orders = ([torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in of]
                                 for of in (forward, backward, orders))  # fmt: skip
    return dict(
        block_sparse_tensors=BlockSparseTensorsTorch(*forward, block_size=block),
        block_sparse_tensors_bwd=BlockSparseTensorsTorch(
            *backward, block_size=block, dq_write_order=orders[0], dq_write_order_full=orders[1], spt=True
        ),
        deterministic=True,
    )


class Context:
    """Autograd's context for a function: PyTorch without CUDA has no autograd of tensors on a GPU."""

    needs_input_grad = (True,) * 64

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        assert value is False

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None: ...


@contextmanager
def without_autograd(name: str) -> Iterator[Callable[..., tuple]]:
    """In the body an autograd function of the interface is its forward alone; its backward for that call is given."""
    from flash_attn.cute import interface

    function, context = getattr(interface, name), Context()

    def apply(*args: Any) -> Any:
        with torch.no_grad():
            return function.forward(context, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interface, name, SimpleNamespace(apply=apply))
        yield torch.no_grad()(partial(function.backward, context))


def dimensions(row: Any, tensor: Any, full: bool = False) -> int:
    return len(tensor.shape)


def compiled(lists: Callable[..., Any], D: int, block: tuple[int, int]) -> tuple[list[tuple], dict[str, set[int]]]:
    """Shapes and types of q's, k's and v's gradients, and the dimensions of the index lists that kernels loop."""
    from flash_attn.cute import flash_attn_varlen_func
    from flash_attn.cute.lists.rows import ListRow

    (total_q, total_k), (longest_q, longest_k) = (map(of, zip(*LENGTHS)) for of in (sum, max))
    q, k, v = (
        torch.empty(T, H, D, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        for T, H in ((total_q, HQ), (total_k, HKV), (total_k, HKV))
    )
    cu_seqlens_q, cu_seqlens_k = (before(lengths) for lengths in zip(*LENGTHS))
    with without_autograd("FlashAttnVarlenFunc") as derive, noted(ListRow, "entries", dimensions) as forwards:
        out, lse = flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=longest_q,
            max_seqlen_k=longest_k,
            causal=True,
            **lists(block),
        )
    with noted(ListRow, "entries", dimensions) as backwards:
        gradients = derive(torch.empty_like(out), None)[:3]
    visited = {"forward": set(forwards), "backward": set(backwards)}
    return [(tuple(t.shape), t.dtype) for t in gradients], visited


@pytest.mark.parametrize(
    ("D", "lists", "dimensions"), [(64, packed_lists, 1), (128, ordered_lists, 4)], ids=["packed", "deterministic"]
)
def test_it_compiles_as_it_is(compiler_sm90: Worker, D: int, lists: Callable[..., Any], dimensions: int) -> None:
    gradients, visited = compiler_sm90.trace(compiled, lists, D, (128, 128))
    shapes = [(sum(T[side] for T in LENGTHS), H, D) for side, H in ((0, HQ), (1, HKV), (1, HKV))]
    assert gradients == [(shape, torch.bfloat16) for shape in shapes]
    assert visited == {"forward": {dimensions}, "backward": {dimensions}}, (
        "packed rows are found as ragged ones, padded ones as they are"
    )


def test_one_pass_takes_packed_lists_in_order(compiler_sm90: Worker) -> None:
    gradients, visited = compiler_sm90.trace(compiled, packed_ordered_lists, 128, (128, 128))
    assert gradients[0] == ((sum(T_q for T_q, _ in LENGTHS), HQ, 128), torch.bfloat16)
    assert visited == {"forward": {1}, "backward": {1}}


def test_one_pass_follows_the_order(compiler_sm100: Worker) -> None:
    _, visited = compiler_sm100.trace(compiled, ordered_lists, 128, (256, 128))
    assert visited == {"forward": {4}, "backward": {4}}
