"""Compiles the kernels of calls in a helper process: ahead of them, or all of a call at once when it misses one.

The helper, `worker`, shares nothing with this process but the kernel cache on disk, where a process that misses a
kernel waits for the one that compiles it. So a call whose kernels are missing goes on as it would alone, and finds most
of them compiled.

``NSA_COMPILE_WORKERS`` is the number of kernels compiled at once, by default one a core; with 0 a call compiles its
kernels one after the other. ``NSA_COMPILE_PROGRESS=0`` leaves out the line that says what a call waits for.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import islice
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import torch

from nsa_layer.call import Call, CallSpec, Signature
from nsa_layer.config import NSAConfig
from nsa_layer.cute.memory_plan import MemoryPlan, MemoryPolicy, kept_in_graphs
from nsa_layer.support import device_arch, kernel_family, native_dims
from nsa_layer.warm_up.jobs import ENVIRONMENT, Kernel

WORKERS = "NSA_COMPILE_WORKERS"


class Helper:
    """The process that compiles what calls of this one miss, started by the first; it ends with it, or when idle."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ordered: set[Signature] = set()
        self.process: subprocess.Popen | None = None
        self.connection: Connection | None = None

    def order(self, call: Signature) -> None:
        """Order a call's kernels, at its first miss. The call compiles them itself if no helper can be started."""
        if (jobs := processes()) < 2:
            return
        with self.lock:
            if call in self.ordered:
                return
            self.ordered.add(call)
            try:
                if self.process is None or self.process.poll() is not None:
                    self.process, self.connection = _start(_own_target())
                self.connection.send(((call,), jobs, False))
            except OSError:  # too many processes, too little memory, or it has just ended
                return


_helper = Helper()
os.register_at_fork(after_in_child=_helper.__init__)  # closes the fork's copy of the connection, which would keep it


def compile_missing(call: Call, plan: MemoryPlan | None = None, *, backward: bool = False) -> AbstractContextManager:
    """Context manager: on the first kernel-cache miss inside it, start compiling every kernel of this call in the
    helper process."""
    from flash_attn.cute.runtime import kernel_cache

    return kernel_cache.at_first_miss(lambda: _helper.order(Signature.of(call, plan, backward=backward)))


def processes() -> int:
    """Kernels that are compiled at once; ValueError where the variable is no number."""
    workers = os.environ.get(WORKERS) or str(len(os.sched_getaffinity(0)))
    if not workers.isdecimal():
        raise ValueError(f"{WORKERS} must be a number of processes, got {workers!r}")
    return int(workers)


def compile_calls(calls: Iterable[Signature], *, target: dict[str, str], jobs: int) -> Iterator[int | Kernel]:
    """Compile each kernel of the calls once, ``jobs`` at a time; yields their number, then kernels as they are done.

    Args:
        target: variables of the architecture that is compiled for, see `jobs.ENVIRONMENT`.

    Raises:
        RuntimeError: kernels are not kept on disk, or the process that compiles them has ended.
    """
    process, connection = _start(target)
    with process, connection:
        try:
            connection.send((tuple(calls), jobs, True))
            count = message = connection.recv()
            if isinstance(message, Exception):
                raise message
            yield count
            for _ in range(count):
                yield connection.recv()
        except (EOFError, ConnectionError):
            raise RuntimeError(f"the process that compiles has ended with status {process.wait()}") from None


