"""Short calls without the host's work: what a call allocated and launched, as straight-line Python.

The second call of a layout is recorded, operators of PyTorch by a dispatch mode and launches by the caches of kernels.
Later ones run its tape: nothing is checked, planned or looked up again. Whatever the host decides has to follow from
options, sizes, strides, dtypes and alignments, so a call that reads a tensor's numbers gets no tape.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nsa_layer import profiler_ranges

Tensor = torch.Tensor
Tape = Callable[..., tuple]
LAUNCHES = "flash_attn.cute.runtime.launches"  # loaded with the first kernel
MOST_TAPES = 256  # layouts
LONGEST = 1 << 28  # bytes of a call's tensors; longer calls hide the host's work
ALLOCATIONS = {f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")}
ALIASES = "aten::detach", "aten::alias"
# A layout's tape; None: its next call is recorded; False: there is none, or it is being recorded.
_tapes: dict[tuple, Tape | bool | None] = {}


def replayed(function: Callable[..., tuple], *, budget: int | None = None) -> Callable[..., tuple]:
    """The function, of tensors and what can be hashed, to a flat tuple of tensors and None; from tapes where it can.

    Args:
        budget: the number of the argument that is a memory budget, if there is one. A call with a budget gets no tape:
            while it is recorded, its workspace is kept.
    """

    @wraps(function)
    def call(*args: Any) -> tuple:
        return for_layout(function, args, budget=budget)(*args)

    return call


def for_layout(function: Callable[..., tuple], args: tuple, *, budget: int | None = None) -> Callable[..., tuple]:
    """The tape of the arguments' layout; for a layout's second call, the function recorded; else the function itself.

    Args:
        function, budget: of `replayed`.
    """
    layout = _layout(function, args) if budget is None or args[budget] is None else None
    tape = False if layout is None else _tapes[layout] if layout in _tapes else _remember(layout)
    return tape or (function if tape is False else partial(_taped, function, layout))


def _taped(function: Callable[..., tuple], layout: tuple, *args: Any) -> tuple:
    """The function's outputs; its tape is kept where it can have one."""
    _tapes[layout] = False
    recorder, launches = _Recorder(args), sys.modules.get(LAUNCHES)
    with nullcontext() if launches is None else launches.observed(recorder.launched), recorder:
        outputs = function(*args)
    if recorder.fits:
        _tapes[layout] = recorder.tape(outputs)
    return outputs


def forget() -> None:
    """Forget all tapes, which hold their kernels."""
    _tapes.clear()


def _remember(layout: tuple) -> bool:
    if len(_tapes) >= MOST_TAPES:
        _tapes.clear()
    _tapes[layout] = None
    return False


def _layout(function: Callable, args: tuple) -> tuple | None:
    """All that the host's decisions follow from; None where there can be no tape."""
    if profiler_ranges.is_observed() or torch._C._len_torch_dispatch_stack() or torch.compiler.is_compiling():
        return None
    layout, first, total = [function, torch.are_deterministic_algorithms_enabled()], {}, 0
    for i, x in enumerate(args):
        if type(x) in (Tensor, torch.nn.Parameter):
            if not x.is_cuda:
                return None
            total += x.nbytes
            layout.append((first.setdefault(id(x), i), x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16))
        elif isinstance(x, Tensor):
            return None
        else:
            layout.append(tuple(x) if type(x) is list else x)
    return tuple(layout) if total <= LONGEST else None


class _Recorder(TorchDispatchMode):
    """Writes a call down as steps: the names of a step's outputs, its code, and True if it writes to other tensors."""

    def __init__(self, args: tuple) -> None:
        super().__init__()
        self.fits, self.steps, self.kept = True, [], []  # what is kept leaves its id to nothing else
        self.parameters = [f"i{i}" for i in range(len(args))]
        self.names: dict[int, str] = {}
        self.constants: dict[int, tuple[str, Any]] = {}
        for name, x in zip(self.parameters, args):
            if isinstance(x, Tensor):
                self.names.setdefault(id(x), name)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        self.kept.append((args, kwargs, outputs))
        tensors = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        # A number on the host, or a copy there, may decide what comes.
        self.fits &= all(isinstance(x, Tensor) and x.is_cuda for x in tensors)
        name = func._schema.name
        if not self.fits:
            return outputs
        if name in ALIASES:
            self.names.setdefault(id(outputs), self.code(args[0]))
        elif name in ALLOCATIONS:
            options = f"dtype={self.constant(outputs.dtype)}, device={self.constant(outputs.device)}"
            self.step(outputs, f"empty({tuple(outputs.shape)}, {outputs.stride()}, {options})", False)
        else:
            arguments = [*map(self.code, args), *(f"{key}={self.code(x)}" for key, x in kwargs.items())]
            self.step(outputs, f"{self.constant(func)}({', '.join(arguments)})", func._schema.is_mutable)
        return outputs

    def launched(self, compiled: Callable, args: tuple) -> None:
        self.kept.append(args)
        self.step(None, f"{self.constant(compiled)}({', '.join(map(self.code, args))})", True)

    def step(self, outputs: Any, code: str, acts: bool) -> None:
        several = isinstance(outputs, (tuple, list))
        names = []
        for x in outputs if several else (outputs,):
            is_new = isinstance(x, Tensor) and id(x) not in self.names
            names.append(self.names.setdefault(id(x), f"t{len(self.names)}") if is_new else "_")
        self.steps.append((", ".join(names) + "," * several, code, acts))

    def code(self, x: Any) -> str:
        """An argument, as code."""
        if id(x) in self.names:
            return self.names[id(x)]
        if x is None or type(x) in (bool, int):
            return repr(x)
        if isinstance(x, (tuple, list)):
            parts = ", ".join(map(self.code, x))
            of = self.constant(type(x)) if hasattr(x, "_fields") else ""
            return f"[{parts}]" if type(x) is list else f"{of}({parts}{',' * (not of and bool(x))})"
        self.fits &= not isinstance(x, (dict, set))
        return self.constant(x)

    def constant(self, x: Any) -> str:
        self.kept.append(x)
        return self.constants.setdefault(id(x), (f"c{len(self.constants)}", x))[0]

    def tape(self, outputs: tuple) -> Tape:
        """The function of the steps that something is read of; a tensor ends with its last reader."""
        result = [self.code(x) for x in outputs]
        result = ", ".join([f"{x}.detach()" if x.startswith("i") else x for x in result])
        lines, read = [f"    return {result},"], _temporaries(result)
        ended = set(read)
        for names, code, acts in reversed(self.steps):
            if acts or _temporaries(names) & read:
                here = _temporaries(names) | _temporaries(code)
                lines += [f"    del {', '.join(sorted(here - ended))}"] if here - ended else []
                lines.append(f"    {names} = {code}")
                read |= _temporaries(code)
                ended |= here
        text = "\n".join([f"def tape({', '.join(self.parameters)}):", *reversed(lines)])
        used = set(re.findall(r"\bc\d+\b", text))
        scope = {name: x for name, x in self.constants.values() if name in used} | dict(empty=torch.empty_strided)
        exec(compile(text, "<tape of a call>", "exec"), scope)
        return scope["tape"]


def _temporaries(code: str) -> set[str]:
    return set(re.findall(r"\bt\d+\b", code))
