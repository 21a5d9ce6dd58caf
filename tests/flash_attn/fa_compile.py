"""Kernels compiled for a given architecture on any machine, by a worker process per architecture.

The kernels look at the architecture once a process, so it cannot be a parameter of a test that runs
in pytest's own. A worker sees no GPU, imports the kernels once, and runs functions of test modules
under FakeTensorMode: tensors have shapes and no memory, so kernels are compiled and never launched.
"""

import atexit
import gc
import importlib.util
import inspect
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

MULTIPROCESSORS = {"sm_90": 132, "sm_100": 148}


def pool() -> dict[str, str]:
    """The environment of a process that shares compiled kernels with all others of this test run.

    They are keyed by all of the package's sources and each kernel's own options; the folder goes when the run ends.
    """
    return {
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": os.environ["KERNEL_POOL"],
    }


class WorkerError(Exception):
    """An error raised in a worker: its type's name, and the traceback as the message."""

    def __init__(self, kind: str, said: str) -> None:
        super().__init__(f"{kind} in the worker\n{said}")
        self.kind = kind


class Worker:
    """A process that compiles and traces for `arch`; it begins with the first request.

    Kernels are compiled into the test run's pool, and come from there when they are asked for again; not pooled: each
    is compiled.
    """

    def __init__(self, arch: str, pooled: bool = True) -> None:
        self.arch = arch
        self._process: subprocess.Popen[bytes] | None = None
        self._environment = os.environ | {
            "FLASH_ATTENTION_ARCH": arch,
            "CUTE_DSL_ARCH": f"{arch}a",
            "FLASH_ATTENTION_NUM_SMS": str(MULTIPROCESSORS[arch]),
            "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0",
            "CUDA_VISIBLE_DEVICES": "",
        }
        self._environment |= pool() if pooled else {}

    def run(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a module-level function of a test file, with kernels compiled to machine code.

        What looks at the tracing of kernels asks `trace`: a kernel out of the pool is not traced.
        """
        return self._ask(function, args, options, traced=False)

    def trace(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """The same for what only looks at how kernels are built: they end as IR, in a sixth of the time.

        Every kernel that the function asks for is traced, also those of requests before.
        """
        return self._ask(function, args, options, traced=True)

    def _ask(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], traced: bool) -> Any:
        if self._process is None:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen([sys.executable, __file__], stdin=pipe, stdout=pipe, env=self._environment)
        request = (function.__module__, inspect.getsourcefile(function), function.__qualname__, args, options, traced)
        try:
            pickle.dump(request, self._process.stdin)
            self._process.stdin.flush()
            good, answer = pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError):
            code, self._process = self._process.wait(), None
            raise WorkerError("Exit", f"it ended with code {code}") from None
        if not good:
            raise WorkerError(*answer)
        return answer

    def close(self) -> None:
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait()
            self._process = None


@contextmanager
def refused(said: str) -> Iterator[None]:
    """Not supported, in a worker, in words that `said` matches."""
    with pytest.raises(WorkerError, match=said) as caught:
        yield
    assert caught.value.kind == "NotImplementedError"


def in_order(cases: list[Any], *values: Any) -> list[tuple[Any, Any]]:
    """Each case with one of the values."""
    return [(case, values[i % len(values)]) for i, case in enumerate(cases)]


def swept(cases: Iterable[Any], every: int = 3) -> list[Any]:
    """The first of each so many cases for `make test`, and the others for `make test-all`."""
    return [pytest.param(case, marks=pytest.mark.sweep if i % every else ()) for i, case in enumerate(cases)]


@cache
def shared_worker(arch: str) -> Worker:
    """The worker for an architecture of all tests of this process; it ends with the process."""
    worker = Worker(arch)
    atexit.register(worker.close)
    return worker


@contextmanager
def built_kernels(kind: str = "Flash", traced: bool = False) -> Iterator[list[Any]]:
    """The kernels, of classes whose names begin so, that calls in the body ask to compile.

    traced: they are, for what they find out about themselves on the way.
    """
    import cutlass.cute as cute

    built: list[Any] = []
    original = cute.compile

    def build(kernel: Any, *args: Any, **options: Any) -> Any:
        built.append(kernel)
        return original(kernel, *args, **options) if traced else None

    cute.compile = build
    try:
        yield built
    finally:
        cute.compile = original
        built[:] = [kernel for kernel in built if type(kernel).__name__.startswith(kind)]


def kernel_fields(
    names: str, compile_: Callable[..., Any], *args: Any, kind: str = "FlashAttentionForwardSm90", traced: bool = False
) -> list[tuple[Any, ...]]:
    """Fields of the kernels that a call asks to compile, of classes whose names begin so; in a worker."""
    with built_kernels(kind, traced) as kernels:
        compile_(*args)
    return [tuple(getattr(kernel, name) for name in names.split()) for kernel in kernels]


def compile_forward(*cases: Any, **more: Any) -> None:
    """Forward of cases, on tensors without memory; in a worker."""
    from fuzz.attention import forward, make_inputs

    for case in cases:
        forward(case, make_inputs(case), **more)


def compile_backward(*cases: Any, **more: Any) -> None:
    """Backward of cases, on tensors without memory; in a worker."""
    from fuzz.attention import backward, make_inputs, outputs

    for case in cases:
        x = make_inputs(case)
        backward(case, x, *outputs(case, x), **more)


def on_cpu(program: Any, table: Any, out: Any, *static: Any) -> Any:
    """What a program of the DSL writes on the CPU from a table's numbers; in a worker.

    out: the tensor that it writes to, or the shape for each row of the table of an int32 one, -1 before.
    """
    import cutlass.cute as cute
    import torch
    from cutlass.cute.runtime import from_dlpack
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        out = torch.full((len(table), *out), -1, dtype=torch.int32) if isinstance(out, tuple) else out
        args = [from_dlpack(t).mark_layout_dynamic() for t in (table, out)]
        cute.compile(program, *args, *static, options="--enable-tvm-ffi")(table, out)
        return out


@dataclass(frozen=True)
class MaskCall:
    """One call of a mask function while a kernel was traced."""

    mask_seqlen: bool
    mask_causal: bool
    mask_local: bool
    mask_mod: bool
    inside: tuple[str, ...]  # the operations around it, innermost first: "scf.for", "scf.if", ...


@contextmanager
def noted(owner: Any, name: str, note: Callable[..., Any], found: list[Any] | None = None) -> Iterator[list[Any]]:
    """Notes of the arguments of each call of `owner.name` in the body; added to `found` if that is given."""
    found, original = [] if found is None else found, getattr(owner, name)

    @wraps(original, updated=())
    def noting(*args: Any, **kwargs: Any) -> Any:
        found.append(note(*args, **kwargs))
        return original(*args, **kwargs)

    setattr(owner, name, noting)
    try:
        yield found
    finally:
        setattr(owner, name, original)


@contextmanager
def recorded_masks() -> Iterator[list[MaskCall]]:
    """Every mask that the kernels traced in the body put into their code."""
    from flash_attn.cute.mask import AttentionMask

    calls: list[MaskCall] = []
    with ExitStack() as undo:
        for name in ("apply_mask", "apply_mask_sm100", "apply_mask_sm100_transposed"):
            note = partial(_mask_call, inspect.signature(getattr(AttentionMask, name)))
            undo.enter_context(noted(AttentionMask, name, note, calls))
        yield calls


def _mask_call(signature: inspect.Signature, *args: Any, **kwargs: Any) -> MaskCall:
    given = signature.bind(*args, **kwargs)
    given.apply_defaults()
    said = given.arguments
    flags = (bool(said[flag]) for flag in ("mask_seqlen", "mask_causal", "mask_local"))
    return MaskCall(*flags, said["mask_mod"] is not None, operations_around())


def operations_around() -> tuple[str, ...]:
    from cutlass._mlir import ir

    names, operation = [], ir.InsertionPoint.current.block.owner
    while operation is not None:
        names.append(operation.operation.name)
        operation = operation.operation.parent
    return tuple(names)


@contextmanager
def only_hosts() -> Iterator[list[Any]]:
    """Kernels are launched without their code: host functions alone are traced. The configurations of all launches."""
    from cutlass.cutlass_dsl.cutlass import KernelLauncher

    launches: list[Any] = []

    def launch(kernel: Any, *args: Any, **options: Any) -> None:
        kernel._launched = True
        kernel.dsl._preprocess_launch_config_args(args, options)
        launches.append(kernel.dsl.LaunchConfig(*args, **options))

    with patch.object(KernelLauncher, "launch", launch):
        yield launches


def _load(name: str, path: str) -> Any:
    """A module by its name, or a test file, which belongs to no package."""
    if "." in name:
        return importlib.import_module(name)
    folder = str(Path(path).parent)
    if name not in sys.modules:
        sys.path += [folder] * (folder not in sys.path)  # for what stands beside the test
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@contextmanager
def uncached() -> Iterator[None]:
    """No kernel comes from a cache or stays in one: each that the body asks for is built."""
    from flash_attn.cute.cache_utils import JITCache, JITPersistentCache

    built: dict[tuple[Any, Any], Any] = {}
    own = {
        "__contains__": lambda cache, key: (cache, key) in built,
        "__getitem__": lambda cache, key: built[cache, key],
        "__setitem__": lambda cache, key, kernel: built.update({(cache, key): kernel}),
        "clear": lambda cache: built.clear(),
    }

    def forget() -> None:
        """Kernels that the layer keeps in front of the caches."""
        if launch := sys.modules.get("nsa_layer.kernels.launch"):
            launch.forget()

    with ExitStack() as undo:
        for kind in (JITCache, JITPersistentCache):
            undo.enter_context(patch.multiple(kind, **own))
        forget()
        undo.callback(forget)
        yield


@contextmanager
def _only_traced() -> Iterator[None]:
    """Kernels end as IR: each request to trace traces what it asks for."""
    from cutlass.cutlass_dsl import CuTeDSL

    with patch.object(CuTeDSL._get_dsl().envar, "dryrun", True), uncached():
        yield


def _serve() -> None:
    # Compilers print: only pickles may go where the answers go.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    gc.disable()
    from torch._functorch import config
    from torch._subclasses.fake_tensor import FakeTensorMode

    from nsa_layer.fork import fork_status

    # Reading a fake tensor's address raises, where it otherwise warns; stock upstream reads it.
    config.fake_tensor_allow_unsafe_data_ptr_access = fork_status().kind == "stock"
    while True:
        try:
            module, path, name, args, options, traced = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            with _only_traced() if traced else nullcontext(), FakeTensorMode():
                answer = (True, getattr(_load(module, path), name)(*args, **options))
        except Exception as error:
            answer = (False, (type(error).__name__, traceback.format_exc()))
        pickle.dump(answer, answers)
        answers.flush()
        if not gc.isenabled():
            gc.freeze()  # what was imported stays: no collection has to look at it
            gc.enable()


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2]))  # for `fuzz`, behind the packages under test
    # Under its own name too: what test files import, and what is pickled, has to be this module.
    sys.modules["fa_compile"] = sys.modules["__main__"]
    MaskCall.__module__ = "fa_compile"
    _serve()
