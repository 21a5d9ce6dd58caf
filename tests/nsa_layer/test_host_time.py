"""The host's work for a call takes few microseconds, memory by the list, and never waits for the device."""

from __future__ import annotations

import statistics
import time
import warnings
from itertools import accumulate

import pytest
import torch
from stub_kernels import stubs

from nsa_layer import NSAConfig, nsa
from nsa_layer.call_spec import CallSpec
from nsa_layer.cute.packing import Packing
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
                return block_topk(q, k_mean, spec=case.spec, packing=None)
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


@pytest.mark.parametrize(
    "config", [NSAConfig(), NSAConfig(block_size=64, compress_stride=16), NSAConfig(block_size=128, q_tile=128)]
)
def test_packed_starts(config: NSAConfig) -> None:
    lengths = (0, 1, 31, 32, 33, 63, 64, 65, 79, 80, 81, 0, 1000)
    packing = Packing.of(CallSpec(config, True, 1.0, lengths), torch.device("cpu"))
    assert packing.cu_seqlens.tolist() == [0, *accumulate(lengths)] and packing.cu_seqlens.dtype == torch.int32
    for starts, total, counted in (
        (packing.cu_blocks, packing.total_blocks, config.compressed_length),
        (packing.cu_tiles, packing.cu_tiles[-1], config.num_tiles),
        (packing.cu_kv_tiles, packing.total_kv_tiles, config.num_blocks),
    ):
        assert starts.tolist() == [0, *accumulate(map(counted, lengths))] and starts.dtype == torch.int32
        assert total == starts[-1]
    assert (packing.longest, packing.longest_blocks) == (1000, config.compressed_length(1000))


def inputs_of(case: Case) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor | None]:
    inputs = make_inputs(case, "cuda")
    return {name: x.requires_grad_() for name, x in inputs.tensors().items()}, inputs.do, inputs.cu_seqlens


@pytest.mark.gpu
@pytest.mark.parametrize("starts", [None, "cuda", "cpu"], ids=["batch", "packed", "starts on the host"])
@pytest.mark.parametrize("q_tile, deterministic", [(1, False), (1, True), (128, True)])
def test_the_host_never_waits(q_tile: int, deterministic: bool, starts: str | None) -> None:
    """Starts of packed sequences that the host knows, or the GPU alone."""
    if deterministic and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    lengths, config = (
        None if starts is None else (700, 1, 0, 323),
        NSAConfig(q_tile=q_tile, deterministic=deterministic),
    )
    case = Case(T=1024, **SMALL, lengths=lengths, config=config, compress_weights=True)
    tensors, do, cu_seqlens = inputs_of(case)
    if starts is not None:
        cu_seqlens = cu_seqlens.to(starts)
    call = lambda: nsa(**tensors, config=case.config, cu_seqlens=cu_seqlens)  # noqa: E731
    for _ in range(3):
        torch.autograd.grad(call(), list(tensors.values()), do)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            torch.autograd.grad(call(), list(tensors.values()), do)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not waits, [str(w.message) for w in waits]


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
