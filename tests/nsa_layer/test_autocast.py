"""`nsa` under torch.autocast is `nsa` on inputs cast by hand: the same bits, forward and backward."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product

import pytest
import torch
from layer_calls import needs_hopper
from stub_kernels import launches, stubbed_layer

from nsa_layer import NSAConfig, NSAttention, nsa
from nsa_layer.rope import RotaryEmbedding
from nsa_tools.testing.cases import Case, make_inputs

SMALL = NSAConfig(block_size=16, block_counts=4, q_tile=32, window_size=24)
HALF = [torch.bfloat16, torch.float16]
CASES = [
    Case(B=2, T=90, config=SMALL, compress_weights=True),
    Case(B=2, T=90, config=SMALL, gate="given"),
    Case(lengths=(33, 0, 57), config=SMALL, compress_weights=True, gate="none"),
    Case(B=2, T=90, config=SMALL.replace(q_tile=1, rule="index", branches=("selected",)), index_dim=8),
]
TILES = NSAConfig(block_counts=5, q_tile=128, deterministic=True)
ON_GPU = [
    Case(T=700, Hq=4, Hkv=2, D=64, config=NSAConfig(block_counts=5, deterministic=True), compress_weights=True),
    Case(lengths=(300, 0, 400), Hq=4, Hkv=2, D=128, config=TILES, gate="given"),
]

Tensors = dict[str, torch.Tensor]


def leaves(case: Case, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensors, torch.Tensor, torch.Tensor | None]:
    inputs = make_inputs(case, device)
    named = {name: x.to(dtype).requires_grad_() for name, x in inputs.tensors().items()}
    return named, inputs.do, inputs.cu_seqlens


def outcome(
    case: Case, given: Tensors, do: torch.Tensor, starts: torch.Tensor | None, backend: str, half: torch.dtype,
    *, autocast: bool, backward_too: bool = False,
) -> Tensors:  # fmt: skip
    """Everything that comes out, under autocast or for inputs that are cast by hand."""
    region = torch.autocast(do.device.type, dtype=half)
    static = dict(config=case.config, cu_seqlens=starts, backend=backend, return_aux=True)
    with region if autocast else nullcontext():
        o, aux, *loss = nsa(
            **{name: x if autocast else x.to(half) for name, x in given.items()},
            **static,
            return_index_loss=case.index_dim > 0,
        )
    with region if backward_too else nullcontext():
        grads = torch.autograd.grad([o, *loss], list(given.values()), [do.to(half), *map(torch.ones_like, loss)])
    aux = {name: x for name, x in vars(aux).items() if x is not None}
    return (
        {"o": o}
        | {"index_loss": x for x in loss}
        | aux
        | {f"d{name}": grad for name, grad in zip(given, grads, strict=True)}
    )


def assert_same_bits(got: Tensors, want: Tensors) -> None:
    assert got.keys() == want.keys()
    for name, x in got.items():
        assert x.dtype == want[name].dtype and torch.equal(x, want[name]), name


CALLS = [(backend, "cpu", case) for backend in ("eager", "reference") for case in CASES]
for backend, case in product(("cute", "eager"), ON_GPU):
    CALLS.append(pytest.param(backend, "cuda", case, marks=pytest.mark.gpu))


@pytest.mark.parametrize("half", HALF)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("backend, device, case", CALLS, ids=repr)
def test_inputs_are_cast(backend: str, device: str, case: Case, dtype: torch.dtype, half: torch.dtype) -> None:
    """Backward under autocast multiplies nothing in half precision that forward did not."""
    if backend == "cute":
        needs_hopper()
    given, too = leaves(case, dtype, device), device == "cuda" or backend == "eager" and half == torch.bfloat16
    got = outcome(case, *given, backend, half, autocast=True, backward_too=too)
    want = outcome(case, *given, backend, half, autocast=False)
    assert got["o"].dtype == half and got["gates"].dtype == torch.float32 and got["dq"].dtype == dtype
    assert_same_bits(got, want)


@pytest.mark.parametrize("case", ON_GPU, ids=repr)
def test_kernels_are_launched_on_cast_inputs(case: Case) -> None:
    def launched(autocast: bool) -> list:
        given = leaves(case, torch.float32)
        with stubbed_layer():
            call = lambda: outcome(case, *given, "cute", torch.bfloat16, autocast=autocast, backward_too=autocast)  # noqa: E731
            return launches(call, [])[0]

    with_autocast = launched(True)
    assert len(with_autocast) > 15 and with_autocast == launched(False)


@pytest.mark.parametrize("backend", ["eager", "reference"])
def test_double_precision_is_left_alone(backend: str) -> None:
    (given, _, _), static = leaves(CASES[0], torch.float64), dict(config=SMALL, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = nsa(**given, **static)
        with pytest.raises(TypeError, match="k must have q's dtype torch.float64, got torch.bfloat16"):
            nsa(**given | dict(k=given["k"].float()), **static)
    assert o.dtype == torch.float64 and torch.equal(o, nsa(**given, **static))


def test_inputs_of_several_dtypes() -> None:
    """As long as they are one after the cast."""
    given, _, _ = leaves(CASES[0], torch.float32)
    mixed = given | dict(k=given["k"].half(), v=given["v"].bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = nsa(**mixed, config=SMALL)
    assert torch.equal(o, nsa(**{name: x.bfloat16() for name, x in mixed.items()}, config=SMALL))


def test_autocast_of_another_kind_of_device() -> None:
    given, _, _ = leaves(CASES[0], torch.float32)
    want = nsa(**given, config=SMALL)
    torch.set_autocast_enabled("cuda", True)
    try:
        assert torch.equal(nsa(**given, config=SMALL), want)
    finally:
        torch.set_autocast_enabled("cuda", False)
    with torch.autocast("cpu", enabled=False):
        assert torch.equal(nsa(**given, config=SMALL), want)


@pytest.mark.parametrize("enabled", [False, True])
def test_the_layer_on_the_meta_device(enabled: bool) -> None:
    """The meta device has no autocast."""
    layer = NSAttention(48, num_heads=4, num_kv_heads=2, config=SMALL, compression="linear", device="meta")
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        out = layer(torch.empty(2, 90, 48, device="meta"))
    assert out.shape == (2, 90, 48) and out.dtype == torch.float32 and out.device.type == "meta"


@pytest.mark.parametrize("half", HALF)
def test_the_layer_is_its_parts(half: torch.dtype) -> None:
    torch.manual_seed(0)
    rope = RotaryEmbedding(12)
    layer = NSAttention(48, num_heads=4, num_kv_heads=2, config=SMALL, compression="linear", rope=rope)
    torch.nn.init.normal_(layer.gate_weight)
    x = torch.randn(2, 90, 48)
    names = ("gate_weight", "compress_k_weight", "compress_v_weight")
    weights = {name: getattr(layer, name).to(half) for name in names}
    with torch.autocast("cpu", dtype=half):
        q, k, v = (proj(x).unflatten(-1, (-1, 12)) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
        q, k = rope(q, k, torch.arange(90))
        with torch.autocast("cpu", enabled=False):
            o = nsa(q, k, v, config=SMALL, **weights)
        assert torch.equal(layer(x), layer.o_proj(o.flatten(-2)))
