"""Calls that are made over and over: their host work is done twice, then only what comes out of it is repeated.

A `Prepared` function keeps a program (see `call_recording`) for every signature that it is called with: layouts, types
and alignment of all tensors, which of them share an address, the values of all other arguments, and what the function
reads besides. The first call of a signature is the function's own (it compiles what has to be compiled), the second is
recorded, and each later one repeats the recording on its own tensors: new outputs, the same kernels. Nothing is guessed
about the function: what a program cannot repeat makes every call of that signature the function's own.

The function has to be one of its arguments: the same signature, the same launches. It must not read values of tensors,
keep tensors between calls, or close over things that change. Under FakeTensorMode nothing is recorded.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from typing import Any

import torch

from flash_attn.cute import fa_logging, utils
from flash_attn.cute.call_recording import Program, Recording, Refused, active, holds_tensor

CAPACITY = 1024  # signatures a function; packed sequences bring new ones all the time
REASONS = 64  # that are kept of why signatures are not repeated

# What attention's host code looks up in the environment at every call.
KNOBS = (
    "FLASH_ATTENTION_ARCH",
    "FLASH_ATTENTION_NUM_SMS",
    "FLASH_ATTENTION_HD256_GENERIC_BWD",
    "FLASH_ATTENTION_BWD_TILE_N",
)

SCALARS = frozenset((int, bool, float, str, type(None)))
TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
MARKS = frozenset(("__leading_dim__", "__assumed_align__"))  # what the fork looks for on tensors it hands to a mask_mod
ALIGNMENT = 31  # the kernels ask for 32 bytes at most

_ONCE, _NEVER = object(), object()  # in a program's place: called once so far; the function's own for good


class Prepared:
    """A function of tensors and static values whose later calls go straight to the device.

    Args:
        function: as the module says.
        state: what the function reads besides its arguments; `attention_state` unless given.
        unless: where this says so, a call is the function's own: for those who watch what it does on the host.
        capacity: signatures that are kept; the oldest go first.

    Attributes:
        refusals: why signatures are not repeated, of the latest ones.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        state: Callable[[], Hashable] | None = None,
        unless: Callable[[], bool] | None = None,
        capacity: int = CAPACITY,
    ) -> None:
        self.function = function
        self.refusals: list[str] = []
        self._unless = unless
        self._state = attention_state if state is None else state
        self._capacity = capacity
        self._programs: dict[Hashable, Program | object] = {}
        self._lock = threading.Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Within a recording it is part of what is recorded.
        if active() is not None or (self._unless is not None and self._unless()):
            return self.function(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        opaque: list[Any] = []
        try:
            signature = self._signature(args, kwargs, tensors, opaque)
            program = self._programs.get(signature)
        except (_Foreign, TypeError):  # not hashable, or a tensor of another kind: a fake one
            return self.function(*args, **kwargs)
        if type(program) is Program:
            return program.run([t.detach() if t.requires_grad else t for t in tensors])
        if program is _ONCE:
            return self._recorded(signature, tensors, args, kwargs)
        if program is None and not any(map(holds_tensor, opaque)):
            self._keep(signature, _ONCE)
        return self.function(*args, **kwargs)

    def clear(self) -> None:
        """Forget all programs."""
        with self._lock:
            self._programs.clear()
            self.refusals.clear()

    def _signature(self, args: tuple, kwargs: dict, tensors: list[torch.Tensor], opaque: list[Any]) -> Hashable:
        parts: list[Hashable] = [self._state(), torch.is_autocast_enabled("cuda"), len(args)]
        for value in args:
            _describe(value, parts, tensors, opaque)
        for name, value in kwargs.items():
            parts.append(name)
            _describe(value, parts, tensors, opaque)
        addresses = [t.data_ptr() for t in tensors]
        parts += [address & ALIGNMENT for address in addresses]
        if len(set(addresses)) < len(addresses):
            parts.append(tuple(map(addresses.index, addresses)))
        return tuple(parts)

    def _recorded(self, signature: Hashable, tensors: list[torch.Tensor], args: tuple, kwargs: dict) -> Any:
        with Recording(tensors) as recording:
            result = self.function(*args, **kwargs)
        try:
            self._keep(signature, recording.program(result))
        except Refused as refusal:
            self.refusals.append(str(refusal))
            del self.refusals[:-REASONS]
            self._keep(signature, _NEVER)
        return result

    def _keep(self, signature: Hashable, program: Program | object) -> None:
        with self._lock:
            if len(self._programs) >= self._capacity and signature not in self._programs:
                del self._programs[next(iter(self._programs))]
            self._programs[signature] = program


class _Foreign(Exception):
    """A tensor of a type of its own."""


def attention_state() -> Hashable:
    """What the attention functions read besides their arguments."""
    environment = os.environ
    return (
        *(environment.get(knob) for knob in KNOBS),
        fa_logging.get_fa_log_level(),
        utils._get_use_clc_scheduler_default(),
        utils._get_disable_2cta_default(is_fwd=True),
        utils._get_disable_2cta_default(),
        utils._get_disable_s_ping_pong_default(),
    )


def _describe(value: Any, parts: list[Hashable], tensors: list[torch.Tensor], opaque: list[Any]) -> None:
    """Append to `parts` all of the value that can change what is launched, and its tensors to `tensors`.

    `opaque` gets what stands for itself in `parts`.
    """
    kind = type(value)
    if kind in SCALARS:
        parts += (kind, value)  # 1 == 1.0 == True
    elif kind in TENSORS:
        if value.__dict__ and not MARKS.isdisjoint(value.__dict__):
            raise _Foreign
        tensors.append(value)
        parts += (value.shape, value.stride(), value.dtype, value.device, value.requires_grad)
    elif isinstance(value, (tuple, list)):
        parts += (kind, len(value))
        for part in value:
            _describe(part, parts, tensors, opaque)
    elif isinstance(value, torch.Tensor):
        raise _Foreign
    else:
        parts.append(value)
        opaque.append(value)
