"""Rotary angles against exact arithmetic, up to position 2**24."""

from __future__ import annotations

from collections.abc import Callable

import mpmath
import pytest
import torch
from layer_calls import Noted
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from nsa_layer.rope import RotaryEmbedding

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
POSITIONS = [0, 1, 2, 63, 4095, 10**6, 6_000_000, 2**23 + 1, 2**24 - 3, 2**24 - 2, 2**24 - 1, 2**24, -5, -(2**24)]


def exact(position: int, pair: int, head_dim: int, base: float) -> tuple[float, float]:
    """(cos, sin) to 50 digits."""
    with mpmath.workdps(50):
        angle = position * mpmath.mpf(base) ** (-mpmath.mpf(2 * pair) / head_dim)
        return float(mpmath.cos(angle)), float(mpmath.sin(angle))


def turned(rope: RotaryEmbedding, positions: list[int], dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    """cos and sin of every angle [T, D / 2]: what becomes of the axes of each pair."""
    x, half = torch.zeros(1, len(positions), 2, rope.head_dim, dtype=dtype, device=device), rope.head_dim // 2
    x[..., 0, :half] = x[..., 1, half:] = 1
    q, k = rope(x, x, torch.tensor(positions, device=device))
    (cos, sin), (x_of_second, y_of_second) = (each.chunk(2, -1) for each in q[0].unbind(1))
    assert torch.equal(x_of_second, -sin) and torch.equal(y_of_second, cos)
    assert torch.equal(q, k) and q.dtype == dtype
    return cos, sin


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("base", [10_000.0, 500_000.0, 1.0001])
@pytest.mark.parametrize("head_dim", [64, 128, 6])
def test_angles_are_exact_to_the_last_bits(head_dim: int, base: float, device: str) -> None:
    rope = RotaryEmbedding(head_dim, base)
    expected = torch.tensor(
        [[exact(t, i, head_dim, base) for i in range(head_dim // 2)] for t in POSITIONS], dtype=torch.float64
    ).unbind(-1)
    for dtype, error in ((torch.bfloat16, 2.0**-9), (torch.float32, 2.0**-23), (torch.float64, 1e-8)):
        for got, of in zip(turned(rope, POSITIONS, dtype, device), expected):
            # An angle near pi is rounded by 2**-23 at most, a cosine or a sine by 2**-25 and what the library errs by.
            assert (got.double().cpu() - of).abs().max() <= error * 1.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_rounds_no_angle(dtype: torch.dtype) -> None:
    q, rope, late = torch.randn(1, 3, 2, 64), RotaryEmbedding(64), torch.tensor([5, 10**6, 2**24])
    expected = rope(q, q, late)
    with torch.autocast("cpu", dtype):
        got = rope(q, q, late)
    assert all(torch.equal(a, b) for a, b in zip(got, expected))


def test_compiled_and_without_data() -> None:
    q, rope = torch.randn(1, 3, 2, 64), RotaryEmbedding(64)
    late = torch.tensor([5, 10**6, 2**24])
    compiled: Callable = torch.compile(rope, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(q, q, late), rope(q, q, late), rtol=0, atol=0)
    with FakeTensorMode():
        fake = torch.empty(1, 3, 2, 64, dtype=torch.bfloat16, device="cuda")
        turned = rope(fake, fake, torch.arange(3, device="cuda"))
    meta = torch.empty(1, 3, 2, 64, dtype=torch.bfloat16, device="meta")
    for x in (*turned, *rope(meta, meta, torch.arange(3, device="meta"))):
        assert x.shape == (1, 3, 2, 64) and x.dtype == torch.bfloat16


def test_a_device_without_fp64_is_asked_for_none() -> None:
    rope = RotaryEmbedding(64)
    with FakeTensorMode(), Noted("aten") as noted:
        q = torch.empty(1, 3, 2, 64, dtype=torch.bfloat16, device="mps")
        got = rope(q, q, torch.arange(3, device="mps"))
    read = [x for _, args, _ in noted.calls for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
    assert {x.dtype for x in read if x.device.type == "mps"} == {torch.int64, torch.float32, torch.bfloat16}
    assert all(x.device.type == "mps" and x.shape == q.shape for x in got)