def warm_up(
    config: NSAConfig,
    shapes: Iterable[tuple[int, ...]],
    *,
    dtype: torch.dtype = torch.bfloat16,
    packed: bool = False,
    gate: str = "weight",
    projected: bool = False,
    causal: bool = True,
    backward: bool = True,
) -> float:
    """Compile the kernels that calls of `nsa` will launch on this process's GPU, side by side, and return the seconds.

    Kernels that are in the cache are left alone. Without a GPU ``FLASH_ATTENTION_ARCH`` names the architecture.

    Args:
        config, causal: as in `nsa`; dtype: of q, k and v; backward: backward too.
        shapes: (B, T, Hq, Hkv, D) or (B, T, Hq, Hkv, D, Dv) of each call; most calls that differ in B or T alone launch
            the same kernels.
        packed: the calls are of B packed sequences of T tokens, and of as many of any lengths with starts on the GPU.
        gate: "weight" (``gate_weight``), "given" (``gates``) or "none".
        projected: with ``compress_k_weight`` and ``compress_v_weight``.

    Raises:
        ValueError: a shape has neither 5 nor 6 sizes.
        NotImplementedError: there are no kernels for this architecture.
        RuntimeError: a kernel does not compile, or kernels are not kept on disk.

    Example:
        >>> seconds = warm_up(NSAConfig(), [(1, 4096, 32, 8, 128)], packed=True)  # doctest: +SKIP
    """
    begin, calls = time.perf_counter(), []
    for shape in shapes:
        if len(shape) not in (5, 6):
            raise ValueError(f"a shape must be (B, T, Hq, Hkv, D) or (B, T, Hq, Hkv, D, Dv), got {shape!r}")
        B, T, Hq, Hkv, D, Dv = (*shape, shape[4])[:6]
        tokens = (B * T,) if packed else (B, T)
        named = argument_shapes(tokens, tokens, Hq, Hkv, *native_dims(D, Dv), gate=gate, projected=projected)
        tensors = tuple((name, size, dtype) for name, size in named.items())
        plan = MemoryPlan(((0, Hkv),), kept_in_graphs(MemoryPolicy(), backward))
        # Where the host does not know lengths, lists have capacity for one sequence of all tokens.
        for lengths in ((T,) * B, (B * T, *[0] * (B - 1))) if packed else (None,):
            calls.append(Signature(tensors, CallSpec(config, causal, D**-0.5, lengths), plan, backward))
    for kernel in islice(compile_calls(calls, target=_own_target(), jobs=max(1, processes())), 1, None):
        if kernel.error:
            raise RuntimeError(f"{kernel.name}: {kernel.error}")
    return time.perf_counter() - begin


def argument_shapes(
    tokens: tuple[int, ...],
    keys: tuple[int, ...],
    Hq: int,
    Hkv: int,
    D: int,
    Dv: int,
    *,
    gate: str,
    projected: bool,
    branches: int = 3,
) -> dict[str, tuple[int, ...]]:
    """Shapes of the arguments of `nsa`, by name: q [*tokens, Hq, D], k and v [*keys, ...], and the weights."""
    shapes = dict(q=(*tokens, Hq, D), k=(*keys, Hkv, D), v=(*keys, Hkv, Dv))
    if gate == "weight":
        shapes["gate_weight"] = (Hq, branches, D)
    if gate == "given":
        shapes["gates"] = (*tokens, Hq, branches)
    return shapes | (dict(compress_k_weight=(Hkv, D, D), compress_v_weight=(Hkv, Dv, Dv)) if projected else {})


def _start(target: dict[str, str]) -> tuple[subprocess.Popen, Connection]:
    """A helper for an architecture, which finds modules where this process does and sees no GPU; an interrupt is for
    this process."""
    folders = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    environment = os.environ | target | {"PYTHONPATH": folders, "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ""}
    ours, theirs = Pipe()
    with theirs:
        fd = theirs.fileno()
        command = [sys.executable, "-m", "nsa_layer.warm_up.worker", str(fd)]
        options = dict(stdin=subprocess.DEVNULL, pass_fds=[fd], start_new_session=True)
        return subprocess.Popen(command, env=environment, **options), ours


def _own_target() -> dict[str, str]:
    """The variables that make a process without a GPU compile for this one's."""
    from flash_attn.cute.runtime.kernel_cache import multiprocessors

    arch = device_arch()
    if kernel_family(arch) not in ENVIRONMENT:
        reason = f"no kernels for sm_{arch}" if arch else "no GPU"
        raise NotImplementedError(f"{reason}: set FLASH_ATTENTION_ARCH to one to compile for, such as sm_90")
    target = ENVIRONMENT[kernel_family(arch)] | {"FLASH_ATTENTION_ARCH": f"sm_{arch}", "CUTE_DSL_ARCH": f"sm_{arch}a"}
    if (count := multiprocessors()) is not None:
        target["FLASH_ATTENTION_NUM_SMS"] = str(count)
    return target | {name: os.environ[name] for name in target if name in os.environ}
