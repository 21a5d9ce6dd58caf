"""The host's work for a call takes few microseconds, memory by the list, and never waits for the device."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
from layer_calls import needs_hopper, no_waits
from stub_kernels import stubs

from nsa_layer import NSAConfig, nsa
from nsa_tools.measure.peak_memory import peak_bytes
from nsa_tools.testing.cases import Case, make_inputs

SMALL = dict(Hq=4, Hkv=2, D=128, dtype=torch.bfloat16)


@pytest.mark.parametrize("lists", [False, True], ids=["choice", "lists of backward"])
def test_choice_and_lists_take_memory_by_the_list(lists: bool) -> None:
    """Eight times the tokens take eight times the bytes: no scores of all tiles by all blocks, no bitmap of them."""
    from nsa_layer.cute import selected_branch
    from nsa_layer.cute.topk_dispatch import block_topk

    case = Case(T=1, Hq=4, Hkv=2, D=64, dtype=torch.bfloat16, config=NSAConfig(q_tile=128))
    config, taken = case.config, []
    for T in (1 << 13, 1 << 16):
        q = torch.empty(1, T, 4, 64, dtype=torch.bfloat16)
        k_mean = torch.empty(1, config.compressed_length(T), 2, 64)
        indices = torch.zeros(1, 2, config.num_tiles(T), config.list_width(T), dtype=torch.int32)
        counts = torch.ones_like(indices[..., 0])

        def call() -> object:
            if not lists:
                return block_topk(q, k_mean, spec=case.spec, varlen=None)
            static = dict(spec=case.spec, backward=True, block_counts=counts)
            return selected_branch.selected_options(indices, T, (4, 2), **static)

        with stubs():
            call()
            taken.append(peak_bytes(call, "cpu"))
    assert 0 < taken[1] <= 8.5 * taken[0], taken


def test_a_warm_call_asks_nothing_of_the_dsl(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation of the DSL on two ints takes 5 microseconds and more."""
    import cutlass.cute as cute

    from flash_attn.cute.interface import _flash_attn_fwd

    q, k = (torch.empty(1, 256, H, 128, dtype=torch.bfloat16) for H in (4, 2))
    with stubs():
        _flash_attn_fwd(q, k, k, causal=True)
        monkeypatch.setattr(cute, "ceil_div", None)
        _flash_attn_fwd(q, k, k, causal=True)


def inputs_of(case: Case) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor | None]:
    inputs = make_inputs(case, "cuda")
    return {name: x.requires_grad_() for name, x in inputs.tensors().items()}, inputs.do, inputs.cu_seqlens


@pytest.mark.gpu
@pytest.mark.parametrize("starts", [None, "cuda", "cpu"], ids=["batch", "packed", "starts on the host"])
@pytest.mark.parametrize("q_tile, deterministic", [(1, False), (1, True), (128, True)])
def test_the_host_never_waits(q_tile: int, deterministic: bool, starts: str | None) -> None:
    """Starts of packed sequences that the host knows, or the GPU alone."""
    if deterministic:
        needs_hopper()
    lengths, config = starts and (700, 1, 0, 323), NSAConfig(q_tile=q_tile, deterministic=deterministic)
    case = Case(T=1024, **SMALL, lengths=lengths, config=config, compress_weights=True)
    tensors, do, cu_seqlens = inputs_of(case)
    if starts is not None:
        cu_seqlens = cu_seqlens.to(starts)
    call = lambda: nsa(**tensors, config=case.config, cu_seqlens=cu_seqlens)  # noqa: E731
    for _ in range(3):
        torch.autograd.grad(call(), list(tensors.values()), do)
    with no_waits():
        torch.autograd.grad(call(), list(tensors.values()), do)


@pytest.mark.gpu
def test_host_time() -> None:
    """A call makes three of attention, and launches eight kernels of its own: 8 to 10 times the time of one."""
    from flash_attn.cute.interface import _flash_attn_fwd

    case = Case(T=4096, Hq=32, Hkv=8, D=128, dtype=torch.bfloat16)
    tensors, _, _ = inputs_of(case)
    q, k, v = (tensors[name].detach() for name in "qkv")
    calls = dict(layer=lambda: nsa(**tensors), attention=lambda: _flash_attn_fwd(q, k, v, causal=True))
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(60):
        for name, call in calls.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - begin)
    layer, attention = (statistics.median(found[10:]) for found in seconds.values())
    assert layer < 13 * attention
