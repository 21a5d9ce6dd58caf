"""The host's work for a call: microseconds, nothing unbounded, no waits for the device, no imports of compilers."""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from stub_kernels import LAUNCHED, launches, stubbed_layer, stubs

from flash_attn.cute.runtime import replay
from nsa_layer import NSAConfig, checks, nsa
from nsa_layer.call import Call
from nsa_layer.cute import grad_accum
from nsa_layer.cute.selected import query_lists
from nsa_layer.cute.varlen import Varlen
from nsa_layer.projection import project, project_backward
from nsa_layer.warm_up.lookup import ENVIRONMENT
from nsa_tools.measure.peak_memory import peak_bytes
from nsa_tools.testing.cases import Case, make_inputs, run


def test_the_way_of_a_call_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """From `nsa` to the first launch: eight frames in four files, with a gradient and no graph."""
    launch, stacks = replay._Call.launch, []

    def noted(*args: object) -> object:
        stacks.append(traceback.extract_stack()[:-1])
        return launch(*args)

    monkeypatch.setattr(replay._Call, "launch", noted)
    q, k, v = (torch.randn(1, 1024, H, 64, dtype=torch.bfloat16, requires_grad=True) for H in (4, 2, 2))
    with stubbed_layer():
        for _ in range(2):
            nsa(q, k, v, backend="cute")
    frames = [(Path(frame.filename).name, frame.name) for frame in stacks[0]]
    way = [*frames[frames.index(("api.py", "nsa")) :], ("replay.py", "launch")]
    assert len(way) <= 8 and len({file for file, _ in way}) <= 4, way


@pytest.mark.parametrize("lists", [False, True], ids=["choice", "lists of backward"])
def test_choice_and_lists_take_memory_by_the_list(lists: bool) -> None:
    """Eight times the tokens take eight times the bytes: no scores of all tiles by all blocks, no bitmap of them."""
    from nsa_layer.cute import selected
    from nsa_layer.cute.select_blocks import select_blocks

    case = Case(T=1, Hq=4, Hkv=2, D=64, dtype=torch.bfloat16, config=NSAConfig(q_tile=128))
    config, taken = case.config, []
    for T in (1 << 13, 1 << 16):
        q = torch.empty(1, T, 4, 64, dtype=torch.bfloat16)
        k_mean = torch.empty(1, config.compressed_length(T), 2, 64)
        indices = torch.zeros(1, config.num_tiles(T), 2, config.list_width(T), dtype=torch.int32)
        own = Call(q, k_mean, k_mean, spec=case.spec)
        varlen = Varlen.of(own)._replace(longest_k=T)

        def call() -> object:
            if not lists:
                return select_blocks(own, varlen, k_mean, None)
            return selected.selected_options(own, varlen, indices, backward=True)

        with stubs():
            call()
            taken.append(peak_bytes(call, "cpu"))
    assert 0 < taken[1] <= 8.5 * taken[0], taken


def test_projection_copies_nothing() -> None:
    x, weight = torch.randn(2, 64, 8, 16)[:, :, :4], torch.randn(4, 16, 16)
    projected = project(x, weight)
    assert peak_bytes(lambda: project(x, weight), "cpu") == projected.nbytes
    assert peak_bytes(lambda: project_backward(projected, x, weight), "cpu") == x.nbytes + weight.nbytes


