"""Compiling without a device, with fake tensors and deferred imports, and the version that is reported."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from fa_compile import Worker, swept
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_attn.cute.runtime import lazy_imports
from flash_attn.cute.runtime.lazy_imports import Deferred
from fuzz.attention import compile_case
from fuzz.case import Attention as Case


def varlen_split_kv() -> None:
    """The dynamic varlen scheduler, and the kernel that prepares its work."""
    import torch

    from flash_attn.cute.interface import _flash_attn_fwd

    q = torch.empty(4, 8, 64, dtype=torch.bfloat16, device="cuda")
    k = torch.empty(4096, 2, 64, dtype=torch.bfloat16, device="cuda")
    cu_q = torch.empty(3, dtype=torch.int32, device="cuda")
    _flash_attn_fwd(
        q, k, k.clone(), cu_seqlens_q=cu_q, cu_seqlens_k=cu_q.clone(), max_seqlen_q=2, max_seqlen_k=4096, num_splits=4
    )


def test_varlen_split_kv_forward(compiler_sm100: Worker) -> None:
    compiler_sm100.trace(varlen_split_kv)


def test_kernels_are_compiled_without_addresses(compiler: Worker) -> None:
    """The worker's fake tensors raise where they would warn."""
    compiler.trace(compile_case, Case(T_q=512, T_k=512, causal=True, deterministic=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_the_exchange_keeps_the_layout_and_is_silent(dtype: torch.dtype, capfd: pytest.CaptureFixture[str]) -> None:
    from cutlass.cute import runtime

    from flash_attn.cute.cute_dsl_utils import to_cute_tensor

    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with FakeTensorMode():
            x = torch.empty(3, 40, 2, 64, dtype=dtype, device="cuda").transpose(1, 2)
            exchanged = to_cute_tensor(x)
            assert "data pointer" not in capfd.readouterr().err
            assert (exchanged.shape, exchanged.stride) == (tuple(x.shape), x.stride())
            assert exchanged.element_type.width == 8 * x.element_size() and str(exchanged.memspace) == "gmem"
            runtime.from_dlpack(x.view(torch.uint8), enable_tvm_ffi=True)
            assert "data pointer" in capfd.readouterr().err, "the DSL's own exchange warns here"
    finally:
        torch.set_warn_always(always)


DEFERRED = [(name, value) for name, value in vars(lazy_imports).items() if isinstance(value, Deferred)]


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


@pytest.mark.parametrize("name,deferred", DEFERRED, ids=[name for name, _ in DEFERRED])
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


def described(folder: Path, version: str) -> Path:
    """The folder, with a distribution's metadata."""
    metadata = folder / f"flash_attn_4-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: flash-attn-4\nVersion: {version}\n")
    return folder


def reported(*folders: Path) -> str:
    """The version that the package says with only these folders to import from: no path and package of this process."""
    code = f"import sys; sys.path[:0] = {[str(folder) for folder in folders]!r}; "
    code += "import flash_attn.cute.runtime.version as v; print(v.__version__)"
    return subprocess.run([sys.executable, "-ISc", code], capture_output=True, text=True, check=True).stdout.strip()


def test_a_copy_reports_its_own_version(tmp_path: Path) -> None:
    """That of its distribution, not of another copy's; or what its build wrote."""
    import flash_attn.cute.runtime.version as version

    site, stock = tmp_path / "site", described(tmp_path / "stock", "4.0.0b35")
    package = site / "flash_attn" / "cute"
    (package / "runtime").mkdir(parents=True)
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "runtime" / "version.py").write_bytes(Path(version.__file__).read_bytes())
    assert reported(site, stock) == "0+unknown"
    assert reported(stock, described(site, "4.0.0b36")) == reported(site) == "4.0.0b36"
    (package / "build_info.py").write_text('VERSION = "4.0.0b36+nsa.7"\n')
    assert reported(site) == "4.0.0b36+nsa.7"


def test_this_package_reports_its_version() -> None:
    import flash_attn.cute
    from flash_attn.cute import build_info

    assert flash_attn.cute.__version__ == build_info.VERSION
