"""Imports of a call: with its kernel in the cache on disk, nothing that only compiling needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from fa_cases import swept

from flash_attn.cute.runtime import lazy_imports
from flash_attn.cute.runtime.lazy_imports import Deferred

# One kernel, compiled or found; then what only compiling needs. (Fake tensors bring triton themselves.)
CALL = """
import sys
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from flash_attn.cute.interface import _flash_attn_fwd

assert not {"quack", "triton", "torch._dynamo"} & set(sys.modules), "imported before any call"
with FakeTensorMode():
    q, k, v = (torch.empty(1, 256, 2, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    _flash_attn_fwd(q, k, v, causal=True)
print(*sorted({"quack", "flash_attn.cute.flash_fwd_sm90"} & set(sys.modules)))
"""
PLACES = [(name, value) for name, value in vars(lazy_imports).items() if isinstance(value, Deferred)]


def python(program: str, **environment: str) -> list[str]:
    """The words that a program prints last, in a process of its own."""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | environment, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[-1].split()


@pytest.mark.xdist_group("sm_90")
def test_a_kernel_from_the_cache_takes_no_compiler(tmp_path: Path) -> None:
    environment = {
        "FLASH_ATTENTION_ARCH": "sm_90",
        "CUTE_DSL_ARCH": "sm_90a",
        "FLASH_ATTENTION_NUM_SMS": "132",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "",
    }
    assert python(CALL, **environment) == ["flash_attn.cute.flash_fwd_sm90", "quack"]
    kernels = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.o")}
    assert len(kernels) == 1
    assert python(CALL, **environment) == []
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.o")} == kernels


@pytest.mark.parametrize("first", swept(["import quack", "import flash_attn.cute", "import torch._dynamo"], 3))
def test_quack_is_whole_in_any_order(first: str) -> None:
    """Whoever imports it finds all of it."""
    program = f"""
{first}
import flash_attn.cute
import quack.rmsnorm, quack.copy_utils
from quack import layout_utils, rmsnorm
from flash_attn.cute.runtime.lazy_imports import fake_tensor
print(callable(rmsnorm) and quack.rmsnorm is rmsnorm, fake_tensor.load() is quack.compile_utils.make_fake_tensor)
"""
    assert python(program) == ["True", "True"]


@pytest.mark.parametrize("name,deferred", PLACES, ids=[name for name, _ in PLACES])
def test_every_name_is_there(name: str, deferred: Deferred) -> None:
    found = deferred.load()
    assert found.__name__ in (name, "make_fake_tensor") and found is deferred.load()


def test_the_compiler_comes_first_and_at_the_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel:
        limit = 7

    module = ModuleType("some_kernel")
    module.Kernel = Kernel
    asked: list[str] = []

    def import_module(name: str) -> ModuleType:
        asked.append(name)
        return module

    monkeypatch.setattr("flash_attn.cute.runtime.lazy_imports.import_module", import_module)
    kernel = Deferred("some_kernel", "Kernel")
    assert not hasattr(kernel, "__wrapped__") and "some_kernel.Kernel" in repr(kernel) and asked == []
    assert kernel.limit == 7 and asked == ["quack", "some_kernel"]
    assert isinstance(kernel(), Kernel)