def test_a_warm_call_asks_nothing_of_the_dsl(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation of the DSL on two ints takes 5 microseconds and more."""
    import cutlass.cute as cute

    from flash_attn.cute.interface import _flash_attn_fwd

    q, k = (torch.empty(1, 256, H, 128, dtype=torch.bfloat16) for H in (4, 2))
    with stubs():
        _flash_attn_fwd(q, k, k, causal=True)
        monkeypatch.setattr(cute, "ceil_div", None)
        _flash_attn_fwd(q, k, k, causal=True)


@pytest.mark.gpu
def test_host_time() -> None:
    """A call makes three of attention, and launches eight kernels of its own: 8 to 10 times the time of one."""
    from flash_attn.cute.interface import _flash_attn_fwd

    tensors = make_inputs(Case(T=4096, Hq=32, Hkv=8, D=128, dtype=torch.bfloat16), "cuda").tensors()
    q, k, v = (tensors[name].detach() for name in "qkv")
    tensors = {name: x.requires_grad_() for name, x in tensors.items()}
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


STEPS = """
import sys
import torch
import nsa_layer
assert "cutlass" not in sys.modules, "imported with the layer"
from stub_kernels import LAUNCHED, stubbed_layer
from nsa_tools.testing.cases import Case, make_inputs

for lengths in (None, (300, 0, 70)):
    case = Case(T=300, Hq=4, Hkv=2, D=128, dtype=torch.bfloat16, lengths=lengths)
    inputs = make_inputs(case)
    leaves = {name: x.requires_grad_() for name, x in inputs.tensors().items()}
    for _ in range(3):
        with stubbed_layer():
            o = nsa_layer.nsa(**leaves, cu_seqlens=inputs.cu_seqlens, backend="cute")
            (o * inputs.do).sum().backward()  # given a gradient, PyTorch itself imports sympy
assert len(LAUNCHED) > 60, len(LAUNCHED)
print(*sorted({"quack", "triton", "sympy", "torch._dynamo", "torch._inductor"} & set(sys.modules)))
from nsa_layer.kernels import launch
launch._load_or_compile("none", ("key",), lambda: print("quack is there:", "quack" in sys.modules))
"""


def test_steps_with_compiled_kernels_import_no_compiler() -> None:
    """But what compiles finds quack there: without it the DSL takes less of Python."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = os.environ | ENVIRONMENT[90] | {"PYTHONPATH": path}
    result = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["", "quack is there: True"]


OURS = ("flash_attn.cute", "nsa_layer")
CONFIGS = [
    NSAConfig(block_counts=4, q_tile=128, window_size=192),
    NSAConfig(block_counts=4, q_tile=128, window_size=192, deterministic=True),
    NSAConfig(block_counts=4, q_tile=128, block_size=128, window_size=192),
    NSAConfig(block_counts=4, q_tile=1, window_size=192),
]


def step(draw: random.Random) -> None:
    """Forward and backward of a batch or a pack that never came before; what is launched is thrown away."""
    T = draw.randint(1, 1500)
    shape: dict[str, object] = dict(T=T, B=draw.randint(1, 2))
    if draw.random() < 0.5:
        cuts = sorted(draw.randint(0, T) for _ in range(draw.randint(0, 3)))
        shape = dict(lengths=tuple(b - a for a, b in zip([0, *cuts], [*cuts, T])))
    case = Case(Hq=4, Hkv=2, D=64, dtype=torch.bfloat16, config=draw.choice(CONFIGS), gate="given", **shape)
    run("cute", make_inputs(case))
    LAUNCHED.clear()


BOUNDED = ((checks, "MOST_KEPT", "_passed"), (grad_accum, "MOST_KEPT", "_known"), (replay, "MOST", "_calls"))


def kept() -> Iterator[tuple[str, int]]:
    """Entries of all that our modules keep and nothing bounds: caches of functions, containers, compiled kernels."""
    bounded = {id(getattr(module, name)) for module, _, name in BOUNDED}
    for module in [m for name, m in sys.modules.items() if name.startswith(OURS)]:
        for name, value in vars(module).items():
            where = f"{module.__name__}.{name}"
            if isinstance(value, type(lru_cache(len))):
                if value.cache_info().maxsize is None:
                    yield where, value.cache_info().currsize
            elif isinstance(value, (dict, list, set)) and id(value) not in bounded and not name.startswith("__"):
                yield where, len(value)
            elif hasattr(value, "compile_cache") and hasattr(value.compile_cache, "cache"):
                yield f"{where}.compile_cache", len(value.compile_cache.cache)


def test_nothing_unbounded_grows_with_new_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    draw, most, sizes = random.Random(0), dict.fromkeys((name for *_, name in BOUNDED), 0), []
    for module, bound, name in BOUNDED:
        monkeypatch.setattr(module, bound, 8)
        getattr(module, name).clear()
    with stubbed_layer():
        for _ in range(2):
            for _ in range(60):
                step(draw)
                most |= {name: max(most[name], len(getattr(module, name))) for module, _, name in BOUNDED}
            sizes.append(dict(kept()))
    before, after = sizes
    assert set(most.values()) == {8}
    assert sum(before.values()) > 100 and "nsa_layer.kernels.launch._compiled" in before
    # A kernel more for sizes that did not come before is one of a handful; one for each length would be sixty.
    grown = {name: (size, after[name]) for name, size in before.items() if after[name] > size + 4}
    assert not grown


def tensors(**sizes: int) -> tuple[torch.Tensor, ...]:
    of = dict(T=256, S=512, Hq=4, Hkv=2, D=128) | sizes
    shapes = (of["T"], of["Hq"]), (of["S"], of["Hkv"]), (of["S"], of["Hkv"])
    return tuple(torch.zeros(1, *shape, of["D"], dtype=torch.bfloat16) for shape in shapes)


def lists() -> Any:
    case = Case(T=256, Hq=4, Hkv=2, D=128, dtype=torch.bfloat16, config=NSAConfig(block_counts=4))
    call = Call(*tensors(), q_offset=offset(), spec=case.spec)
    return query_lists(call, Varlen.of(call), torch.zeros(1, 256, 2, 4, dtype=torch.int32))


def offset() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32)


