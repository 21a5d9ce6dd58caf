"""Kernels compiled ahead of a call are those that the call launches, and it finds them."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nsa_layer import NSAConfig
from nsa_layer.call import Signature
from nsa_layer.warm_up import api, lookup
from nsa_layer.warm_up.jobs import ENVIRONMENT

# The layer's own way through a call, with fake tensors: autograd does not take those on a GPU that is not there.
OWN = """
import os
import sys
import warnings
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nsa_layer import NSAConfig, MemoryPolicy
from nsa_layer.call import OWN_KEYS, Call, CallSpec, KVCache, Signature
from nsa_layer.warm_up import lookup
from nsa_layer.warm_up.lookup import kernel_files
from nsa_tools.shape import Shape
from nsa_layer.cute import backend, kvcache
from nsa_layer.cute.memory_plan import MemoryPlan

warnings.simplefilter("ignore")

def shape(**changes):
    given = dict(B=1, T=300, Hq=4, Hkv=2, D=64, Dv=64, dtype=torch.bfloat16, config=NSAConfig())
    return Shape(**given | changes).signature()

def own_call(call, bounded=False):
    spec, given = call.spec, {name: torch.empty(of, dtype=kind, device="cuda") for name, of, kind in call.tensors}
    if call.plan is None:
        own = Call.of(given)._replace(spec=spec)
        assert Signature.of(own) == call
        return kvcache.step(own, memory=MemoryPolicy(budget=1 << 60))
    own = Call(**given, spec=spec)
    if bounded:
        starts = torch.empty(len(spec.lengths) + 1, dtype=torch.int32, device="cuda")
        spec = replace(spec, lengths=None, bound=max(spec.lengths))
        own = own._replace(spec=spec)
        assert Signature.of(own, call.plan, backward=call.backward) == call
        own = own._replace(cu_seqlens=starts)
    o, saved = backend.forward(own, plan=call.plan)
    if call.backward:
        backend.backward(own, saved, torch.empty_like(o), plan=call.plan, o=o)

def asked(call, **how):
    names = {}
    with lookup.lookups(lambda cache, name: names.setdefault(name, True)):
        with FakeTensorMode(), lookup.OnMeta(), torch.no_grad():
            own_call(call, **how)
    return list(names)
"""
NAMED = """
tiles = NSAConfig(q_tile=128)
calls = [dict(T=40), dict(Hkv=4), dict(config=tiles.replace(block_size=256)), dict(policy=MemoryPolicy(budget=0))]
calls += [dict(config=config, gate="given", compress_weights=True) for config in (NSAConfig(), tiles)]
calls += [dict(gate="none", backward=False), dict(lists=(2, 5)), dict(lists=(4, 5)), dict(own_keys=OWN_KEYS)]
calls += [dict(own_keys=("v_cmp", "k_win"), config=tiles), dict(T=100, keys=300, own_keys=("k_cmp", "v_cmp"))]
calls += [dict(T=150, lengths=(50, 100), keys=300, lengths_k=(100, 200))]
chosen = kernel_files(shape())
for more in calls:
    call = shape(**more)
    names = kernel_files(call)
    assert list(names) == asked(call) and names == kernel_files(call), (call, names)
    assert len(names) > (10 if call.backward else 4) and names != chosen, names
    if own := more.get("own"):
        assert any("pool/" in name for name in names) == (not {"k_cmp", "v_cmp"} <= {*own}), names
for q_tile in (1, 32, 128):
    call = shape(T=3000, lengths=(2000, 1000), config=NSAConfig(q_tile=q_tile))
    assert asked(call, bounded=True) == list(kernel_files(call)), call
number = torch.int32
longer = ((20, 2, 5), ((100, 200), (99, 201)), 300)
for lists, lengths, keys in (((1, 300, 2, 5), (None, None), 300), ((1, 300, 4, 5), (None, None), 400), longer):
    packed = lengths[0] is not None
    lead, config = () if packed else (1,), NSAConfig(q_tile=16 if packed else 1, branches=("selected",), window_size=0)
    spec = CallSpec(config, True, 0.125, *lengths, listed=True)
    q, k = (*lead, 300, 4, 64), (*lead, keys, 2, 64)
    for backward in (False, True):
        given = [(name, of, torch.bfloat16) for name, of in (("q", q), ("k", k), ("v", k))]
        given += [("block_indices", lists, number)]
        given += [("q_offset", (2 if packed else 1,), number)] * (keys > 300 or packed)
        call = Signature(tuple(given), spec, MemoryPlan(((0, 2),), (False,) * 3), backward)
        assert list(kernel_files(call)) == asked(call), call
        assert len(asked(call)) == (8 if backward else 2), asked(call)
