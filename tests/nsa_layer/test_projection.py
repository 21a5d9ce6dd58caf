"""Projections of block means: batched products of views, and their gradients."""

from __future__ import annotations

import pytest
import torch

from nsa_layer.projection import project, project_backward


@pytest.mark.parametrize("shape", [(2, 5, 3, 8), (1, 0, 3, 8), (7, 3, 8), (0, 3, 8)], ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_projection_and_its_gradients_are_the_definitions(shape: tuple[int, ...], weight_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, requires_grad=True)
    weight = torch.randn(3, 8, 8).to(weight_dtype).requires_grad_()
    expected = torch.einsum("...hd,hde->...he", x, weight.float())
    d_projected = torch.randn(shape)
    expected_gradients = torch.autograd.grad(expected, (x, weight), d_projected)
    projected = project(x, weight)
    assert projected.shape == expected.shape and projected.stride(-1) == 1
    torch.testing.assert_close(projected, expected)
    torch.testing.assert_close(torch.autograd.grad(projected, (x, weight), d_projected), expected_gradients)
    torch.testing.assert_close(project_backward(d_projected, x.detach(), weight.detach()), expected_gradients)


def test_projection_copies_nothing_but_its_result() -> None:
    B, Tc, H, D = 2, 64, 4, 16
    bundle = torch.randn(B, Tc, 2 * H, D)
    x, weight = bundle[:, :, :H], torch.randn(H, D, D)
    allocated: list[int] = []

    class Allocations(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            seen = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
            made = [t for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, torch.Tensor)]
            allocated.extend(t.numel() for t in made if t.untyped_storage().data_ptr() not in seen)
            return out

    with Allocations():
        projected = project(x, weight)
        project_backward(projected, x, weight)
    assert sorted(allocated) == sorted([B * Tc * H * D, B * Tc * H * D, H * D * D])


def test_d_projected_is_taken_in_any_dtype() -> None:
    x, weight = torch.randn(1, 5, 2, 8), torch.randn(2, 8, 8)
    d = torch.randn(1, 5, 2, 8).bfloat16()
    for got, expected in zip(project_backward(d, x, weight), project_backward(d.float(), x, weight)):
        assert torch.equal(got, expected)
