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
    def of(cls, problem: Problem, cu_seqlens: torch.Tensor | None) -> Packing | None:
        """None for a batch of equal length."""
        if problem.lengths is None:
            return None
        # Fake tensors, which kernels are compiled with, are not for later calls.
        find = _starts if type(cu_seqlens) is torch.Tensor else _starts.__wrapped__
        starts, blocks, tiles = find(problem.lengths, problem.config, cu_seqlens.device)
        longest = max(problem.lengths)
        return cls(cu_seqlens, *starts, blocks, tiles, longest, problem.config.compressed_length(longest))


@lru_cache(maxsize=64)  # the same packing is seen layer after layer
def _starts(
    lengths: tuple[int, ...], config: NSAConfig, device: torch.device
) -> tuple[tuple[torch.Tensor, ...], int, int]:
    starts = [
        list(accumulate(map(counted, lengths), initial=0)) for counted in (config.compressed_length, config.num_tiles)
    ]
    blocks, tiles = (of[-1] for of in starts)
    return torch.tensor(starts, dtype=torch.int32).to(device).unbind(), blocks, tiles
