"""What a host function does on the device, recorded once: allocations, PyTorch's operators and compiled kernels.

Most of a short call is Python that finds the same kernel with the same arguments as the last time. A `Recording` sees
what comes out of it, through PyTorch's dispatcher and through the caches of compiled kernels (`observed`), and makes a
`Program` of it: the same steps for other tensors of the same layouts. Views are not steps; a tensor that is one is cut
out of the tensor that it is a view of. What cannot be repeated blindly is refused: values that the host reads, shapes
that depend on values, tensors that the function neither got nor made.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

Slots = list[Any]
Step = Callable[[Slots], None]
aten = torch.ops.aten

EMPTY = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
ZEROS = {aten.zeros.default, aten.new_zeros.default}

_active = threading.local()


class Refused(Exception):
    """The function did something that a program cannot repeat."""


def active() -> Recording | None:
    """This thread's recording."""
    return getattr(_active, "recording", None)


def observed(kernel: Callable[..., object]) -> Callable[..., object]:
    """The kernel, as whoever launches it has to call it: every launch has to go through here."""
    recording = active()
    return kernel if recording is None else recording.launching(kernel)


@dataclass(frozen=True)
class Program:
    """Steps over slots: first the inputs, then constants and what the steps make."""

    template: tuple[Any, ...]
    steps: tuple[Step, ...]
    result: int

    def run(self, inputs: Sequence[torch.Tensor]) -> Any:
        """The function's result for other tensors of the layouts that were recorded."""
        slots = [*inputs, *self.template]
        for step in self.steps:
            step(slots)
        return slots[self.result]


class _Memory(NamedTuple):
    storage: StorageWeakRef  # what is recorded frees its memory when it would without a recording
    offset: int  # of the tensor's first element
    dtype: torch.dtype


class _Place(NamedTuple):
    slot: int | None  # None: a view that no step has asked for yet
    origin: int  # the slot whose tensor's memory it shows


