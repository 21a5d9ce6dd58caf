"""Imports of what only compiling needs: at the first use, and whole.

A call whose kernel is in the cache on disk imports none of it: see test_kernel_cache.
"""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest
from fa_cases import swept

from flash_attn.cute.runtime import lazy_imports
from flash_attn.cute.runtime.lazy_imports import Deferred

PLACES = [(name, value) for name, value in vars(lazy_imports).items() if isinstance(value, Deferred)]


@pytest.mark.parametrize("first", swept(["import quack", "import flash_attn.cute", "import torch._dynamo"], 3))
def test_quack_is_whole_in_any_order(first: str) -> None:
    """Programs that import quack find all of it, imported before or after this package."""
    program = f"""
{first}
import flash_attn.cute
import quack.rmsnorm, quack.copy_utils
from quack import layout_utils, rmsnorm
from flash_attn.cute.runtime.lazy_imports import fake_tensor
print(callable(rmsnorm) and quack.rmsnorm is rmsnorm, fake_tensor.load() is quack.compile_utils.make_fake_tensor)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "True True"


@pytest.mark.parametrize("name,deferred", PLACES, ids=[name for name, _ in PLACES])
def test_every_name_is_there(name: str, deferred: Deferred) -> None:
    found = deferred.load()
    assert deferred.__name__ == found.__name__ in (name, "make_fake_tensor") and found is deferred.load()


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