cached = ((None, None, (2, 30)), ((7, 53), None, (60,)), (None, 60, (60,)))
for lengths, bound, lead, D in (*((*each, 64) for each in cached), (*cached[1], 80)):
    new, pages = dict(q=4, k=2, v=2), dict(k_cache=64, v_cache=64, k_cmp_cache=1, v_cmp_cache=1)
    tensors = [(name, (*lead, H, D), torch.bfloat16) for name, H in new.items()]
    tensors += [(name, (9, page, 2, D), torch.bfloat16) for name, page in pages.items()]
    tensors += [("cache_seqlens", (2,), number), ("page_table", (2, 4), number), ("cmp_page_table", (2, 4), number)]
    tensors += [("cu_seqlens", (3,), number)] * (lead == (60,))
    order = Call._fields + KVCache._fields
    tensors = tuple(sorted(tensors, key=lambda x: order.index(x[0])))
    call = Signature(tensors, CallSpec(NSAConfig(), True, 0.125, lengths, bound=bound))
    assert list(kernel_files(call)) == asked(call) and len(asked(call)) == 11, (call, asked(call))
"""
CALLED = """
from nsa_layer.warm_up import api
api._helper.order = None  # nothing has to be compiled
with FakeTensorMode(), lookup.OnMeta(), torch.no_grad():
    own_call(shape(gate="none", backward=False))
print(*sorted({"quack", "flash_attn.cute.flash_fwd_sm90"} & set(sys.modules)))
"""

# The call compiles what it needs, forward alone, while the helper compiles all of the step.
BESIDE = """
import time
with FakeTensorMode(), lookup.OnMeta(), torch.no_grad():
    own_call(shape(gate="none", backward=False))
    own_call(shape(gate="none", backward=False))
from nsa_layer import NSAConfig
from nsa_layer.warm_up import api
from nsa_layer.warm_up.lookup import kernel_files
(call,) = api._helper.ordered
assert call.backward
files, deadline = kernel_files(call), time.monotonic() + 300
while not all(file.exists() for file in files.values()):
    assert time.monotonic() < deadline and api._helper.process.poll() is None, files
    time.sleep(0.1)
assert len(files) > 10
"""


def run(command: list[str], cache: Path, **environment: str) -> str:
    """The output of a process whose kernels are kept in `cache`."""
    kept = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(cache)}
    environment = os.environ | kept | {"CUDA_VISIBLE_DEVICES": ""} | environment
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, timeout=540)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_named_kernels_are_those_that_the_layer_asks_for(tmp_path: Path) -> None:
    run(["-c", OWN + NAMED], tmp_path, **ENVIRONMENT[90])
    assert not [*tmp_path.rglob("*.o")], "nothing is compiled to find names"


def test_names_are_found_where_pytorch_with_cuda_sees_no_gpu() -> None:
    """Operators that look for the GPU raise there; `lookup` runs them on meta tensors."""

    def look(x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "cuda":
            raise RuntimeError("No CUDA GPUs are available")
        return x.mT.contiguous()

    with FakeTensorMode():
        found = lookup.OnMeta().__torch_function__(look, (), (torch.empty(3, 5, device="cuda"),))
    assert (found.device.type, found.shape, found.stride()) == ("cuda", (5, 3), (3, 1))


@pytest.mark.sweep
@pytest.mark.xdist_group("sm_90")
def test_a_call_finds_what_was_compiled_for_it(tmp_path: Path) -> None:
    shape = ["--seqlen=300", "--heads=4", "--kv-heads=2", "--head-dim=64", "--mode=forward", "--ungated"]
    command = ["-m", "nsa_layer", "compile", "--arch=90", "--jobs=2", *shape]
    said = run(command, tmp_path)
    kernels = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.o")}
    compiled = [line.split("|")[3:5] for line in said.splitlines() if line.startswith("| sm_90a ")]
    assert len(kernels) == sum(int(count) for count, _ in compiled) >= 6
    assert run(["-c", OWN + CALLED], tmp_path, **ENVIRONMENT[90]) == "\n", "it compiles and warns of nothing"
    cached = [line.split("|")[4] for line in run(command, tmp_path).splitlines() if line.startswith("| sm_90a ")]
    assert sum(map(int, cached)) == len(kernels)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.o")} == kernels


@pytest.mark.sweep
@pytest.mark.xdist_group("sm_90")
def test_a_step_whose_kernels_are_missing_compiles_them_side_by_side(tmp_path: Path) -> None:
    said = run(["-c", OWN + BESIDE], tmp_path, NSA_COMPILE_WORKERS="2", **ENVIRONMENT[90])
    assert re.search(r"nsa_layer: compiling \d+ of \d+ kernels, once per configuration", said)
    assert "data pointer" not in said  # PyTorch's warning about fake tensors


# Ends as a process that is killed, and leaves a fork that sleeps, as a data loader's might.
KILLED = """
import os, signal, threading, time
import torch
from nsa_layer import NSAConfig
from nsa_layer.warm_up import api
from nsa_tools.shape import Shape
call = Shape(B=1, T=300, Hq=4, Hkv=2, D=64, Dv=64, dtype=torch.bfloat16, config=NSAConfig()).signature()
api._own_target = dict
thread = threading.Thread(target=api._helper.order, args=(call,))
thread.start()
thread.join()
if not os.fork():
    os.closerange(1, 3)
    time.sleep(90)