class Recording(TorchDispatchMode):
    """A context: what is done within, on this thread and to these inputs, becomes a program."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.refusal: str | None = None
        self._launching = False
        self._first = len(inputs)
        self._template: list[Any] = []
        self._steps: list[tuple[Step, tuple[int, ...]]] = []  # and the slots that a step reads
        self._places: dict[Hashable, _Place] = {}  # by `_identity`
        self._memory: dict[int, _Memory] = {}  # by the slot of the tensor that it was made for
        for slot, tensor in enumerate(inputs):
            self._own(slot, tensor)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch would import Dynamo to hide `__torch_dispatch__` from it; `_hide_from_dynamo` waits for others to."""
        return False

    def __enter__(self) -> Recording:
        if active() is not None:
            raise RuntimeError("this thread is recording already")
        if "torch._dynamo" in sys.modules:
            _hide_from_dynamo()
        super().__enter__()
        _active.recording = self
        return self

    def __exit__(self, *exception: object) -> None:
        _active.recording = None
        super().__exit__(*exception)

    def program(self, result: Any) -> Program:
        """The steps so far, and a result made of tensors that they or the caller made.

        Raises:
            Refused: something in between cannot be repeated.
        """
        if self.refusal is not None:
            raise Refused(self.refusal)
        out = self._slot(result)
        return Program(tuple(self._template), tuple(self._with_releases(out)), out)

    def launching(self, kernel: Callable[..., object]) -> Callable[..., object]:
        """The kernel; calling it also records the launch."""

        def launch(*arguments: object, **named: object) -> object:
            self._launching = True
            try:
                answer = kernel(*arguments, **named)
            finally:
                self._launching = False
            self._note(lambda: self._launch(partial(kernel, **named) if named else kernel, arguments))
            return answer

        return launch

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self._launching:  # what a launch does with its arguments is the launch's
            self._note(lambda: self._operator(func, args, kwargs, out))
        return out

    def _note(self, take: Callable[[], None]) -> None:
        """The call that is recorded is a call: it goes on whatever becomes of the recording."""
        if self.refusal is None:
            try:
                take()
            except Refused as refusal:
                self.refusal = str(refusal)

    def _operator(self, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        outs = [out] if isinstance(out, torch.Tensor) else list(out) if isinstance(out, (tuple, list)) else []
        if func in EMPTY or (func in ZEROS and out.is_contiguous()):
            self._allocate(out, zeros=func in ZEROS)
        elif func.is_view and func is not aten.view.dtype:
            origin = self._origin(args[0])
            for view in outs:
                if self._place(view) is None:
                    self._places[_identity(view)] = _Place(None, origin)
        elif not outs and not holds_tensor((args, kwargs)):
            return  # arithmetic on types
        elif not outs or not all(isinstance(o, torch.Tensor) for o in outs):
            raise Refused(f"{func} gives the host something to act on")
        elif func.tags and {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(func.tags):
            raise Refused(f"{func} waits for values")
        else:
            self._compute(func, args, kwargs, outs, single=isinstance(out, torch.Tensor))

    def _allocate(self, tensor: torch.Tensor, *, zeros: bool) -> None:
        slot, size = self._own(self._append(None), tensor), tuple(tensor.shape)
        options = dict(dtype=tensor.dtype, device=tensor.device)
        if zeros or tensor.is_contiguous():
            make = partial(torch.zeros if zeros else torch.empty, size, **options)
        else:
            make = partial(torch.empty_strided, size, tensor.stride(), **options)

        def step(slots: Slots) -> None:
            slots[slot] = make()

        self._steps.append((step, ()))

    def _compute(self, func: Any, args: tuple, kwargs: dict, outs: list[torch.Tensor], *, single: bool) -> None:
        if any(holds_tensor(value) for value in kwargs.values()):
            raise Refused(f"{func} takes a tensor by keyword")
        reads = tuple(self._slot(arg) for arg in args)
        # An operator that works in place returns an argument.
        in_place = all(self._place(o) is not None for o in outs)
        written = () if in_place else tuple(self._own(self._append(None), o) for o in outs)
        take = _taker(reads)

        def step(slots: Slots) -> None:
            made = func(*take(slots), **kwargs)
            for slot, tensor in zip(written, (made,) if single else made):
                slots[slot] = tensor

        self._steps.append((step, reads))

    def _launch(self, kernel: Callable[..., object], arguments: tuple) -> None:
        reads = tuple(self._slot(argument) for argument in arguments)
        take = _taker(reads)
        self._steps.append((lambda slots: kernel(*take(slots)), reads))

    def _append(self, constant: Any) -> int:
        self._template.append(constant)
        return self._first + len(self._template) - 1

    def _own(self, slot: int, tensor: torch.Tensor) -> int:
        """`slot` is where the tensor is, and its memory is its own: only inputs may share theirs."""
        storage = StorageWeakRef(tensor.untyped_storage())
        self._memory[slot] = _Memory(storage, tensor.storage_offset(), tensor.dtype)
        if self._place(tensor) is None:
            self._places[_identity(tensor)] = _Place(slot, slot)
        return slot

    def _place(self, tensor: torch.Tensor) -> _Place | None:
        """What is known of a tensor; an address means another tensor once its memory was let go of."""
        place = self._places.get(_identity(tensor))
        return None if place is None or self._memory[place.origin].storage.expired() else place

    def _origin(self, tensor: torch.Tensor) -> int:
        """The slot whose tensor's memory this one shows."""
        place = self._place(tensor)
        if place is not None:
            return place.origin
        storage = tensor.untyped_storage()._cdata
        owners = [slot for slot, memory in self._memory.items() if memory.storage.cdata == storage]
        if len(owners) != 1:
            said = "of memory that several inputs share" if owners else "that was neither passed nor made here"
            raise Refused(f"a tensor {tuple(tensor.shape)} {said}")
        return owners[0]

    def _slot(self, value: Any) -> int:
        """Where steps find the value."""
        if isinstance(value, torch.Tensor):
            place = self._place(value)
            return self._cut(value) if place is None or place.slot is None else place.slot
        if isinstance(value, (tuple, list)) and holds_tensor(value):
            return self._collect(value)
        if holds_tensor(value):
            raise Refused(f"a {type(value).__name__} with tensors in it")
        return self._append(value)

    def _cut(self, tensor: torch.Tensor) -> int:
        origin = self._origin(tensor)
        memory = self._memory[origin]
        if memory.dtype != tensor.dtype:
            raise Refused(f"memory of {memory.dtype} as {tensor.dtype}")
        slot = self._append(None)
        self._places[_identity(tensor)] = _Place(slot, origin)
        size, stride, shift = tuple(tensor.shape), tensor.stride(), tensor.storage_offset() - memory.offset

        def step(slots: Slots) -> None:
            base = slots[origin]
            slots[slot] = torch.as_strided(base, size, stride, base.storage_offset() + shift)

        self._steps.append((step, (origin,)))
        return slot

    def _collect(self, value: tuple | list) -> int:
        reads, kind = tuple(self._slot(part) for part in value), type(value)
        slot, take = self._append(None), _taker(reads)
        make = kind._make if hasattr(kind, "_make") else kind

        def step(slots: Slots) -> None:
            slots[slot] = make(take(slots))

        self._steps.append((step, reads))
        return slot

    def _with_releases(self, result: int) -> list[Step]:
        """The steps; what no later one reads is let go of, as the function's own variables would be."""
        last = {slot: at for at, (_, reads) in enumerate(self._steps) for slot in reads}
        steps: list[Step] = []
        for at, (step, reads) in enumerate(self._steps):
            steps.append(step)
            done = [s for s in set(reads) if s >= self._first and last[s] == at and s != result]
            done = [s for s in done if self._template[s - self._first] is None]
            if done and at + 1 < len(self._steps):
                steps.append(_releasing(done))
        return steps


@lru_cache(maxsize=1)
def _hide_from_dynamo() -> None:
    """Keep torch.compile from compiling what watches the operators, as it would within a function that it compiles."""
    Recording.__torch_dispatch__ = torch.compiler.disable(Recording.__torch_dispatch__)


def holds_tensor(value: Any) -> bool:
    """Whether there is a tensor in the value, as far as one can see."""
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, (tuple, list, set, frozenset)):
        return any(map(holds_tensor, value))
    if isinstance(value, dict):
        return any(map(holds_tensor, value.values()))
    if is_dataclass(value) and not isinstance(value, type):
        return any(holds_tensor(getattr(value, field.name)) for field in fields(value))
    return False


def _identity(tensor: torch.Tensor) -> Hashable:
    """Tensors that are alive and equal in this are the same to a kernel."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _taker(slots: tuple[int, ...]) -> Callable[[Slots], tuple]:
    if len(slots) > 1:
        return itemgetter(*slots)
    return lambda values: tuple(values[slot] for slot in slots)


def _releasing(done: list[int]) -> Step:
    def step(slots: Slots) -> None:
        for slot in done:
            slots[slot] = None

    return step
