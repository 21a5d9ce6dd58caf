"""Where packed sequences start, counted in tokens, in compressed blocks and in query tiles."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch

from nsa_layer.config import NSAConfig
from nsa_layer.problem import Problem


class Packing(NamedTuple):
    """Starts are int32 [sequences + 1] on the GPU and end with the total.

    Attributes:
        cu_seqlens, cu_blocks, cu_tiles: of tokens, of compressed blocks, of query tiles.
        total_blocks, total_tiles: of all sequences.
        longest, longest_blocks: of one sequence, in tokens and in compressed blocks.
    """

    cu_seqlens: torch.Tensor
    cu_blocks: torch.Tensor
    cu_tiles: torch.Tensor
    total_blocks: int
    total_tiles: int
    longest: int
    longest_blocks: int

    @classmethod
    def of(cls, problem: Problem, cu_seqlens: torch.Tensor | None, device: torch.device) -> Packing | None:
        """None for a batch of equal length.

        Args:
            cu_seqlens: on `device`, or on the CPU: then there is a copy of it, which nothing waits for.
        """
        if problem.lengths is None:
            return None
        # Fake tensors, which kernels are compiled with, are not for later calls.
        find = _starts if type(cu_seqlens) is torch.Tensor else _starts.__wrapped__
        starts, sent, blocks, tiles = find(problem.lengths, problem.config, device)
        _used(sent, *starts)
        longest = max(problem.lengths)
        cu_seqlens = starts_on(cu_seqlens, device)
        return cls(cu_seqlens, *starts, blocks, tiles, longest, problem.config.compressed_length(longest))


def starts_on(cu_seqlens: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The starts [sequences + 1] on `device`: themselves, or for those on the CPU the copy that was made before."""
    if cu_seqlens.device == device:
        return cu_seqlens
    copied, sent = _copied(tuple(cu_seqlens.tolist()), device)
    _used(sent, copied)
    return copied


@lru_cache(maxsize=64)  # the same packing is seen layer after layer, and by every call that a CUDA graph captures
def _copied(numbers: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    return _moved(torch.tensor(numbers, dtype=torch.int32), device)


@lru_cache(maxsize=64)
def _starts(
    lengths: tuple[int, ...], config: NSAConfig, device: torch.device
) -> tuple[tuple[torch.Tensor, ...], torch.cuda.Event | None, int, int]:
    starts = [
        list(accumulate(map(counted, lengths), initial=0)) for counted in (config.compressed_length, config.num_tiles)
    ]
    blocks, tiles = (of[-1] for of in starts)
    moved, sent = _moved(torch.tensor(starts, dtype=torch.int32), device)
    return moved.unbind(), sent, blocks, tiles


def _moved(numbers: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """A copy, and the event after it: the host does not wait, for that would be for all that the GPU has to do before.

    Raises:
        RuntimeError: in a CUDA graph, whose replays would copy from memory that is no longer there.
    """
    if _is_captured(device):
        raise RuntimeError(
            "a call with these cu_seqlens is captured in a CUDA graph before it was made once; make it once before"
        )
    if device.type != "cuda" or type(numbers) is not torch.Tensor:
        return numbers.to(device), None
    moved = numbers.pin_memory().to(device, non_blocking=True)
    return moved, torch.cuda.current_stream(device).record_event()


# A CUDA graph reads what the call that it captured read, for as long as there are replays.
_held: dict[int, torch.Tensor] = {}


def _used(sent: torch.cuda.Event | None, *tensors: torch.Tensor) -> None:
    """Before copies are read, maybe on another stream. In a capture, before which all is done, they are kept for good:
    the caches forget them at some time."""
    if _is_captured(tensors[0].device):
        _held.update((id(tensor), tensor) for tensor in tensors)
    elif sent is not None:
        torch.cuda.current_stream(tensors[0].device).wait_event(sent)


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
