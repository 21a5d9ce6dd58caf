"""`NSAttention` by its definition, its gradients, parameters and state. Autocast: `test_autocast.py`."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from stub_kernels import stubbed_layer

from nsa_layer import NSAConfig, NSAttention, nsa
from nsa_layer.checks import starts_of_lengths
from nsa_layer.rope import RotaryEmbedding

TILES = NSAConfig(block_size=8, block_counts=4, q_tile=16, window_size=8)
TOKENS = NSAConfig.paper(block_size=8, compress_size=4, compress_stride=2, block_counts=4, window_size=8)
DIM, HQ, HKV, D, DV = 24, 4, 2, 6, 4
PAPER = dict(compression="mlp", kv_per_branch=True, gate="input")
OPTIONS = [
    PAPER,
    *({name: value} for name, value in PAPER.items()),
    dict(compression="linear", kv_per_branch=True),
    dict(compression="linear", bias=True),
    dict(gate="linear", bias=True, o_bias=False, rope=None),
    dict(config=TILES, num_kv_heads=4, head_dim=10),
]


def make(**options: object) -> NSAttention:
    """A small layer in fp64 none of whose parameters is zero."""
    torch.manual_seed(0)
    defaults = dict(num_heads=HQ, num_kv_heads=HKV, head_dim_v=DV, config=TOKENS, backend="eager")
    rope = RotaryEmbedding(options.get("head_dim", D))
    layer = NSAttention(DIM, **defaults | dict(rope=rope) | options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def tokens(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def compressed(layer: NSAttention, name: str, x: torch.Tensor) -> torch.Tensor:
    """[T, Hkv, D] -> [Tc, Hkv, D], block by block and head by head."""
    network, config = layer.networks.get(name), layer.config
    weight, rows = getattr(layer, f"compress_{name[0]}_weight"), [x[:0]]
    for start in range(0, len(x) - config.span + 1, config.stride):
        for h in range(x.shape[1]):
            block = x[start : start + config.span, h]
            if network is not None:
                row = F.gelu((block + network.position[h]).flatten() @ network.up[h]) @ network.down[h]
            else:
                row = block.mean(0) if weight is None else block.mean(0) @ weight[h]
            rows.append(row.view(1, 1, -1))
    return torch.cat([rows[0].reshape(-1, 1, x.shape[-1]), *rows[1:]]).view(-1, *x.shape[1:])


def by_definition(layer: NSAttention, x: torch.Tensor, lengths: tuple[int, ...], **options: object) -> torch.Tensor:
    """The layer's parts around the reference, of x [1, T, dim] or packed [total, dim]."""
    projections = dict(q=layer.q_proj, k=layer.k_proj, v=layer.v_proj, **layer.branch_proj or {})
    given = {
        name: (x @ part.weight.mT + (0 if part.bias is None else part.bias)).unflatten(
            -1, (layer.num_heads if name == "q" else layer.num_kv_heads, -1)
        )
        for name, part in projections.items()
    }
    positions = torch.cat([torch.arange(length) for length in lengths])
    for name in given if layer.rope is not None else ():
        if name[0] in "qk":
            given[name] = layer.rope(given[name], given[name], positions)[0]
    for name in ("k_cmp", "v_cmp"):
        parts = given.get(name, given[name[0]]).flatten(0, -3).split(lengths)
        rows = torch.cat([compressed(layer, name, part) for part in parts])
        given[name] = rows.view(*x.shape[:-2], -1, *rows.shape[1:])
    if layer.gate == "query":
        given["gate_weight"] = layer.gate_weight
    else:
        given["gates"] = layer.gate_mlp(x).sigmoid().unflatten(-1, (HQ, 3))
    o = nsa(**given, config=layer.config, backend="reference", **options).flatten(-2)
    return o @ layer.o_proj.weight.mT + (0 if layer.o_proj.bias is None else layer.o_proj.bias)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_layer_is_its_parts_around_the_reference(options: dict[str, object]) -> None:
    layer, biased = make(**options), options.get("bias", False)
    assert (layer.v_proj.bias is not None) == biased
    assert (layer.o_proj.bias is not None) == options.get("o_bias", biased)
    for T in (1, 3, 4, 45):
        for causal in (True, False) if T == 45 else (True,):
            x = tokens(1, T)
            out, aux = layer(x, causal=causal, return_aux=True)
            torch.testing.assert_close(out, by_definition(layer, x, (T,), causal=causal))
            assert out.dtype == x.dtype and aux.gates.shape == (1, T, HQ, 3)
    x, lengths = tokens(60), (20, 0, 3, 1, 36)
    starts = starts_of_lengths(lengths)
    torch.testing.assert_close(layer(x, cu_seqlens=starts), by_definition(layer, x, lengths, cu_seqlens=starts))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_reach_every_parameter_and_none_comes_from_later_tokens(options: dict[str, object]) -> None:
    layer, x, t = make(**options), tokens(1, 50).requires_grad_(), 33
    names, parameters = zip(*layer.named_parameters())
    for name, grad in zip(names, torch.autograd.grad(layer(x).square().sum(), parameters), strict=True):
        # Also for the bias of k, which without a rotation would move all scores of a query alike.
        assert grad.isfinite().all() and (grad.any() or (name == "k_proj.bias" and layer.rope is None)), name
    (dx,) = torch.autograd.grad(layer(x)[:, : t + 1].sum(), x)
    assert not dx[:, t + 1 :].any() and dx[:, : t + 1].any()


