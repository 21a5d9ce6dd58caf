"""Autograd's contract: second derivatives raise, and tensors that backward reads later are watched until then.

But for tests on a GPU the kernels' place is taken by attention in plain PyTorch; the autograd functions are the real
ones.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fa_reference import plain_attention
from torch.utils.checkpoint import checkpoint

from flash_attn.cute import flash_attn_func, flash_attn_varlen_func
from flash_attn.cute.block_lists import lists_from_blocks
from fuzz.attention import attend, make_inputs
from fuzz.case import Attention as Case

ONCE = "was asked for a second derivative"
Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def read(plain_kernels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The arguments of the kernels; those of the last backward are the last ones."""
    return plain_kernels


def inputs(packed: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    shape = (5, 2, 4) if packed else (1, 5, 2, 4)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in "qkv"]


def varlen(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    starts = torch.tensor([0, 5], dtype=torch.int32)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, **options)


EACH = pytest.mark.parametrize("attend", [flash_attn_func, varlen])


def made_for(attend: Callable) -> list[Tensor]:
    return inputs(packed=attend is varlen)


@EACH
@pytest.mark.parametrize("wanted", range(3))
@pytest.mark.parametrize("of", range(3))
def test_a_penalty_on_a_gradient(attend: Callable, of: int, wanted: int) -> None:
    """With respect to every input, of every gradient, also where the rest of the loss is differentiable."""
    leaves = made_for(attend)
    loss = attend(*leaves)[0].square().sum() + sum(x.square().sum() for x in leaves)
    (gradient,) = torch.autograd.grad(loss, leaves[of], create_graph=True)
    with pytest.raises(RuntimeError, match=ONCE):
        torch.autograd.grad(gradient.square().sum(), leaves[wanted])


def through_backward(leaves: list[Tensor], o: Tensor, lse: Tensor) -> None:
    o.square().sum().backward(create_graph=True)
    leaves[0].grad.square().sum().backward()


def of_what_comes_in(leaves: list[Tensor], o: Tensor, lse: Tensor) -> None:
    """Linear in it, but not for kernels."""
    do = torch.ones_like(o, requires_grad=True)
    (gradient,) = torch.autograd.grad(o, leaves[1], do, create_graph=True)
    torch.autograd.grad(gradient.sum(), do)


def of_the_log_sum_exp(leaves: list[Tensor], o: Tensor, lse: Tensor) -> None:
    (gradient,) = torch.autograd.grad(lse.sum(), leaves[1], create_graph=True)
    torch.autograd.grad(gradient.sum(), leaves[0])


@EACH
@pytest.mark.parametrize("derive", [through_backward, of_what_comes_in, of_the_log_sum_exp])
def test_second_derivatives_of_every_kind(attend: Callable, derive: Callable) -> None:
    leaves = made_for(attend)
    o, lse = attend(*leaves, return_lse=True)
    with pytest.raises(RuntimeError, match=ONCE):
        derive(leaves, o, lse)


@EACH
def test_first_derivatives_are_the_same_with_a_graph(attend: Callable) -> None:
    leaves = made_for(attend)
    loss = plain_attention(*leaves)[0].square().sum()
    expected = torch.autograd.grad(loss, leaves)
    for create_graph in (False, True):
        got = torch.autograd.grad(attend(*leaves)[0].square().sum(), leaves, create_graph=create_graph)
        torch.testing.assert_close(got, expected)
        assert all(g.requires_grad is create_graph for g in got)
    # What does not go through attention again may be differentiated.
    (product,) = torch.autograd.grad((got[0].detach() * leaves[0]).sum(), leaves[0])
    torch.testing.assert_close(product, expected[0])


@EACH
def test_an_input_that_needs_no_gradient_has_none(attend: Callable) -> None:
    q, k, v = made_for(attend)
    (gradient,) = torch.autograd.grad(attend(q, k.detach(), v.detach())[0].sum(), q, create_graph=True)
    assert gradient.requires_grad


@EACH
@pytest.mark.parametrize("create_graph", [False, True])
def test_checkpointing_unpacks_once(attend: Callable, create_graph: bool) -> None:
    leaves = made_for(attend)
    o = checkpoint(lambda *tensors: attend(*tensors)[0], *leaves, use_reentrant=False)
    got = torch.autograd.grad(o.square().sum(), leaves, create_graph=create_graph)
    torch.testing.assert_close(got, torch.autograd.grad(plain_attention(*leaves)[0].square().sum(), leaves))


