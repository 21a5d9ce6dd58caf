"""Compiles the kernels of calls side by side: ahead of them, or all at once when a call finds one of its own missing.

Kernels are compiled by a process of its own, `worker`, and those that it forks. They share nothing with this
one but the cache on disk, where a process that wants a kernel waits for whoever compiles it. So a call whose kernels
are missing goes on as it would alone, and finds most of them made.

``NSA_COMPILE_WORKERS`` is the number of processes, one a core unless given; with 0 a call compiles its kernels one
after the other. ``NSA_COMPILE_PROGRESS=0`` leaves out the line that says what a call waits for.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import NoReturn

import torch

from nsa_layer.config import NSAConfig
from nsa_layer.support import device_arch, kernel_family
from nsa_layer.warm_up.lookup import ENVIRONMENT, Order, Outcome
from nsa_layer.warm_up.shapes import CallShape

WORKERS, PROGRESS = "NSA_COMPILE_WORKERS", "NSA_COMPILE_PROGRESS"

# Processes that compile, and the ends of pipes that keep them alive; None where they are done.
_begun: dict[CallShape, tuple[int, int] | None] = {}


def processes() -> int:
    """Processes that compile at once; ValueError where the variable is no number."""
    given = os.environ.get(WORKERS) or str(len(os.sched_getaffinity(0)))
    if not given.isdecimal():
        raise ValueError(f"{WORKERS} must be a number of processes, got {given!r}")
    return int(given)


def compile_calls(calls: Iterable[CallShape], *, target: dict[str, str], jobs: int) -> Iterator[int | Outcome]:
    """Compile each kernel of the calls once; yields their number, then outcomes as they come.

    Args:
        target: variables of the architecture that is compiled for, see `lookup.ENVIRONMENT`.
        jobs: processes at once.

    Raises:
        RuntimeError: kernels are not kept on disk, or the process that compiles them has ended.
    """
    with _start(Order(tuple(calls), jobs), target, stdout=subprocess.PIPE) as worker:
        try:
            left = 1
            while left:
                said = pickle.load(worker.stdout)
                if isinstance(said, Exception):
                    raise said
                yield said
                left = said if isinstance(said, int) else left - 1
            worker.wait()
        except EOFError:
            raise RuntimeError(f"the process that compiles has ended with status {worker.wait()}") from None
        finally:
            worker.stdin.close()


def warm_up(
    config: NSAConfig,
    shapes: Iterable[tuple[int, int, int, int, int]],
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
        config, causal: as in `nsa`.
        shapes: (B, T, Hq, Hkv, D) of each call; most calls that differ in B or T alone launch the same kernels.
        dtype: of q, k and v.
        packed: the calls are of B packed sequences of T tokens, and of as many of any lengths with starts on the GPU.
        gate: "weight" (``gate_weight``), "given" (``gates``) or "none".
        projected: with ``compress_k_weight`` and ``compress_v_weight``.
        backward: backward too.

    Raises:
        ValueError: a shape is not (B, T, Hq, Hkv, D).
        NotImplementedError: there are no kernels for this architecture.
        RuntimeError: a kernel does not compile, or kernels are not kept on disk.
    """
    begin, calls = time.perf_counter(), []
    options = dict(config=config, dtype=dtype, gate=gate, projected=projected, causal=causal, backward=backward)
    for shape in shapes:
        if len(shape) != 5:
            raise ValueError(f"a shape must be (B, T, Hq, Hkv, D), got {shape!r}")
        B, T, Hq, Hkv, D = shape
        sizes = dict(Hq=Hq, Hkv=Hkv, D=D, Dv=D, **options)
        # Where the host does not know lengths, lists have room for one sequence of all tokens.
        for lengths in ((T,) * B, (B * T, *[0] * (B - 1))) if packed else (None,):
            where = dict(B=B, T=T) if lengths is None else dict(B=1, T=B * T, lengths=lengths)
            calls.append(CallShape(**where, **sizes))
    for outcome in compile_calls(calls, target=_own_target(), jobs=max(1, processes())):
        if isinstance(outcome, Outcome) and outcome.error:
            raise RuntimeError(f"{outcome.kernel}: {outcome.error}")
    return time.perf_counter() - begin


