"""Memory that tells who wrote where: outputs and workspaces filled with NaN, and canaries around every buffer.

Within `Guarded` each tensor that PyTorch allocates is a part of a larger one. Its inside is NaN, or a number that
no index has, until somebody writes it; what stands around it has to be there unchanged in the end. The same mode makes
an allocation fail on purpose: any that an operator makes, a copy or a sum as well as an empty tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

GUARD = 1024  # bytes on each side; a multiple of what kernels align to
CANARY = 0xA5
POISON = 0x7A  # of integers, a byte
aten = torch.ops.aten
EMPTY = {aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten.empty_strided.default}
ZEROS = {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default}


class Guarded(TorchDispatchMode):
    """Guards what is allocated within, checks it at the end, and lets the n-th allocation fail.

    Args:
        device: "cpu" or "cuda"; tensors elsewhere are left alone.
        fail_at: which allocation raises torch.OutOfMemoryError, counted from 1; None: none does.
    """

    def __init__(self, device: str = "cpu", fail_at: int | None = None) -> None:
        super().__init__()
        self.device, self.fail_at, self.count = device, fail_at, 0
        self._held: list[tuple[torch.Tensor, int, int, str]] = []

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if kind is None:
            if self.device == "cuda":
                torch.cuda.synchronize()
            self.check()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not self._is_made(function, result):
            return result
        self.count += 1
        if self.count == self.fail_at:
            raise torch.OutOfMemoryError(f"allocation {self.count}, of {function}, fails on purpose")
        if function not in EMPTY and function not in ZEROS or not _is_dense(result):
            return result
        return self._guard(result, zero=function in ZEROS, name=str(function))

    def _is_made(self, function: Any, result: Any) -> bool:
        """True if the operator allocated a result: none of its results shows an argument's memory."""
        results = result if isinstance(result, (tuple, list)) else [result]
        tensors = [t for t in results if isinstance(t, torch.Tensor) and t.device.type == self.device and t.numel()]
        return bool(tensors) and all(returned.alias_info is None for returned in function._schema.returns)

    def _guard(self, like: torch.Tensor, zero: bool, name: str) -> torch.Tensor:
        size = like.numel() * like.element_size()
        around = -size % GUARD + GUARD
        raw = torch.full((GUARD + size + around,), CANARY, dtype=torch.uint8, device=like.device)
        inside = raw[GUARD : GUARD + size]
        if zero:
            inside.zero_()
        elif like.is_floating_point():
            inside.view(like.dtype).fill_(float("nan"))
        else:
            inside.fill_(POISON)
        self._held.append((raw, size, self.count, f"{name} {tuple(like.shape)} {like.dtype}"))
        typed = inside.view(like.dtype)
        return typed.as_strided(like.shape, like.stride(), typed.storage_offset())

    def check(self) -> None:
        """Raise AssertionError where something wrote around a buffer."""
        for raw, size, number, name in self._held:
            before, after = raw[:GUARD], raw[GUARD + size :]
            for side, part in (("before", before), ("after", after)):
                changed = (part != CANARY).nonzero()
                assert not len(changed), (
                    f"{len(changed)} bytes written {side} allocation {number}, {name}, the first at {int(changed[0])}"
                )


def _is_dense(tensor: torch.Tensor) -> bool:
    if tensor.numel() == 0 or tensor.layout != torch.strided:
        return False
    spanned = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return spanned == tensor.numel()


def untouched(tensors: dict[str, torch.Tensor | None]) -> Any:
    """A function that raises AssertionError if one of these has changed since now."""
    copies = {name: t.detach().clone() for name, t in tensors.items() if t is not None}

    def check() -> None:
        for name, copy in copies.items():
            now = tensors[name].detach()
            same = now.contiguous().view(torch.uint8).equal(copy.contiguous().view(torch.uint8))
            assert same, f"{name} was changed by the call"

    return check