def some_lists() -> Any:
    return lists_from_blocks(torch.ones(2, 3, dtype=torch.bool), block_size=(128, 128))


def watched(lists: Any) -> list[str]:
    return [name for name, field in lists._asdict().items() if isinstance(field, Tensor)]


@EACH
@pytest.mark.parametrize("side", ["block_sparse_tensors", "block_sparse_tensors_bwd"])
@pytest.mark.parametrize("name", watched(some_lists()))
def test_lists_that_are_overwritten(attend: Callable, side: str, name: str) -> None:
    """In place, by the next batch: as with q, k and v it is an error, and not the gradient of other blocks."""
    given = {name: some_lists() for name in ("block_sparse_tensors", "block_sparse_tensors_bwd")}
    o = attend(*made_for(attend), **given)[0]
    getattr(given[side], name).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"])
def test_starts_that_are_overwritten(name: str) -> None:
    starts = {f"cu_seqlens_{side}": torch.tensor([0, 5], dtype=torch.int32) for side in "qk"}
    used = {f"seqused_{side}": torch.tensor([5], dtype=torch.int32) for side in "qk"}
    o = flash_attn_varlen_func(*inputs(packed=True), **starts, **used)[0]
    (starts | used)[name].fill_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@EACH
def test_kernels_get_the_lists_of_their_call(attend: Callable, read: list[dict[str, Any]]) -> None:
    """Every field, also those that are no tensors, and beside other calls and aux tensors."""
    leaves, aux = made_for(attend), [torch.ones(3), torch.zeros(2)]
    lists = [some_lists()._replace(spt=bool(n % 2), passes=1) for n in range(4)]
    calls = [
        attend(*leaves, block_sparse_tensors=lists[n], block_sparse_tensors_bwd=lists[n + 1], aux_tensors=aux)[0]
        for n in (0, 2)
    ]
    calls.append(attend(*leaves, block_sparse_tensors=lists[1], causal=True)[0])
    for o, first, forward, backward, aux_tensors in zip(
        calls, read[:3], (lists[0], lists[2], lists[1]), (lists[1], lists[3], None), (aux, aux, None), strict=True
    ):
        o.sum().backward()
        last = read[-1]
        for got, given in (
            (first["block_sparse_tensors"], forward),
            (last["block_sparse_tensors_fwd"], forward),
            (last["block_sparse_tensors"], backward),
        ):
            assert type(got) is type(given)
            assert given is None or all(a is b or a.data_ptr() == b.data_ptr() for a, b in zip(got, given))
        got = last["aux_tensors"]
        assert got is aux_tensors or [t.data_ptr() for t in got] == [t.data_ptr() for t in aux_tensors]


@EACH
def test_lists_made_under_inference_mode(attend: Callable, read: list[dict[str, Any]]) -> None:
    """Nobody counts who writes to them: backward has its own."""
    with torch.inference_mode():
        lists = some_lists()
    before = lists.mask_block_cnt.clone()
    o = attend(*made_for(attend), block_sparse_tensors=lists, block_sparse_tensors_bwd=lists)[0]
    with torch.inference_mode():
        lists.mask_block_cnt.zero_()
        attend(*made_for(attend), block_sparse_tensors=lists)
    o.sum().backward()
    assert read[-1]["block_sparse_tensors"].mask_block_cnt.equal(before)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
def test_the_kernels_too(packed: bool) -> None:
    case = Case(packed=((300, 300),) if packed else (), B=1, deterministic=True)
    x = make_inputs(case)
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    plain, graph = (
        torch.autograd.grad(attend(case, x, leaves)[0].square().sum(), leaves, create_graph=kept, retain_graph=kept)
        for kept in (False, True)
    )
    assert all(map(torch.equal, plain, graph))
    with pytest.raises(RuntimeError, match=ONCE):
        graph[0].square().sum().backward()
    if packed:
        o = attend(case, x, leaves)[0]
        x.cu_seqlens[0].fill_(7)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            o.sum().backward()
