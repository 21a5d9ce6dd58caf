"""The check of a wrong call: whether it passes, raises something else, has begun by then, or touches its inputs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from fuzz.wrong_calls import Arguments, Table

# Operators that allocate a tensor, or make another view of a tensor.
HARMLESS = tuple("empty detach alias view expand t. transpose select slice unsqueeze permute as_strided".split())


class _Watch(TorchDispatchMode):
    """Operators that compute floating-point numbers: what a call does that has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = str(function).removeprefix("aten.")
        results = result if isinstance(result, (tuple, list)) else [result]
        floats = any(isinstance(t, torch.Tensor) and t.is_floating_point() for t in results)
        if floats and not name.startswith(HARMLESS):
            self.begun.append(name)
        return result


def complaint(table: Table, name: str, error: type[Exception], words: str, value: Any) -> str | None:
    """The complaint about how a wrong call is refused, or None; arguments as of `Table.calls`."""
    with ExitStack() as stack:
        if table.device == "cuda" and not has_gpu(table.arch):
            stack.enter_context(fake_gpu(table.arch))
        given = table.arguments(name, value)
        with unset_fake_temporarily():
            before = list(_copies(given))
        stack.enter_context(no_kernels())
        watch = stack.enter_context(_Watch())
        try:
            table.call(**given)
        except Exception as raised:
            kind, said = type(raised), str(raised)
        else:
            return f"was taken: {value!r:.200}"
        begun = list(watch.begun)
    if kind is not error or not re.search(words, said, re.DOTALL):
        return f"raised {kind.__name__}: {said[:200]}\n    expected {error.__name__}: {words}"
    if begun and table.first:
        return f"was refused only after {begun[:3]}"
    for tensor, copy in before:
        if not torch.equal(*(x.contiguous().view(-1).view(torch.uint8) for x in (tensor, copy))):
            return "changed one of its inputs"
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        if float(torch.ones(2, device="cuda").sum()) != 2:
            return "left the GPU unusable"
    return None


def _copies(given: Arguments) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for value in given.values():
        parts = value if isinstance(value, tuple) else [value]
        for part in parts:
            if type(part) is torch.Tensor and part.device.type != "meta" and part.numel():
                yield part, part.contiguous().clone()


@contextmanager
def no_kernels() -> Iterator[None]:
    """Within, making a kernel is an error: whoever makes one is about to launch it."""
    import cutlass.cute as cute

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a kernel is compiled")

    original, cute.compile = cute.compile, refuse
    try:
        yield
    finally:
        cute.compile = original


def has_gpu(arch: int) -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == arch // 10


@contextmanager
def fake_gpu(arch: int = 90) -> Iterator[None]:
    """Tensors of a GPU of the architecture that have shapes and nothing in them."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from flash_attn.cute import interface

    original = interface._get_device_arch
    interface._get_device_arch = lambda *args: arch
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), patch.dict(os.environ, FLASH_ATTENTION_NUM_SMS="132"):
            yield
    finally:
        interface._get_device_arch = original