def test_positions_are_counted_within_each_sequence() -> None:
    seen: list[torch.Tensor] = []

    def rope(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(positions)
        return q, k

    layer = make(rope=rope)
    layer(tokens(2, 5))
    layer(tokens(7), cu_seqlens=starts_of_lengths((3, 0, 4)))
    given = torch.arange(10, dtype=torch.int32).view(2, 5)
    layer(tokens(2, 5), positions=given)
    assert [p.tolist() for p in seen] == [[0, 1, 2, 3, 4], [0, 1, 2, 0, 1, 2, 3], given.tolist()]


@pytest.mark.parametrize("options", [PAPER, dict(compression="linear", bias=True)], ids=str)
def test_state_dict_and_deepcopy_keep_every_value_and_a_reset_draws_them_anew(options: dict[str, object]) -> None:
    layer, x = make(**options), tokens(1, 30)
    other = NSAttention(DIM, num_heads=HQ, num_kv_heads=HKV, head_dim_v=DV, config=TOKENS, rope=layer.rope, **options)
    initial, expected = deepcopy(other).state_dict(), layer(x)
    other.double().load_state_dict(layer.state_dict())
    assert torch.equal(other(x), expected)
    copied = deepcopy(layer)
    layer.reset_parameters()
    assert torch.equal(copied(x), expected)
    for each in (layer, NSAttention(DIM, num_heads=HQ, num_kv_heads=HKV, config=TOKENS, **options)):
        gates = each(torch.randn(1, 40, DIM).to(each.q_proj.weight.dtype), return_aux=True)[1].gates
        assert (gates == 0.5).all()
    same = {name for name, value in layer.named_parameters() if torch.equal(value, initial[name].double())}
    fixed = ("gate_weight", "compress_k_weight", "compress_v_weight", "gate_mlp.2.weight", "gate_mlp.2.bias")
    assert same == {name for name in initial if name in fixed}
    for weight in (layer.compress_k_weight, layer.compress_v_weight):
        assert weight is None or (weight == torch.eye(weight.shape[-1])).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_and_under_autocast(dtype: torch.dtype) -> None:
    layer, x = make(**PAPER, bias=True).float(), tokens(2, 40).float()
    with torch.autocast("cpu", dtype=dtype):
        assert layer(x).dtype == dtype
    layer = layer.to(dtype)
    out = layer(x.to(dtype))
    assert out.dtype == dtype and out.isfinite().all() and {p.dtype for p in layer.parameters()} == {dtype}


def test_on_a_device_that_is_not_waited_for() -> None:
    layer = NSAttention(DIM, num_heads=HQ, num_kv_heads=HKV, **PAPER, device="meta", dtype=torch.float64)
    x = torch.empty(1, 40, DIM, device="meta", dtype=torch.float64, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == x.shape and {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", x.dtype)}


def test_repr_says_what_the_layer_is() -> None:
    text = repr(make(**PAPER))
    for part in ("num_heads=4", "num_kv_heads=2", "head_dim=6", "block_size=8", "backend='eager'", "RotaryEmbedding(6"):
        assert part in text
    for part in ("compression='mlp'", "kv_per_branch=True", "gate='input'"):
        assert part in text


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
