"""Integers that the host knows, on the GPU: asynchronous copies, kept for later calls, and for CUDA graphs for good."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from itertools import accumulate
from typing import NamedTuple, ParamSpec, TypeVar

import torch

P, R = ParamSpec("P"), TypeVar("R")


def cached(make: Callable[P, R]) -> Callable[P, R]:
    """`make`, whose results are kept where they may serve later calls: the same packing is seen layer after layer, and
    by every call that a CUDA graph captures."""
    kept = lru_cache(maxsize=64)(torch.inference_mode(False)(make))  # a later call may have a backward

    @wraps(make)
    def find(*args: P.args) -> R:
        return (kept if _are_lasting() else make)(*args)

    find.cache_clear = kept.cache_clear
    return find


class HostCopy(NamedTuple):
    """A copy of host integers to the GPU, the stream of the copy, and an event behind it; None without a GPU."""

    numbers: torch.Tensor
    stream: torch.cuda.Stream | None
    sent: torch.cuda.Event | None

    def ready(self) -> torch.Tensor:
        """The integers, ready to be read on the current stream.

        A stream other than the copy's waits for it, and keeps the memory alive after the caches have dropped it. In a
        capture, before which the copy is complete, they are kept for good.
        """
        device = self.numbers.device
        if _is_captured(device):
            _held[id(self.numbers)] = self.numbers
        elif self.sent is not None:
            stream = torch.cuda.current_stream(device)
            if stream != self.stream:
                stream.wait_event(self.sent)
                self.numbers.record_stream(stream)
        return self.numbers


# A CUDA graph reads what the call that it captured read, for as long as there are replays.
_held: dict[int, torch.Tensor] = {}


def moved(numbers: torch.Tensor, device: torch.device) -> HostCopy:
    """An asynchronous copy.

    Raises:
        RuntimeError: in a CUDA graph, whose replays would copy from memory that is freed.
    """
    if _is_captured(device):
        raise RuntimeError(
            "a call with these cu_seqlens is captured in a CUDA graph before it was made once; make it once before"
        )
    if device.type != "cuda" or type(numbers) is not torch.Tensor:
        return HostCopy(numbers.to(device), None, None)
    stream = torch.cuda.current_stream(device)
    return HostCopy(numbers.pin_memory().to(device, non_blocking=True), stream, stream.record_event())


def _are_lasting() -> bool:
    """True if tensors that are made now may serve later calls: not within a transform, nor a mode with tensors of its
    own, such as the fake ones that kernels are compiled with."""
    return not torch._C._are_functorch_transforms_active() and not torch._C._len_torch_dispatch_stack()


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def starts_on(cu_seqlens: torch.Tensor, device: torch.device) -> torch.Tensor:
    """cu_seqlens [sequences + 1] on `device`: itself, or a cached copy of one on the CPU."""
    if cu_seqlens.device == device:
        return cu_seqlens
    return _copied(tuple(cu_seqlens.tolist()), device).ready()


def numbers_on(rows: tuple[tuple[int, ...], ...], device: torch.device) -> list[torch.Tensor]:
    """Rows of integers as int32 tensors on `device`, from one copy, which is cached."""
    copy, each = _joined(rows, device)
    copy.ready()
    return each


def copied_rows(rows: Sequence[tuple[int, ...]], device: torch.device) -> tuple[HostCopy, list[torch.Tensor]]:
    """One copy of rows of integers, and each of them in it."""
    padded = [n for row in rows for n in (*row, *[0] * (aligned(len(row)) - len(row)))]
    copy = moved(torch.tensor(padded, dtype=torch.int32, device="cpu"), device)
    places = accumulate(map(aligned, map(len, rows)), initial=0)
    # Not by indexing, which looks for the device: fake tensors have none.
    return copy, [copy.numbers.narrow(0, place, len(row)) for place, row in zip(places, rows)]


def aligned(size: int) -> int:
    """Numbers of a multiple of 16 bytes: attention copies what starts elsewhere, at every call."""
    return -(-size // 4) * 4


@cached
def _copied(numbers: tuple[int, ...], device: torch.device) -> HostCopy:
    return moved(torch.tensor(numbers, dtype=torch.int32, device="cpu"), device)


_joined = cached(copied_rows)
