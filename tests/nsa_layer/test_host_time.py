"""The host's work for a call: the same launches every time, few microseconds, and no waiting for the device."""

from __future__ import annotations

import statistics
import time
import warnings
from itertools import accumulate

import pytest
import torch
from stub_kernels import launches, stubs

from nsa_layer import NSAConfig, nsa
from nsa_layer.call_spec import Problem
from nsa_layer.cute.packing import Packing
from nsa_tools.measure.peak_memory import peak_bytes
from nsa_tools.testing.cases import DIFFERENTIABLE, Case, make_inputs

WINDOW = 200


def attention_calls(case: Case, seed: int) -> tuple[dict[str, tuple[list, dict]], list[torch.Tensor]]:
    """Arguments of the six attention calls of the layer, and all tensors among them."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    config, lengths = case.config, case.lengths or (case.T,)
    tokens = (case.B, case.T) if case.lengths is None else (sum(lengths),)
    blocks = [config.compressed_length(n) for n in lengths]
    of_blocks = (case.B, *blocks) if case.lengths is None else (sum(blocks),)
    q, k, v = draw(*tokens, case.Hq, case.D), draw(*tokens, case.Hkv, case.D), draw(*tokens, case.Hkv, case.D)
    k_cmp, v_cmp = draw(*of_blocks, case.Hkv, case.D), draw(*of_blocks, case.Hkv, case.D)
    o, do, lse = draw(*q.shape), draw(*q.shape), draw(*tokens, case.Hq).float().mT.contiguous()
    starts = [torch.tensor([0, *n]).cumsum(0).to(torch.int32) for n in (lengths, blocks)]
    packed, packed_cmp = {}, {}
    if case.lengths is not None:
        packed = dict(cu_seqlens_q=starts[0], max_seqlen_q=max(lengths))
        packed_cmp = packed | dict(cu_seqlens_k=starts[1], max_seqlen_k=max(blocks))
        packed |= dict(cu_seqlens_k=starts[0], max_seqlen_k=max(lengths))
    compress = dict(causal=True, compress_factor=config.stride, compress_offset=config.offset) if case.causal else {}
    window = dict(window_size_left=WINDOW, window_size_right=0 if case.causal else WINDOW)
    lists = [selected(case, generator, backward, starts[0] if packed else None) for backward in (False, True)]
    branches = {
        "cmp": ((k_cmp, v_cmp), [compress | packed_cmp] * 2),
        "slc": ((k, v), [sparsity.options() | packed for sparsity in lists]),
        "swa": ((k, v), [window | packed] * 2),
    }
    calls: dict[str, tuple[list, dict]] = {}
    for name, (pair, (forward, backward)) in branches.items():
        calls[f"{name} fwd"] = [q, *pair], forward | dict(softmax_scale=0.1, return_lse=True)
        calls[f"{name} bwd"] = (
            [q, *pair, o, do, lse],
            backward | dict(softmax_scale=0.1, deterministic=config.deterministic),
        )
    given = [q, k, v, o, do, lse, k_cmp, v_cmp, *starts]
    given += [
        t for sparsity in lists for t in (*sparsity.tensors, *sparsity.aux_tensors) if isinstance(t, torch.Tensor)
    ]
    return calls, given


def selected(case: Case, generator: torch.Generator, backward: bool, cu_seqlens: torch.Tensor | None) -> object:
    """The selected branch's lists for a random choice."""
    from nsa_layer.cute import branches

    config, lengths = case.config, case.lengths or (case.T,)
    heads, width = (case.B, case.Hkv), config.list_width(max(lengths))
    parts = []
    for length in lengths:
        scores = torch.rand(*heads, config.num_tiles(length), config.num_blocks(length), generator=generator)
        chosen = scores.topk(config.list_width(length)).indices.sort(-1).values.to(torch.int32)
        parts.append(torch.nn.functional.pad(chosen, (0, width - chosen.shape[-1]), value=-1))
    indices = parts[0] if case.lengths is None else torch.cat(parts, 2)[0]
    tile = (128, 64 if config.block_size == 64 else 128)
    static = dict(problem=case.problem, tile=tile, backward=backward, cu_seqlens=cu_seqlens)
    static |= dict(ordered=backward and config.deterministic)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(branches, "_on_hopper", lambda device: True)
        return branches.selected_sparsity(indices, sum(lengths), (case.Hq, case.Hkv), **static)


