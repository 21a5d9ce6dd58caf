"""Starts of packed sequences on the GPU, in tokens, compressed blocks and tiles.

The host makes them of the lengths, where it knows these; otherwise the GPU does, and totals are bounds.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch

from nsa_layer.call import CallSpec
from nsa_layer.cute.host_constants import aligned, numbers_on
from nsa_layer.kernels.union_lists.sizes import ROWS
from nsa_layer.support import hopper_kv_tile, reads_unions

# (factor, more, size) of a count: a sequence of T tokens has (T * factor + more) // size, at least 0.
Counts = tuple[tuple[int, int, int], ...]


class Varlen(NamedTuple):
    """Starts are int32 [sequences + 1] on the GPU and end with the total.

    Copies, or made of the caller's ``cu_seqlens``, which may be refilled at any time. Totals and what is longest are
    bounds unless ``spec.lengths_known``.

    Attributes:
        cu_seqlens, cu_tiles, cu_row_tiles: of queries, of the selection's query tiles, and of tiles of 128 rows, where
            each query has a row for each head that shares its list.
        cu_seqlens_k, cu_compressed, cu_key_blocks: of keys, of compressed keys, and of Hopper's key tiles (with unions:
            of blocks).
        total_compressed, total_key_blocks, total_row_tiles: of all sequences.
        longest, longest_k, longest_compressed: of one sequence, in queries, in keys and in compressed blocks.
    """

    cu_seqlens: torch.Tensor
    cu_tiles: torch.Tensor
    cu_row_tiles: torch.Tensor
    cu_seqlens_k: torch.Tensor
    cu_compressed: torch.Tensor
    cu_key_blocks: torch.Tensor
    total_compressed: int
    total_key_blocks: int
    total_row_tiles: int
    longest: int
    longest_k: int
    longest_compressed: int

    @classmethod
    def of(
        cls,
        spec: CallSpec,
        device: torch.device,
        rows: int = 1,
        *,
        cu_seqlens: torch.Tensor | None = None,
        total: int = 0,
        cu_seqlens_k: torch.Tensor | None = None,
        total_k: int = 0,
    ) -> Varlen | None:
        """The starts of a call, without a synchronisation; None for a batch of equal length.

        Args:
            rows: of a token in a tile: query heads that share a list.
            cu_seqlens: on the GPU, and total tokens; for a spec with bounds alone.
            cu_seqlens_k: of keys, and their total, where those are not of queries.
        """
        config, kv_tile, lengths_k = spec.config, _kv_tile(spec), spec.key_lengths
        of_q = (1, 0, 1), (1, config.q_tile - 1, config.q_tile), (rows, ROWS - 1, ROWS)
        of_k = (1, 0, 1), (1, config.stride - config.span, config.stride), (1, kv_tile - 1, kv_tile)
        starts_k = () if lengths_k is None else _host_starts(lengths_k, of_k)
        if spec.lengths_known:
            if spec.lengths is None:
                return None
            starts_q = _host_starts(spec.lengths, of_q)
            starts = numbers_on((*starts_q, *starts_k), device)
            longest, row_tiles = max(spec.lengths), starts_q[2][-1]
        else:
            of_all = () if lengths_k or cu_seqlens_k is not None else of_k
            starts = [*starts_of(cu_seqlens, (*of_q, *of_all)), *numbers_on(starts_k, device)]
            longest, row_tiles = spec.bound, total * rows // ROWS + len(cu_seqlens) - 1
        if lengths_k is not None:
            longest_k, totals = max(lengths_k), (starts_k[1][-1], starts_k[2][-1])
        else:
            longest_k = spec.bound
            if cu_seqlens_k is not None:
                starts, total, longest_k = [*starts, *starts_of(cu_seqlens_k, of_k)], total_k, total_k
            totals = (total // config.stride, total // kv_tile + len(cu_seqlens) - 1)
        return cls(*starts, *totals, row_tiles, longest, longest_k, config.compressed_length(longest_k))

    def clear_behind_blocks(self, x: torch.Tensor) -> None:
        """Fill x [total_compressed, H, D] with 0 where no sequence has a compressed block."""
        behind = torch.arange(len(x), device=x.device) >= self.cu_compressed[-1]
        x.masked_fill_(behind[:, None, None], 0)


def _kv_tile(spec: CallSpec) -> int:
    """Tokens that `Varlen.cu_key_blocks` count."""
    size = spec.config.block_size
    return size if reads_unions(spec.config, listed=spec.listed) else hopper_kv_tile(size)


def starts_of(cu_seqlens: torch.Tensor, counts: Counts) -> tuple[torch.Tensor, ...]:
    """Starts int32 [sequences + 1] of each count, made on the GPU."""
    factor, more, size = (x.unsqueeze(1) for x in numbers_on(tuple(zip(*counts)), cu_seqlens.device))
    numbers = torch.addcmul(more, cu_seqlens[1:] - cu_seqlens[:-1], factor).div_(size, rounding_mode="floor")
    if min(more for _, more, _ in counts) < 0:
        numbers.clamp_(min=0)
    starts = numbers.new_zeros(len(counts), aligned(len(cu_seqlens)))
    torch.cumsum(numbers, 1, dtype=torch.int32, out=starts[:, 1 : len(cu_seqlens)])
    return starts[:, : len(cu_seqlens)].unbind()


@lru_cache(maxsize=128)
def _host_starts(lengths: tuple[int, ...], counts: Counts) -> tuple[tuple[int, ...], ...]:
    """Starts of each count in sequences of these lengths."""
    numbers = ([max(0, (T * factor + more) // size) for T in lengths] for factor, more, size in counts)
    return tuple((*accumulate(each, initial=0),) for each in numbers)
