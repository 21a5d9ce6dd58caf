"""The cache of compiled kernels: on by default, the user's, shared by processes, and never of other versions."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flash_attn.cute import cache_utils
from flash_attn.cute.runtime import kernel_cache

# One kernel, compiled or found; then where it is kept, and what only compiling needs. (Fake tensors bring triton.)
CALL = """
import sys
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from flash_attn.cute.cache_utils import CUTE_DSL_CACHE_ENABLED, get_cache_path
from flash_attn.cute.interface import _flash_attn_fwd

assert not {"quack", "triton", "torch._dynamo"} & set(sys.modules), "imported before any call"
with FakeTensorMode():
    q, k, v = (torch.empty(1, 256, 2, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    _flash_attn_fwd(q, k, v)
compiler = {"quack", "flash_attn.cute.flash_fwd_sm90"} & set(sys.modules)
print(CUTE_DSL_CACHE_ENABLED, get_cache_path(), *sorted(compiler))
"""
NAMES = ("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", *kernel_cache.SETTINGS)


def start(program: str, cache: Path, **environment: str) -> subprocess.Popen[str]:
    """A process with nothing set but where the user's cache folder is."""
    rest = {name: value for name, value in os.environ.items() if name not in NAMES}
    rest |= {"XDG_CACHE_HOME": str(cache), "CUDA_VISIBLE_DEVICES": ""} | environment
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", program], stdout=pipe, stderr=pipe, text=True, env=rest)


def last_line(process: subprocess.Popen[str]) -> str:
    shown, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return shown.splitlines()[-1]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
    """A test of whether kernels are kept in a folder, and so loaded from it; if not, with a warning that says why."""
    monkeypatch.setattr(cache_utils, "CUTE_DSL_CACHE_ENABLED", True)

    def kept(folder: Path, warning: str | None = None) -> bool:
        kernel_cache.can_keep.cache_clear()
        monkeypatch.setattr(cache_utils, "CUTE_DSL_CACHE_DIR", str(folder))
        with nullcontext() if warning is None else pytest.warns(RuntimeWarning, match=warning):
            return isinstance(cache_utils.get_jit_cache("some"), cache_utils.JITPersistentCache)

    return kept


def test_a_folder_may_be_named(kept: Callable[..., bool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert kept(tmp_path) and cache_utils.get_cache_path() == tmp_path
    monkeypatch.setattr(cache_utils, "CUTE_DSL_CACHE_ENABLED", False)
    assert not kept(tmp_path)


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777, 0o1777, 0o720, 0o2775])
@pytest.mark.parametrize("inner", [False, True])
def test_a_folder_of_others_is_not_used(kept: Callable[..., bool], tmp_path: Path, inner: bool, mode: int) -> None:
    """inner: the folder within it that holds one kind of kernels is the one that others may write to."""
    folder = tmp_path / "kernels"
    assert kept(folder)
    open_folder = next(folder.glob("*/some")) if inner else folder
    open_folder.chmod(mode)
    assert not kept(folder, f"others may write to {open_folder}.*`chmod go-w {open_folder}` mends it")
    open_folder.chmod(0o755)
    assert kept(folder), "others may read"


@pytest.mark.parametrize(("owner", "used"), [(4242, False), (0, True), (1234, True)])
def test_another_users_folder_is_not_used(
    kept: Callable[..., bool], tmp_path: Path, owner: int, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root could do anything anyway: what an image has been built with may be read."""
    assert kept(tmp_path)
    own = os.stat

    def foreign(path: Any, *args: Any, **options: Any) -> os.stat_result:
        found = list(own(path, *args, **options))
        return os.stat_result([*found[:4], owner, *found[5:]])

    monkeypatch.setattr(kernel_cache.os, "geteuid", lambda: 1234)
    monkeypatch.setattr(Path, "stat", foreign)
    warning = None if used else f"{tmp_path} is of user 4242, .*`chown 1234 {tmp_path}` mends it"
    assert kept(tmp_path, warning) is used


def test_folders_above_are_not_the_worlds(kept: Callable[..., bool], tmp_path: Path) -> None:
    """A sticky one, as /tmp is, may be: nobody renames there what is not theirs. A group above is the user's choice."""
    above = tmp_path / "above"
    above.mkdir()
    for mode in (0o1777, 0o775):
        above.chmod(mode)
        assert kept(above / "kernels")
    above.chmod(0o777)
    assert not kept(above / "kernels", f"others may replace files below {above}")


def test_folders_are_made_for_their_user_alone(kept: Callable[..., bool], tmp_path: Path) -> None:
    """The umask changes nothing, and the folders above that are missing are made so, too."""
    before = os.umask(0)
    try:
        assert kept(tmp_path / "a" / "b" / "kernels")
    finally:
        os.umask(before)
    made = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert len(made) == 5 and all(path.stat().st_mode & 0o777 == 0o700 for path in made)


NOT_KEPT = "compiled kernels are not kept"


def test_it_is_said_once(kept: Callable[..., bool], tmp_path: Path) -> None:
    """One warning serves the caches of all kinds of kernels."""
    tmp_path.chmod(0o777)
    with pytest.warns(RuntimeWarning, match=NOT_KEPT) as said:
        assert not kept(tmp_path)
        assert type(cache_utils.get_jit_cache("another")) is cache_utils.JITCache
    assert len(said) == 1


def test_a_folder_that_cannot_be_written_is_said_and_not_an_error(kept: Callable[..., bool], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not kept(tmp_path / "file" / "below", NOT_KEPT)
    assert kept(tmp_path / "folder")


def test_a_folder_that_fails_later_costs_a_call_its_time_only(kept: Callable[..., bool], tmp_path: Path) -> None:
    """A disk becomes full: no file can be made where files were a moment ago."""
    assert kept(tmp_path)
    cache = cache_utils.get_jit_cache("some")
    assert "kernel" not in cache
    for file in cache.cache_path.iterdir():
        file.unlink()
    cache.cache_path.rmdir()
    cache.cache_path.write_text("")
    with pytest.warns(RuntimeWarning, match=NOT_KEPT):
        assert "kernel" not in cache
    compiled = SimpleNamespace(export_to_c=lambda **_: pytest.fail("there is nowhere to write"))
    with pytest.warns(RuntimeWarning, match=NOT_KEPT):
        cache["kernel"] = compiled
    assert cache.cache["kernel"] is compiled and "kernel" in cache
    assert not kept(tmp_path, NOT_KEPT)


@pytest.mark.parametrize("base", ["cache", "./cache", "", "/somewhere"])
def test_a_relative_cache_home_does_not_count(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    home = Path(base) if base == "/somewhere" else Path.home() / ".cache"
    assert kernel_cache.user_folder() == home / kernel_cache.FOLDER


def test_kernels_of_other_dependencies_are_another_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that change code, and the compiler; not the target.

    The architecture is in each key: what one machine compiles for another's GPU is found there.
    """
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    found, fingerprint = [kernel_cache.dependencies()], cache_utils._compute_source_fingerprint.__wrapped__
    with monkeypatch.context() as patch:
        patch.setenv("CUTE_DSL_ARCH", "sm_90a")
        patch.setenv("FLASH_ATTENTION_ARCH", "sm_90")
        assert kernel_cache.dependencies() == found[0]
    for name in kernel_cache.SETTINGS:
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            found.append(kernel_cache.dependencies())
    own = kernel_cache._version
    for name in ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base"):
        with monkeypatch.context() as patch:
            patch.setattr(kernel_cache, "_version", lambda of, name=name: "0" if of == name else own(of))
            found.append(kernel_cache.dependencies())
    assert len(set(found)) == len(found) == 3 + len(kernel_cache.SETTINGS) and kernel_cache.dependencies() == found[0]
    before = fingerprint()
    assert fingerprint() == before
    monkeypatch.setattr(kernel_cache, "dependencies", lambda: b"others")
    assert fingerprint() != before


def test_another_quack_is_another_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its sources count, which kernels inline, and not its version."""
    found = [kernel_cache.dependencies()]
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(kernel_cache, "find_spec", {"quack": spec}.get)
    (tmp_path / "inner").mkdir()
    for name, text in (("__init__", ""), ("__init__", "a = 1"), ("inner/more", "b = 2"), ("inner/more", "b = 3")):
        (tmp_path / f"{name}.py").write_text(text)
        found.append(kernel_cache.dependencies())
    assert len(set(found)) == 5 and kernel_cache.dependencies() == found[-1]


def test_a_grid_for_other_multiprocessors_is_another_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Persistent kernels have the count in them, and parts of one architecture differ in it."""
    monkeypatch.setenv("FLASH_ATTENTION_ARCH", "sm_90")
    cache, names = cache_utils.JITPersistentCache(tmp_path), []
    for count in ("132", "114", "132"):
        monkeypatch.setenv("FLASH_ATTENTION_NUM_SMS", count)
        names.append(cache._key_to_hash(("a key",)))
    assert names[0] != names[1] and names[0] == names[2]
    monkeypatch.delenv("FLASH_ATTENTION_NUM_SMS")
    part = SimpleNamespace(multi_processor_count=114)
    for name, value in dict(is_available=True, current_device=0, get_device_properties=part).items():
        monkeypatch.setattr(kernel_cache.torch.cuda, name, lambda *_, value=value: value)
    assert cache._key_to_hash(("a key",)) == names[1], "the device says it where nobody does"


def test_a_lock_ends_with_the_kernel_or_with_the_next_one(tmp_path: Path) -> None:
    """Waiting ends after a while: a process that is stopped holds up nobody for good."""
    first, second = kernel_cache.CompileLocks(), kernel_cache.CompileLocks(longest=0.2, pause=0.01)
    assert not first.acquire(tmp_path / "kernel")
    assert second.acquire(tmp_path / "kernel"), "it waited, and goes on without the lock"
    second.release()
    assert not first.acquire(tmp_path / "other"), "the compilation of the kernel failed"
    assert not second.acquire(tmp_path / "kernel")
    first.release()
    first.release()
    assert not second.acquire(tmp_path / "other")


@pytest.mark.parametrize("left", [True, False])
def test_who_waited_loads_what_others_left(left: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cache, loads = cache_utils.JITPersistentCache(tmp_path), []
    monkeypatch.setattr(cache, "_try_load_from_storage", lambda key: loads.append(key) or (left and len(loads) > 1))
    ended: list[bool] = []
    monkeypatch.setattr(kernel_cache.LOCKS, "acquire", lambda path: path.suffix == ".compiling")
    monkeypatch.setattr(kernel_cache.LOCKS, "release", lambda: ended.append(True))
    assert ("kernel" in cache) is left and loads == ["kernel", "kernel"]
    assert ended == [True] * left, "who loads it has no need of the lock"
    monkeypatch.setattr(kernel_cache.LOCKS, "acquire", lambda path: False)
    loads.clear()
    assert "kernel" not in cache and loads == ["kernel"], "nobody was there before"


@pytest.mark.sweep
@pytest.mark.xdist_group("sm_90")
def test_of_processes_that_want_the_same_kernel_one_compiles_it(tmp_path: Path) -> None:
    """It is kept in the user's cache folder. Processes that find it, while it is made or later, import no compiler.
    The compiler warns of nothing."""
    target = {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"}
    target |= {"PYTHONWARNINGS": "error:Argument aux_data"}
    folder = tmp_path / "flash_attention_cute_dsl_cache"
    found = f"True {folder}"
    said = sorted(last_line(p) for p in [start(CALL, tmp_path, **target) for _ in range(2)])
    assert said == [found, f"{found} flash_attn.cute.flash_fwd_sm90 quack"], "one compiles, the other waits for it"
    assert folder.stat().st_mode & 0o077 == 0
    (kernel,) = tmp_path.rglob("*.o")
    written = kernel.stat().st_mtime_ns
    assert last_line(start(CALL, tmp_path, **target)) == found
    assert kernel.stat().st_mtime_ns == written and [*tmp_path.rglob("*.o")] == [kernel]


def test_the_outermost_call_alone_hears_of_a_miss(tmp_path: Path) -> None:
    heard: list[str] = []
    for _ in range(2):
        with kernel_cache.at_first_miss(lambda: heard.append("outer")):
            for name in "ab":
                with kernel_cache.at_first_miss(lambda: heard.append("inner")):
                    kernel_cache.others_left(tmp_path / name, lambda: False)
    kernel_cache.LOCKS.release()
    assert heard == ["outer", "outer"]
