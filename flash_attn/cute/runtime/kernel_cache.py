"""The cache of compiled kernels on disk: its folder, its locks, and dependencies of kernels outside this package.

Enabled unless ``FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED`` is 0; in ``FLASH_ATTENTION_CUTE_DSL_CACHE_DIR`` or the user's
cache folder. Processes share it: files are written under a lock and renamed into place, and one of several processes
that need the same kernel compiles it. Loaded files are executed, so a folder is refused if neither this user nor root
owns it, if group or world may write to it, or if a folder above is world-writable without the sticky bit.
"""

import fcntl
import hashlib
import os
import platform
import stat
import threading
import time
import warnings
from contextlib import contextmanager
from functools import lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable, Iterator, Optional

import torch

FOLDER = "flash_attention_cute_dsl_cache"
SWITCH = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
REASON = "who could put kernels there that this process runs"

# Distributions that contain the compiler; which ones are installed depends on the CUDA version.
COMPILER = tuple(f"nvidia-cutlass-dsl{part}" for part in ("", "-libs-base", "-libs-core", "-libs-cu12", "-libs-cu13"))
# Inlined into kernels, and possibly an editable install: hashed by source, not by version.
INLINED = ("quack",)
# DSL settings that change code. The architecture is part of each kernel's key.
CHANGES_CODE = "AUTO_M2S COMPILER_BACKEND COMPILER_OPT DEBUG ENABLE_ASSERTIONS ENABLE_PYIR LINEINFO TOLERATE_M2M"
SETTINGS = tuple(f"CUTE_DSL_{name}" for name in CHANGES_CODE.split())

# The DSL warns at each kernel with upstream's `AuxData`, a tuple that it compiles right.
warnings.filterwarnings("ignore", "Argument aux_data ")


def is_enabled() -> bool:
    return os.environ.get(SWITCH, "1") == "1"


def user_folder() -> Path:
    """The user's persistent cache folder. A relative XDG_CACHE_HOME is ignored, as its specification says."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / FOLDER


def multiprocessors() -> Optional[int]:
    """Multiprocessors of the GPU compiled for, which set the grids of persistent kernels; None: unknown."""
    stated = os.environ.get("FLASH_ATTENTION_NUM_SMS")
    if stated is not None:
        return int(stated)
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


@lru_cache(maxsize=None)
def can_keep(named: Optional[str]) -> bool:
    """True if this process can write and lock files in the named folder, or the user's, and nobody else can write.

    A warning gives the reason if not.
    """
    try:
        folder = Path(named) if named is not None else user_folder()
        _make_own(folder)
        # A shared lock, which does not block others; some file systems have no locks.
        with open(folder / ".probe", "a") as probe:
            fcntl.flock(probe, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
        return _not_kept(error)
    return True


def can_make(folder: Path) -> bool:
    """Make a folder inside the cache; False, with a warning, if the disk is full or others may write to it."""
    try:
        _make_own(folder)
    except OSError as error:
        return _not_kept(error)
    return True


def _make_own(folder: Path) -> None:
    """Make a folder, with missing parents, that only this user may write to; PermissionError if others may."""
    _make(folder)
    folder = folder.resolve()
    owner, mode = folder.stat().st_uid, folder.stat().st_mode
    if owner not in (os.geteuid(), 0):
        raise PermissionError(f"{folder} is of user {owner}, {REASON}; `chown {os.geteuid()} {folder}` mends it")
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others may write to {folder}, {REASON}; `chmod go-w {folder}` mends it")
    for above in folder.parents:
        mode = above.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise PermissionError(f"others may replace files below {above}, {REASON}; `chmod o-w {above}` mends it")


def _make(folder: Path) -> None:
    if not folder.is_dir():
        _make(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def attempted(access: Callable[..., Optional[bool]], *arguments: Any) -> bool:
    """Result of an access to the cache; False, with a warning, on an I/O error or a timeout of a lock.

    The disk may become full, or a lock be held too long, after `can_keep`. The call then compiles the kernel itself.
    """
    try:
        return bool(access(*arguments))
    except (OSError, RuntimeError) as error:  # RuntimeError: waited too long for a lock
        return _not_kept(error)


class CompileLocks:
    """Locks between processes that need the same kernel: one compiles it, the others wait and load it.

    File locks, released when a process ends. A thread holds at most one, so there is no deadlock.
    """

    def __init__(self, longest: float = 60.0, pause: float = 0.02) -> None:
        self.longest, self.pause = longest, pause  # seconds: timeout, and polling interval
        self._own = threading.local()

    def acquire(self, path: Path) -> bool:
        """Lock a kernel. True if another process held the lock, and may have compiled the kernel."""
        self.release()
        file = open(path, "ab")  # closed, and so unlocked, with its thread at the latest
        deadline, waited = time.monotonic() + self.longest, False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waited = True
            else:
                self._own.file = file
                return waited
            if time.monotonic() > deadline:  # the holder is stopped or slow: compile a second time
                file.close()
                return waited
            time.sleep(self.pause)

    def is_held(self, path: Path) -> bool:
        """True if a process holds the lock of a kernel."""
        try:
            with open(path, "ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False

    def release(self) -> None:
        """Release this thread's lock, if it has one."""
        file = getattr(self._own, "file", None)
        if file is not None:
            self._own.file = None
            file.close()


LOCKS = CompileLocks()
_MISSED = threading.local()


@contextmanager
def at_first_miss(act: Callable[[], None]) -> Iterator[None]:
    """Context in which this thread's first cache miss calls ``act``; nested contexts have no effect."""
    if getattr(_MISSED, "within", False):
        yield
        return
    _MISSED.act, _MISSED.within = act, True
    try:
        yield
    finally:
        _MISSED.act, _MISSED.within = None, False


def others_left(path: Path, load: Callable[..., Optional[bool]], *arguments: Any) -> bool:
    """After a cache miss: lock the kernel; if another process held the lock, load what it compiled. True if loaded."""
    act, _MISSED.act = getattr(_MISSED, "act", None), None
    if act is not None:
        act()
    loaded = attempted(LOCKS.acquire, path) and attempted(load, *arguments)
    if loaded:
        LOCKS.release()
    return loaded


def _not_kept(error: Exception) -> bool:
    warnings.warn(
        f"compiled kernels are not kept, each process compiles its own: {error}. "
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR names another folder",
        RuntimeWarning,
        stacklevel=3,
    )
    return False


def dependencies() -> bytes:
    """A hash of the compiler's versions and settings, other packages' inlined sources, and the host's processor.

    The processor, since kernels come with compiled launch code. Imports none of these packages.
    """
    digest = hashlib.sha256(f"{platform.machine()}\n".encode())
    for name in COMPILER:
        digest.update(f"{name}={_version(name)}\n".encode())
    for name in SETTINGS:
        digest.update(f"{name}={os.environ.get(name)!r}\n".encode())
    for package in INLINED:
        for name, content in _sources(package):
            digest.update(f"{name}:{len(content)}\n".encode() + content)
    return digest.digest()


def _version(distribution: str) -> Optional[str]:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _sources(package: str) -> Iterator[tuple[str, bytes]]:
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for source in sorted(Path(folder).rglob("*.py")):
            yield f"{package}/{source.relative_to(folder).as_posix()}", source.read_bytes()