def compile_missing(shape: Callable[[], CallShape]) -> AbstractContextManager[None]:
    """Within, the first kernel that is not in the cache makes another process compile all that the call will launch."""
    from flash_attn.cute.runtime import kernel_cache

    return kernel_cache.at_first_miss(lambda: _begin(shape()))


def _begin(call: CallShape) -> None:
    """Fork a process that compiles what the call will launch.

    A fork has what this process has imported, which takes longer than most kernels. As a data loader's, it leaves the
    GPU alone; it ends when this process does.
    """
    jobs = processes()
    if jobs < 2 or call in _begun:
        return
    from flash_attn.cute.runtime import kernel_cache, lazy_imports

    for past, running in _begun.items():
        if running is not None and _has_ended(running[0]):
            os.close(running[1])
            _begun[past] = None
    lazy_imports.import_compiler()
    kernel_cache.TURNS.end()
    progress = os.environ.get(PROGRESS, "1") != "0" and os.environ.get("LOCAL_RANK", "0") == "0"
    order, target = Order((call,), jobs, wait=False, progress=progress), _own_target()
    source, held = os.pipe()
    with warnings.catch_warnings():  # Python warns of threads, which the fork will not have
        warnings.simplefilter("ignore")
        try:
            forked = os.fork()
        except OSError:  # too many processes, or too little memory: the call compiles one kernel after the other
            os.close(source)
            os.close(held)
            _begun[call] = None
            return
    if not forked:
        _compile_and_end(order, target, source, held)
    os.close(source)
    _begun[call] = forked, held


def _has_ended(process: int) -> bool:
    try:
        return os.waitpid(process, os.WNOHANG)[0] != 0
    except ChildProcessError:  # waited for by others: who ignores SIGCHLD leaves that to the system
        return True


def _compile_and_end(order: Order, target: dict[str, str], source: int, held: int) -> NoReturn:
    """In a fork."""
    from nsa_layer.warm_up import worker

    status = 1
    try:
        os.close(held)
        os.environ |= target
        torch.cuda.is_available = lambda: False
        multiprocessing.current_process()._config["daemon"] = False  # a data loader's process forks too
        with open(os.devnull, "wb") as nobody:
            worker.compile_all(order, source, nobody)
        status = 0
    finally:
        os._exit(status)


def _start(order: Order, target: dict[str, str], **pipes: int) -> subprocess.Popen:
    """The worker, at work. It finds modules where this process does, and sees no GPU."""
    folders = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    beside = {"PYTHONPATH": folders, "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "nsa_layer.warm_up.worker"]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, env=os.environ | target | beside, **pipes)
    pickle.dump(order, worker.stdin)
    worker.stdin.flush()
    return worker


def _own_target() -> dict[str, str]:
    """The variables that make a process without a GPU compile for this one's."""
    from cutlass.base_dsl.dsl import BaseDSL

    from flash_attn.cute.runtime.kernel_cache import multiprocessors

    arch = device_arch()
    if kernel_family(arch) not in ENVIRONMENT:
        found = f"no kernels for sm_{arch}" if arch else "no GPU"
        raise NotImplementedError(
            f"{found}: set FLASH_ATTENTION_ARCH to the architecture to compile for, such as sm_90"
        )
    target = ENVIRONMENT[kernel_family(arch)] | {"FLASH_ATTENTION_ARCH": f"sm_{arch}"}
    if "FLASH_ATTENTION_ARCH" in os.environ:
        return target | {name: os.environ[name] for name in target if name in os.environ}
    major, minor, suffix = BaseDSL._get_dsl().get_arch_enum().value
    return target | {"CUTE_DSL_ARCH": f"sm_{major}{minor}{suffix}", "FLASH_ATTENTION_NUM_SMS": str(multiprocessors())}
