"""`compile --seqlen`: what it compiles is what the call launches, and the call finds it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nsa_layer.cli import compile

TARGET = {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"}

# The layer's own way through a call, with fake tensors: autograd does not take those on a GPU that is not there.
OWN = """
import sys
import warnings

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nsa_layer import NSAConfig, MemoryPolicy, autograd
from nsa_layer.cli import ahead
from nsa_layer.cli.shape import Shape
from nsa_layer.policy import Sizes, schedule
from nsa_layer.problem import Problem

warnings.simplefilter("ignore")

class Context:
    def save_for_backward(self, *tensors): self.saved_tensors = tensors
    def set_materialize_grads(self, value): pass

def shape(**changes):
    given = dict(B=1, T=300, Hq=4, Hkv=2, D=64, Dv=64, dtype=torch.bfloat16, device="cpu", config=NSAConfig())
    return Shape(**given | changes)

def own_call(call):
    of = call.shape
    problem = Problem(of.config, True, of.D**-0.5, of.lengths)
    q, k, v = (torch.empty(1, of.T, H, of.D, dtype=of.dtype, device="cuda") for H in (of.Hq, of.Hkv, of.Hkv))
    weight = torch.empty(of.Hq, 3, of.D, dtype=of.dtype, device="cuda") if call.gated else None
    w_k, w_v = (torch.empty(of.Hkv, of.D, of.D, dtype=of.dtype, device="cuda") if call.projected else None
                for _ in range(2))
    sizes = Sizes.of(q, v, problem=problem, gated=call.gated, needs_grad=call.backward)
    plan, context = schedule(sizes, of.policy, torch.device("cpu")), Context()
    o = autograd._Attend.forward(context, q, k, v, weight, None, w_k, w_v, None, problem, plan, False)
    if call.backward:
        autograd._Attend.backward(context, torch.empty_like(o))

def asked(call):
    names = {}
    with ahead._lookups(lambda cache, key, name: names.setdefault(name, True)):
        with FakeTensorMode(), ahead._Unlinked(), torch.no_grad():
            own_call(call)
    return list(names)
"""
NAMED = """
for more in ({}, dict(T=40), dict(Hkv=4), dict(config=NSAConfig(block_size=32)), dict(config=NSAConfig(block_size=256)),
             dict(config=NSAConfig(deterministic=True, block_stride=16)), dict(policy=MemoryPolicy(budget=0))):
    for gated, projected, backward in ((True, False, True), (False, True, True), (False, False, False)):
        call = ahead.Call(shape(**more), gated, projected, backward)
        names = ahead.kernels(call)
        assert names == asked(call), (call, names)
        assert len(names) > (4 if not backward else 10), names
        assert names == ahead.kernels(call)
packed = ahead.Call(shape(lengths=(100, 0, 200)))
assert set(ahead.kernels(packed)) - set(ahead.kernels(ahead.Call(shape())))
"""
CALLED = """
own_call_of = ahead.Call(shape(), gated=False, backward=False)
with FakeTensorMode(), ahead._Unlinked(), torch.no_grad():
    own_call(own_call_of)
print(*sorted({"quack", "flash_attn.cute.flash_fwd_sm90"} & set(sys.modules)))
"""


def run(command: list[str], cache: Path, **environment: str) -> str:
    """What a process prints whose kernels are kept in `cache`."""
    kept = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(cache)}
    environment = os.environ | kept | {"CUDA_VISIBLE_DEVICES": ""} | environment
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, timeout=540)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_kernels_that_are_named_are_those_that_the_layer_asks_for(tmp_path: Path) -> None:
    run(["-c", OWN + NAMED], tmp_path, **TARGET)
    assert not [*tmp_path.rglob("*.o")], "nothing is compiled to find names"


@pytest.mark.slow
@pytest.mark.xdist_group("sm_90")
def test_a_call_finds_what_was_compiled_for_it(tmp_path: Path) -> None:
    shape = ["--seqlen=300", "--heads=4", "--kv-heads=2", "--head-dim=64", "--mode=forward", "--ungated"]
    command = ["-m", "nsa_layer", "compile", "--arch=90", "--jobs=2", *shape]
    said = run(command, tmp_path)
    kernels = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.o")}
    assert len(kernels) == said.count("| sm_90a ") >= 6
    assert run(["-c", OWN + CALLED], tmp_path, **TARGET).split() == [], "the call compiles nothing"
    assert run(command, tmp_path).count("in the cache already") == len(kernels)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.o")} == kernels


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--shape=B"], "--shape needs --seqlen"),
        (["--seqlen=1K", "--all"], "--all is for the sweep over cases"),
        (["--seqlen=1K", "--head-dim=96"], "the kernels do not support head dimension (96, 96)"),
        (["--seqlen=1K", "--deterministic"], "sm_100: the kernels do not support deterministic backward"),
        (["--seqlen=1K", "--kv-heads=3"], "--kv-heads must divide --heads"),
    ],
)
def test_options_that_do_not_go_together(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert compile.main(argv) == 2
    assert said in capsys.readouterr().err


def test_without_a_cache_there_is_nowhere_to_put_kernels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "0")
    assert compile.main(["--seqlen=300", "--arch=90", "--jobs=1"]) == 2
    assert "kernels are not kept on disk" in capsys.readouterr().err