SMALL = dict(Hq=4, Hkv=2, D=128, dtype=torch.bfloat16)
CASES = [
    Case(T=700, **SMALL),
    Case(T=700, **SMALL, config=NSAConfig(deterministic=True)),
    Case(T=512, **SMALL, config=NSAConfig(block_size=32)),
    Case(T=300, B=2, Hq=2, Hkv=2, D=64, dtype=torch.bfloat16, config=NSAConfig(block_size=128)),
    Case(T=300, **SMALL, causal=False),
    Case(lengths=(300, 70, 517), **SMALL),
    Case(lengths=(300, 70, 517), **SMALL, config=NSAConfig(deterministic=True)),
]


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_later_calls_launch_what_the_first_ones_do(case: Case) -> None:
    from flash_attn.cute import interface
    from flash_attn.cute.prepared_calls import Prepared

    own = {"fwd": interface._flash_attn_fwd, "bwd": interface._flash_attn_bwd}
    called = []
    noted = {way: lambda *a, way=way, **k: called.append(1) or own[way](*a, **k) for way in own}
    prepared = {way: Prepared(function) for way, function in noted.items()}
    kept = []
    for seed in range(4):
        calls, given = attention_calls(case, seed)
        kept.append((calls, given))
        for name, (args, options) in calls.items():
            called.clear()
            with stubs():
                got = launches(lambda: prepared[name[4:]](*args, **options), given)
                want = launches(lambda: own[name[4:]](*args, **options), given)
            assert len(want[0]) >= 1 and got == want, name
            assert len(called) == (1 if seed < 2 else 0), name
    assert prepared["fwd"].refusals == prepared["bwd"].refusals == []


@pytest.mark.parametrize("lists", [False, True], ids=["choice", "lists of backward"])
def test_choice_and_lists_take_memory_by_the_list(lists: bool) -> None:
    """Eight times the tokens take eight times the bytes: no scores of all tiles by all blocks, no bitmap of them."""
    from nsa_layer.cute import branches
    from nsa_layer.cute.topk_dispatch import choose

    case = Case(T=1, Hq=4, Hkv=2, D=64, dtype=torch.bfloat16)
    config, taken = case.config, []
    for T in (1 << 13, 1 << 16):
        q = torch.empty(1, T, 4, 64, dtype=torch.bfloat16)
        k_mean = torch.empty(1, config.compressed_length(T), 2, 64)
        indices = torch.zeros(1, 2, config.num_tiles(T), config.list_width(T), dtype=torch.int32)
        counts = torch.ones_like(indices[..., 0])

        def call() -> object:
            if not lists:
                return choose(q, k_mean, problem=case.problem, packing=None)
            tile = branches.backward_tile(q.device, config.block_size)
            static = dict(problem=case.problem, tile=tile, backward=True, block_counts=counts)
            return branches.selected_sparsity(indices, T, (4, 2), **static)

        with stubs():
            call()
            taken.append(peak_bytes(call, "cpu"))
    assert 0 < taken[1] <= 8.5 * taken[0], taken


@pytest.mark.parametrize("config", [NSAConfig(), NSAConfig(block_size=64, block_stride=16), NSAConfig(block_size=32)])
def test_packed_starts(config: NSAConfig) -> None:
    lengths = (0, 1, 31, 32, 33, 63, 64, 65, 79, 80, 81, 0, 1000)
    packing = Packing.of(Problem(config, True, 1.0, lengths), torch.device("cpu"))
    assert packing.cu_seqlens.tolist() == [0, *accumulate(lengths)] and packing.cu_seqlens.dtype == torch.int32
    for starts, total, counted in (
        (packing.cu_blocks, packing.total_blocks, config.compressed_length),
        (packing.cu_tiles, packing.total_tiles, config.num_tiles),
    ):
        assert starts.tolist() == [0, *accumulate(map(counted, lengths))] and starts.dtype == torch.int32
        assert total == starts[-1]
    assert (packing.longest, packing.longest_blocks) == (1000, config.compressed_length(1000))


def inputs_of(case: Case) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor | None]:
    inputs = make_inputs(case, "cuda")
    named = {name: getattr(inputs, name) for name in DIFFERENTIABLE}
    tensors = {name: x.requires_grad_() for name, x in named.items() if x is not None}
    return tensors, inputs.do, inputs.cu_seqlens


@pytest.mark.gpu
@pytest.mark.parametrize("starts", [None, "cuda", "cpu"], ids=["batch", "packed", "starts on the host"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_host_waits_once_at_most(deterministic: bool, starts: str | None) -> None:
    """Never, but for packed sequences once a forward call, to read where they start if that is on the GPU."""
    if deterministic and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    lengths = None if starts is None else (700, 1, 0, 323)
    case = Case(T=1024, **SMALL, lengths=lengths, config=NSAConfig(deterministic=deterministic), compress_weights=True)
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
            o = call()
            forward = len(waits)
            torch.autograd.grad(o, list(tensors.values()), do)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (forward, len(waits)) == ((1, 1) if starts == "cuda" else (0, 0)), [str(w.message) for w in waits]


@pytest.mark.gpu
def test_host_time() -> None:
    """The target is 250 microseconds; a shared machine gets twice that before this fails."""
    case = Case(T=4096, Hq=32, Hkv=8, D=128, dtype=torch.bfloat16)
    tensors, _, _ = inputs_of(case)
    microseconds = []
    for _ in range(60):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        nsa(**tensors)
        microseconds.append((time.perf_counter() - begin) * 1e6)
    assert statistics.median(microseconds[10:]) < 500