print(api._helper.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_helper_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    environment = os.environ | ENVIRONMENT[90] | {"NSA_COMPILE_WORKERS": "2", "CUDA_VISIBLE_DEVICES": ""}
    environment["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    folder, deadline = Path("/proc") / done.stdout.strip(), time.monotonic() + 45
    while folder.exists() and "Z" not in (folder / "stat").read_text().split()[2]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert not [*tmp_path.rglob("*.o")]


class Started:
    """In place of `api._start`: processes that do nothing, and the connections' other ends."""

    def __init__(self) -> None:
        self.processes, self.theirs, self.fails = [], [], False

    def __call__(self, environment: dict[str, str]) -> tuple[subprocess.Popen, Connection]:
        if self.fails:
            raise BlockingIOError
        ours, theirs = multiprocessing.Pipe()
        command = [sys.executable, "-S", "-c", "import sys; sys.stdin.read(); sys.exit(3)"]
        self.processes.append(subprocess.Popen(command, stdin=subprocess.PIPE))
        self.theirs.append(theirs)
        return self.processes[-1], ours

    def end(self) -> None:
        self.processes[-1].communicate()
        self.theirs[-1].close()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    started = Started()
    monkeypatch.setattr(api, "_start", started)
    monkeypatch.setattr(api, "_own_target", lambda: ENVIRONMENT[90])
    monkeypatch.setenv("NSA_COMPILE_WORKERS", "2")
    yield started
    for process in started.processes:
        process.communicate()


def test_one_helper_compiles_for_all_calls_until_it_ends(started: Started) -> None:
    helper = api.Helper()
    for call in ("one", "two", "one"):
        helper.order(call)
    first = started.theirs[0]
    assert [first.recv() for _ in range(2)] == [((call,), 2, False) for call in ("one", "two")]
    assert not first.poll() and len(started.processes) == 1
    started.end()
    helper.order("three")
    assert [theirs.recv()[0] for theirs in started.theirs[1:]] == [("three",)]


def test_a_call_goes_on_where_no_process_can_be_started(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    helper, started.fails = api.Helper(), True
    helper.order("one")
    started.fails = False
    helper.order("one")
    assert not started.processes, "asked once for each call"
    helper.order("two")
    started.theirs[0].close()  # but the process has not ended yet
    helper.order("three")
    monkeypatch.setenv("NSA_COMPILE_WORKERS", "1")
    helper.order("four")
    assert len(started.processes) == 1 and helper.ordered == {"one", "two", "three"}


def test_a_process_that_ends_while_it_compiles_ahead_is_an_error(started: Started) -> None:
    outcomes = api.compile_calls([], target={}, jobs=1)
    threading.Timer(0.2, started.end).start()
    with pytest.raises(RuntimeError, match="the process that compiles has ended with status 3"):
        next(outcomes)


def test_a_number_of_processes_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_COMPILE_WORKERS", "many")
    with pytest.raises(ValueError, match="NSA_COMPILE_WORKERS must be a number of processes, got 'many'"):
        api.processes()


def test_packed_calls_are_warm_wherever_their_starts_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Signature] = []
    monkeypatch.setattr(api, "compile_calls", lambda calls, **_: asked.extend(calls) or [])
    monkeypatch.setattr(api, "_own_target", dict)
    config = NSAConfig()
    api.warm_up(config, [(8, 512, 4, 2, 64)], packed=True)
    assert [config.list_width(max(call.spec.lengths)) for call in asked] == [8, 16]
    assert all(len(c.spec.lengths) == 8 and sum(c.spec.lengths) == c.tensors[0][1][0] == 4096 for c in asked)


def test_head_dimensions_are_warm_as_they_are_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Signature] = []
    monkeypatch.setattr(api, "compile_calls", lambda calls, **_: asked.extend(calls) or [])
    monkeypatch.setattr(api, "_own_target", dict)
    api.warm_up(NSAConfig(), [(1, 512, 4, 2, 80), (1, 512, 4, 2, 192, 128), (1, 512, 4, 2, 80, 40)])
    sizes = [{name: size[-1] for name, size, _ in call.tensors} for call in asked]
    assert [(size["q"], size["v"]) for size in sizes] == [(96, 96), (192, 128), (96, 96)]
    assert asked[0].spec.softmax_scale == 80**-0.5
    with pytest.raises(ValueError, match=r"a shape must be \(B, T, Hq, Hkv, D\) or .*Dv\), got \(1, 512, 4, 2\)"):
        api.warm_up(NSAConfig(), [(1, 512, 4, 2)])


@pytest.mark.parametrize("arch, found", [(0, "no GPU"), (80, "no kernels for sm_80")])
def test_warming_up_without_kernels_says_what_to_set(arch: int, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "device_arch", lambda: arch)
    with pytest.raises(NotImplementedError, match=f"^{found}: set FLASH_ATTENTION_ARCH to one"):
        api.warm_up(NSAConfig(), [(1, 512, 4, 2, 64)])
