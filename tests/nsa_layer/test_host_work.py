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

import pytest
import stub_kernels
import torch
from stub_kernels import LAUNCHED, stubbed_layer, stubs

from nsa_layer import NSAConfig, checks, nsa
from nsa_layer.call import Call
from nsa_layer.cute import grad_accum
from nsa_layer.cute.varlen import Varlen
from nsa_layer.operators import tape
from nsa_layer.projection import project, project_backward
from nsa_layer.warm_up.jobs import ENVIRONMENT
from nsa_tools.measure.peak_memory import peak_bytes
from nsa_tools.testing.cases import Case, make_inputs, run


@pytest.mark.parametrize("longest", [0, tape.LONGEST], ids=["whole", "by a tape"])
def test_the_way_of_a_call_is_short(monkeypatch: pytest.MonkeyPatch, longest: int) -> None:
    """From `nsa` to the first launch: eight frames in four files, with a gradient and no graph."""
    stacks: list[traceback.StackSummary] = []

    class Noted(list):
        def append(self, launch: tuple) -> None:
            stacks.append(traceback.extract_stack()[:-2])

    monkeypatch.setattr(stub_kernels, "LAUNCHED", Noted())
    monkeypatch.setattr(tape, "LONGEST", longest)
    q, k, v = (torch.randn(1, 1024, H, 64, dtype=torch.bfloat16, requires_grad=True) for H in (4, 2, 2))
    with stubbed_layer():
        for _ in range(2):
            nsa(q, k, v, backend="cute")
        stacks.clear()
        nsa(q, k, v, backend="cute")
    frames = [(Path(frame.filename).name, frame.name) for frame in stacks[0]]
    way = frames[frames.index(("api.py", "nsa")) :]
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


BOUNDED = ((checks, "MOST_KEPT", "_passed"), (grad_accum, "MOST_KEPT", "_known"), (tape, "MOST_TAPES", "_tapes"))


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
