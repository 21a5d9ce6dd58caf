"""The module with the paper's compression, gates, and keys and values for each branch."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from stub_kernels import stubbed_layer

from nsa_layer import NSAConfig, NSAttention, nsa
from nsa_layer.rope import RotaryEmbedding

SMALL = NSAConfig.paper(block_size=8, compress_size=4, compress_stride=2, block_counts=4, window_size=8)
DIM, HQ, HKV, D, DV = 24, 4, 2, 6, 4
PAPER = dict(compression="mlp", kv_per_branch=True, gate="input")
OPTIONS = [PAPER, *({name: value} for name, value in PAPER.items()), dict(compression="linear", kv_per_branch=True)]
OPTIONS += [dict(gate="linear", bias=True, o_bias=False)]


def make(**options: object) -> NSAttention:
    """A small layer in fp64 none of whose parameters is zero."""
    torch.manual_seed(0)
    defaults = dict(num_heads=HQ, num_kv_heads=HKV, head_dim_v=DV, config=SMALL, rope=RotaryEmbedding(D))
    layer = NSAttention(DIM, **(defaults | options), backend="eager").double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def tokens(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def by_blocks(network: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """[T, Hkv, D] -> [Tc, Hkv, D]: the network of the paper, block by block."""
    made = []
    for start in range(0, len(x) - SMALL.span + 1, SMALL.stride):
        for h in range(HKV):
            block = (x[start : start + SMALL.span, h] + network.position[h]).flatten()
            made.append(torch.nn.functional.gelu(block @ network.up[h]) @ network.down[h])
    return torch.stack(made).view(-1, HKV, x.shape[-1])


@pytest.mark.parametrize("T", [3, 4, 45])
def test_the_papers_module_is_its_parts_around_the_reference(T: int) -> None:
    layer, x = make(**PAPER), tokens(1, T)
    heads = dict(q=(layer.q_proj, HQ), k=(layer.k_proj, HKV), v=(layer.v_proj, HKV))
    heads |= {name: (project, HKV) for name, project in layer.branch_proj.items()}
    given = {name: project(x).unflatten(-1, (H, -1)) for name, (project, H) in heads.items()}
    for name in ("q", "k", "k_cmp", "k_win"):
        given[name] = layer.rope(given[name], given[name], torch.arange(T))[0]
    for name, network in (("k_cmp", layer.compress_k), ("v_cmp", layer.compress_v)):
        given[name] = by_blocks(network, given[name][0])[None] if T >= SMALL.span else given[name][:, :0]
    gates = layer.gate_mlp(x).sigmoid().view(1, T, HQ, 3)
    o = nsa(**given, gates=gates, config=SMALL, backend="reference")
    torch.testing.assert_close(layer(x), layer.o_proj(o.flatten(-2)))


def test_gates_are_a_linear_layer_of_the_input_and_the_bias_of_q_k_and_v() -> None:
    layer, x = make(gate="linear", bias=True, o_bias=False, rope=None), tokens(2, 45)
    assert layer.o_proj.bias is None and make(bias=True).o_proj.bias is not None
    heads = dict(q=(layer.q_proj, HQ), k=(layer.k_proj, HKV), v=(layer.v_proj, HKV))
    q, k, v = ((x @ p.weight.mT + p.bias).unflatten(-1, (H, -1)) for p, H in heads.values())
    gates = (x @ layer.gate_mlp.weight.mT + layer.gate_mlp.bias).sigmoid().view(2, 45, HQ, 3)
    o = nsa(q, k, v, gates=gates, config=SMALL, backend="reference")
    torch.testing.assert_close(layer(x), o.flatten(-2) @ layer.o_proj.weight.mT)
    layer.reset_parameters()
    assert (layer(x, return_aux=True)[1].gates == 0.5).all()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_pack_is_its_sequences(options: dict[str, object]) -> None:
    layer, x, lengths = make(**options), tokens(60), (20, 0, 3, 37)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = layer(x, cu_seqlens=starts)
    for part, own in zip(packed.split(lengths), x.split(lengths), strict=True):
        if len(own):
            torch.testing.assert_close(part, layer(own[None])[0])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_reach_every_parameter_and_none_comes_from_later_tokens(options: dict[str, object]) -> None:
    layer, x, t = make(**options), tokens(1, 50).requires_grad_(), 33
    names, parameters = zip(*layer.named_parameters())
    for name, grad in zip(names, torch.autograd.grad(layer(x).square().sum(), parameters), strict=True):
        assert grad.isfinite().all() and grad.any(), name
    (dx,) = torch.autograd.grad(layer(x)[:, : t + 1].sum(), x)
    assert not dx[:, t + 1 :].any() and dx[:, : t + 1].any()


def test_initial_values() -> None:
    layer = NSAttention(DIM, num_heads=HQ, num_kv_heads=HKV, config=SMALL, **PAPER)
    x = torch.randn(1, 40, DIM)
    assert (layer(x, return_aux=True)[1].gates == 0.5).all()
    before = {name: x.clone() for name, x in layer.named_parameters()}
    layer.reset_parameters()
    drawn = {name for name, x in layer.named_parameters() if not torch.equal(x, before[name])}
    assert set(before) - drawn == {"gate_mlp.2.weight", "gate_mlp.2.bias"}
    for part in ("compression='mlp'", "kv_per_branch=True", "gate='input'"):
        assert part in repr(layer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_and_under_autocast(dtype: torch.dtype) -> None:
    layer, x = make(**PAPER).float(), tokens(2, 40).float()
    with torch.autocast("cpu", dtype=dtype):
        assert layer(x).dtype == dtype
    layer = layer.to(dtype)
    out = layer(x.to(dtype))
    assert out.dtype == dtype and out.isfinite().all()


def test_on_a_device_that_is_not_waited_for() -> None:
    layer = NSAttention(DIM, num_heads=HQ, num_kv_heads=HKV, config=SMALL, **PAPER, device="meta")
    x = torch.empty(1, 40, DIM, device="meta", requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == x.shape


def on_kernels(device: str) -> NSAttention:
    """The paper's module at sizes that the kernels take, with gates of which none is like another."""
    rope, config = RotaryEmbedding(64), NSAConfig.paper(window_size=100)
    torch.manual_seed(0)
    static = dict(num_heads=4, num_kv_heads=2, head_dim=64, config=config, rope=rope, **PAPER)
    layer = NSAttention(96, **static, backend="cute", device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.gate_mlp[-1].weight.normal_(std=0.3)
    return layer


def gradients(layer: NSAttention, x: torch.Tensor, starts: torch.Tensor | None) -> dict[str, torch.Tensor]:
    out = layer(x, cu_seqlens=starts)
    grads = torch.autograd.grad(out.square().sum(), list(layer.parameters()))
    return {"o": out.detach(), **dict(zip(dict(layer.named_parameters()), grads))}


@pytest.mark.parametrize("starts", [None, torch.tensor([0, 200, 200, 500], dtype=torch.int32)])
def test_its_calls_are_those_that_the_kernels_take(starts: torch.Tensor | None) -> None:
    layer, x = on_kernels("cpu"), torch.zeros(500, 96, dtype=torch.bfloat16)
    with stubbed_layer():
        found = gradients(layer, x[None] if starts is None else x, starts)
    assert all(found[name].shape == parameter.shape for name, parameter in layer.named_parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("starts", [None, [0, 200, 200, 1000]])
def test_on_the_kernels(starts: list[int] | None) -> None:
    """At most twice eager's error; every list holds every block, so that none depends on rounding."""
    layer = on_kernels("cuda")
    x = torch.randn(1000, 96, device="cuda", dtype=torch.bfloat16)
    x = x[None] if starts is None else x
    cu_seqlens = None if starts is None else torch.tensor(starts, dtype=torch.int32, device="cuda")
    got, straight, exact = (
        gradients(made, x.to(made.q_proj.weight.dtype), cu_seqlens)
        for made in (layer, other(layer, torch.bfloat16), other(layer, torch.float64))
    )
    for name, truth in exact.items():
        error, allowed = ((each[name].double() - truth).norm() / truth.norm() for each in (got, straight))
        assert error <= 2 * allowed + torch.finfo(torch.bfloat16).eps, f"{name}: {error}, eager {allowed}"


def other(layer: NSAttention, dtype: torch.dtype) -> NSAttention:
    """The same on eager."""
    made = deepcopy(layer).to(dtype)
    made.backend = "eager"
    return made
