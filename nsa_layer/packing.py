"""Where packed sequences start, counted in tokens, in compressed blocks and in query tiles."""

from __future__ import annotations

from functools import lru_cache
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
        starts, blocks, tiles = _starts(problem.lengths, problem.config, cu_seqlens.device)
        longest = max(problem.lengths)
        return cls(cu_seqlens, *starts, blocks, tiles, longest, problem.config.compressed_length(longest))


@lru_cache(maxsize=64)  # the same packing is seen layer after layer
def _starts(
    lengths: tuple[int, ...], config: NSAConfig, device: torch.device
) -> tuple[tuple[torch.Tensor, ...], int, int]:
    counts = torch.tensor([[counted(n) for n in lengths] for counted in (config.compressed_length, config.num_tiles)])
    blocks, tiles = counts.sum(1).tolist()
    starts = torch.nn.functional.pad(counts.cumsum(1), (1, 0)).to(device, torch.int32)
    return starts.unbind(), blocks, tiles
