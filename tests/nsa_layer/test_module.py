"""`NSAttention`: shapes, gradients, its parts, position embedding and state. Autocast: `test_autocast.py`."""

from __future__ import annotations

import copy

import pytest
import torch

from nsa_layer import NSAConfig, NSAttention, nsa
from nsa_layer.rope import RotaryEmbedding

SMALL = NSAConfig(block_size=8, block_counts=4, q_tile=16, window_size=8)
DIM, HQ, HKV, D = 24, 4, 2, 6


def make(**options: object) -> NSAttention:
    """A small layer whose gates and compression weights are not at their initial values."""
    torch.manual_seed(0)
    defaults = dict(num_heads=HQ, num_kv_heads=HKV, config=SMALL, rope=RotaryEmbedding(options.get("head_dim") or D))
    layer = NSAttention(DIM, **(defaults | options))
    with torch.no_grad():
        layer.gate_weight.normal_()
        for weight in (layer.compress_k_weight, layer.compress_v_weight):
            if weight is not None:
                weight.add_(0.3 * torch.randn_like(weight))
    return layer


def tokens(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, DIM, generator=torch.Generator().manual_seed(1), dtype=dtype)


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({}, {}),
        ({"head_dim": 10, "head_dim_v": 4, "bias": True}, {}),
        ({"num_kv_heads": 4}, {"causal": False}),
        ({"compression": "mean"}, {"cu_seqlens": [0, 17, 17, 18, 45]}),
        ({"rope": None}, {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("T", [1, 45])
def test_layer_is_its_projections_around_the_reference(
    T: int, options: dict[str, object], more: dict[str, object]
) -> None:
    layer = make(**dict(compression="linear") | options).double()
    x, positions = tokens(2, T, dtype=torch.float64), torch.arange(T)
    if "cu_seqlens" in more:
        starts = torch.tensor(more["cu_seqlens"], dtype=torch.int32).clamp(max=T)
        more, x = dict(cu_seqlens=starts), x[0]
        positions = torch.cat([torch.arange(length) for length in starts.diff().tolist()])
    heads = HQ, (Hkv := options.get("num_kv_heads", HKV)), Hkv
    projections = layer.q_proj, layer.k_proj, layer.v_proj
    q, k, v = (project(x).unflatten(-1, (H, -1)) for project, H in zip(projections, heads, strict=True))
    if "rope" not in options:
        q, k = RotaryEmbedding(q.shape[-1])(q, k, positions)
    weights = {name: getattr(layer, name) for name in ("gate_weight", "compress_k_weight", "compress_v_weight")}
    o = nsa(q, k, v, config=SMALL, **weights, **more, backend="reference")
    out, aux = layer(x, **more, return_aux=True)
    torch.testing.assert_close(out, layer.o_proj(o.flatten(-2)))
    assert out.shape == x.shape and out.dtype == x.dtype and aux.gates.shape == (*x.shape[:-1], HQ, 3)


def test_gradients_reach_every_parameter_and_the_input() -> None:
    layer = make(compression="linear", bias=True)
    x = tokens(2, 50).requires_grad_()
    layer(x).square().sum().backward()
    for name, parameter in [*layer.named_parameters(), ("x", x)]:
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
        # Also for the bias of k, which without a rotation would move all scores of a query alike.
        assert parameter.grad.abs().max() > 0, name


def test_positions_are_counted_within_each_sequence() -> None:
    seen: list[torch.Tensor] = []

    def rope(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(positions)
        return q, k

    layer = make(rope=rope)
    layer(tokens(2, 5))
    layer(tokens(7), cu_seqlens=torch.tensor([0, 3, 3, 7], dtype=torch.int32))
    given = torch.arange(10, dtype=torch.int32).view(2, 5)
    layer(tokens(2, 5), positions=given)
    assert [p.tolist() for p in seen] == [[0, 1, 2, 3, 4], [0, 1, 2, 0, 1, 2, 3], given.tolist()]


def test_state_dict_and_deepcopy_keep_every_value() -> None:
    layer = make(compression="linear", bias=True)
    other = NSAttention(
        DIM, num_heads=HQ, num_kv_heads=HKV, config=SMALL, rope=RotaryEmbedding(D), compression="linear", bias=True
    )
    x = tokens(1, 30)
    expected = layer(x)
    assert not torch.equal(other(x), expected)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), expected)
    copied = copy.deepcopy(layer)
    layer.reset_parameters()
    assert torch.equal(copied(x), expected)


def test_initial_gates_are_a_half_and_initial_projections_the_identity() -> None:
    layer = make(compression="linear")
    layer.reset_parameters()
    plain = make()
    plain.load_state_dict(layer.state_dict(), strict=False)
    x = tokens(1, 40)
    out, aux = layer(x, return_aux=True)
    assert (aux.gates == 0.5).all()
    torch.testing.assert_close(out, plain(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_moving_to_a_dtype_moves_everything(dtype: torch.dtype) -> None:
    layer = make(compression="linear", bias=True).to(dtype)
    assert {p.dtype for p in layer.parameters()} == {dtype}
    out = layer(tokens(1, 30, dtype=torch.float64).to(dtype))
    assert out.dtype == dtype and torch.isfinite(out).all()


def test_device_and_dtype_of_the_constructor() -> None:
    layer = make(device="cpu", dtype=torch.float64, compression="linear")
    assert {p.dtype for p in layer.parameters()} == {torch.float64}
    meta = NSAttention(DIM, num_heads=HQ, num_kv_heads=HKV, device="meta", compression="linear")
    assert {p.device.type for p in meta.parameters()} == {"meta"}


def test_repr_says_what_the_layer_is() -> None:
    text = repr(make(compression="linear", backend="eager"))
    for part in ("num_heads=4", "num_kv_heads=2", "head_dim=6", "block_size=8", "backend='eager'", "RotaryEmbedding(6"):
        assert part in text
