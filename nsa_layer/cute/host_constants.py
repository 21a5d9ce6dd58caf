"""Integers that the host knows, on the GPU: asynchronous copies, kept for later calls, and for CUDA graphs for good."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

import torch

KEPT = 128  # copies: the same packing is seen layer after layer, and by every call that a CUDA graph captures
# A CUDA graph reads what the call that it captured read, for as long as there are replays.
_held: dict[int, torch.Tensor] = {}


def numbers_on(rows: tuple[tuple[int, ...], ...], device: torch.device) -> list[torch.Tensor]:
    """Rows of integers as int32 tensors on `device`, each aligned to 16 bytes, from one copy, which is cached.

    A stream other than the copy's waits for it, and keeps the memory alive after the cache has dropped it. In a
    capture, before which the copy is complete, it is kept for good.

    Raises:
        RuntimeError: in a CUDA graph without an earlier copy: replays would copy from memory that is freed.
    """
    numbers, each, sent = (_copied if _are_lasting() else _copied.__wrapped__)(rows, device)
    if _is_captured(device):
        _held[id(numbers)] = numbers
    elif sent is not None and (stream := torch.cuda.current_stream(device)) != sent[0]:
        stream.wait_event(sent[1])
        numbers.record_stream(stream)
    return each


def starts_on(cu_seqlens: torch.Tensor, device: torch.device) -> torch.Tensor:
    """cu_seqlens [sequences + 1] on `device`: itself, or a cached copy of one on the CPU."""
    return cu_seqlens if cu_seqlens.device == device else numbers_on((tuple(cu_seqlens.tolist()),), device)[0]


def aligned(size: int) -> int:
    """size rounded up to 16 bytes of int32: attention copies unaligned tensors, at every call."""
    return -(-size // 4) * 4


@lru_cache(maxsize=KEPT)
@torch.inference_mode(False)  # a later call may have a backward
def _copied(
    rows: tuple[tuple[int, ...], ...], device: torch.device
) -> tuple[torch.Tensor, list[torch.Tensor], tuple[torch.cuda.Stream, torch.cuda.Event] | None]:
    """One copy of rows of integers, each of them in it, and on a GPU the copy's stream and an event behind it."""
    if _is_captured(device):
        raise RuntimeError(
            "CUDA graph capture: run a call with these lengths once before capturing it, so that they are on the GPU"
        )
    padded = [n for row in rows for n in (*row, *[0] * (aligned(len(row)) - len(row)))]
    numbers, sent = torch.tensor(padded, dtype=torch.int32, device="cpu"), None
    if device.type != "cuda" or type(numbers) is not torch.Tensor:
        numbers = numbers.to(device)
    else:
        stream, numbers = torch.cuda.current_stream(device), numbers.pin_memory().to(device, non_blocking=True)
        sent = stream, stream.record_event()
    offsets = accumulate(map(aligned, map(len, rows)), initial=0)
    # Not by indexing, which looks for the device: fake tensors have none.
    return numbers, [numbers.narrow(0, offset, len(row)) for offset, row in zip(offsets, rows)], sent


def _are_lasting() -> bool:
    """True if new tensors may serve later calls: not within a transform, nor a mode with its own tensors, such as
    the fake ones that kernels are compiled with; PyTorch records CUDA graphs in modes without."""
    if torch._C._are_functorch_transforms_active():
        return False
    return not torch._C._len_torch_dispatch_stack() or type(torch.empty(0)) is torch.Tensor


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
