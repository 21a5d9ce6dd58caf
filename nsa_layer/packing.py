"""Where packed sequences start, counted in tokens, in compressed blocks and in query tiles."""

from __future__ import annotations

from collections.abc import Callable, Hashable
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
            cu_seqlens: on the device, or on the CPU.
            device: where the kernels run.
        """
        if problem.lengths is None:
            return None
        # Fake tensors, which kernels are compiled with, are not for later calls.
        if type(cu_seqlens) is torch.Tensor:
            tensors, totals = _lasting(_starts, problem.lengths, problem.config, device)
        else:
            tensors, totals = _starts.__wrapped__(problem.lengths, problem.config, device)
        starts = cu_seqlens if cu_seqlens.device == device else tensors[0]
        longest = max(problem.lengths)
        return cls(starts, *tensors[1:], *totals, longest, problem.config.compressed_length(longest))


def starts_on(device: torch.device, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """``cu_seqlens`` where it is, or a copy of it on the device."""
    if cu_seqlens.device == device:
        return cu_seqlens
    return _lasting(_copied, (tuple(cu_seqlens.tolist()),), device)[0]


@lru_cache(maxsize=64)  # the same packing is seen layer after layer
def _starts(
    lengths: tuple[int, ...], config: NSAConfig, device: torch.device
) -> tuple[tuple[torch.Tensor, ...], tuple[int, int]]:
    """Starts counted in tokens, in compressed blocks and in query tiles, and the totals of the last two."""
    counts = (int, config.compressed_length, config.num_tiles)
    rows = tuple(tuple(accumulate(map(counted, lengths), initial=0)) for counted in counts)
    return _copied.__wrapped__(rows, device), (rows[1][-1], rows[2][-1])


@lru_cache(maxsize=64)
def _copied(rows: tuple[tuple[int, ...], ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    return torch.tensor(rows, dtype=torch.int32).to(device).unbind()


def _lasting(find: Callable, *key: Hashable) -> tuple:
    """``find(*key)``, the device last; kept for good where a CUDA graph is captured, which will read it later."""
    if key[-1].type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _captured.setdefault((find, *key), find(*key))
    return find(*key)


_captured: dict[tuple, tuple] = {}