CALLS = {
    "causal": lambda: (tensors(), dict(causal=True, softmax_scale=0.1)),
    "window": lambda: (tensors(), dict(window_size_left=63, window_size_right=0, q_offset=offset())),
    "compressed": lambda: (tensors(S=8), dict(causal=True, compress_factor=64, compress_offset=63, q_offset=offset())),
    "lists": lambda: (tensors(), dict(causal=True, block_sparse_tensors=lists(), pack_gqa=True, q_offset=offset())),
}


def told(call: Any, *out: torch.Tensor) -> list:
    """The launches of a call of these tensors, with addresses told by the input."""
    (q, k, v), options = call
    named = [x for value in options.values() for x in (value if isinstance(value, tuple) else (value,))]
    inputs = [q, k, v, *out, *(x for x in named if isinstance(x, torch.Tensor))]
    return launches(lambda: replay.attend(q, k, v, *[out] * bool(out), **options), inputs)[0]


@pytest.fixture
def interface(monkeypatch: pytest.MonkeyPatch) -> Iterator[list]:
    from flash_attn.cute import interface

    monkeypatch.setattr(replay, "_calls", {})  # else they may become too many in the middle of a test
    made, function = [], interface._flash_attn_fwd

    def counted(*args: Any, **options: Any) -> Any:
        made.append(options)
        return function(*args, **options)

    with stubs():
        counted.compile_cache = function.compile_cache
        monkeypatch.setattr(interface, "_flash_attn_fwd", counted)
        yield made


@pytest.mark.parametrize("name", CALLS)
def test_the_same_is_launched_for_other_tensors(interface: list, name: str) -> None:
    first, again = told(CALLS[name]()), told(CALLS[name]())
    assert len(first) == len(interface) == 1 and again == first


def test_calls_apart_are_not_taken_for_one_another(interface: list) -> None:
    """Nor those whose tensors are not known by address: k is v, or v is copied."""
    (q, k, v), options = CALLS["window"]()
    calls = [((q, k, v), options), (tensors(T=128), options), ((q, k, v), options | dict(window_size_left=31))]
    heads_first = k.transpose(1, 2).contiguous().transpose(1, 2)
    calls += [((q.half(), k.half(), v.half()), options), ((q, heads_first, v), options)]
    causal, copied = CALLS["causal"]()[1], torch.zeros(1, 512, 2, 129, dtype=torch.bfloat16)[..., :128]
    unknown = [((q, k, x), causal) for x in (k, copied)]
    for call in (calls + unknown) * 2:
        told(call)
    assert len(interface) == len(calls) + 2 * len(unknown)


def test_gradients_are_left_out_and_outputs_that_are_given_are_written(interface: list) -> None:
    """By the first call and by those after."""
    (q, k, v), options = CALLS["causal"]()
    o, lse = torch.zeros_like(q), torch.zeros(1, 4, 256)
    for x in (q, q.detach().requires_grad_()):
        with torch.no_grad():
            noted = told(((x, k, v), options), o, lse)
        places = [arg[0] for _, args in noted for arg in args if isinstance(arg[0], tuple)]
        assert places == [("input", i) for i in range(5)]
    assert len(interface) == 1
