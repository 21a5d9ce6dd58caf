"""Starts of packed sequences on the GPU, in tokens, compressed blocks and tiles.

The host makes them of the lengths, where it knows these; otherwise the GPU does, and totals are bounds.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch

from nsa_layer.call_spec import CallSpec
from nsa_layer.config import NSAConfig
from nsa_layer.cute.host_constants import HostCopy, aligned, cached, copied_rows, moved, numbers_on
from nsa_layer.kernels.union_lists.sizes import ROWS
from nsa_layer.support import hopper_kv_tile, reads_unions


class Varlen(NamedTuple):
    """Starts are int32 [sequences + 1] on the GPU and end with the total.

    Copies, or made of the caller's ``cu_seqlens``, which may be refilled at any time.

    Attributes:
        cu_seqlens, cu_seqlens_k, cu_compressed: of queries, keys and compressed keys.
        cu_tiles, cu_key_blocks, cu_row_tiles: of the selection's query tiles, of Hopper's key tiles (with unions: of
            blocks), and of tiles of 128 rows, where each query has a row for each head that shares its list.
        total_compressed, total_key_blocks, total_row_tiles: of all sequences.
        longest, longest_k, longest_compressed: of one sequence, in queries, in keys and in compressed blocks.
        bounded: these six are bounds; the host does not know the lengths.
    """

    cu_seqlens: torch.Tensor
    cu_seqlens_k: torch.Tensor
    cu_compressed: torch.Tensor
    cu_tiles: torch.Tensor
    cu_key_blocks: torch.Tensor
    cu_row_tiles: torch.Tensor
    total_compressed: int
    total_key_blocks: int
    total_row_tiles: int
    longest: int
    longest_k: int
    longest_compressed: int
    bounded: bool = False

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
        if spec.bound is not None:
            return cls._bounded(spec, cu_seqlens, total, rows, cu_seqlens_k, total_k)
        if spec.lengths is None:
            return None
        config, longest, longest_k = spec.config, max(spec.lengths), max(spec.key_lengths)
        copy, starts, totals = _starts(spec.lengths, spec.key_lengths, config, _kv_tile(spec), rows, device)
        copy.ready()
        return cls(*starts, *totals, longest, longest_k, config.compressed_length(longest_k))

    @classmethod
    def _bounded(
        cls,
        spec: CallSpec,
        cu_seqlens: torch.Tensor,
        total: int,
        rows: int,
        cu_seqlens_k: torch.Tensor | None,
        total_k: int,
    ) -> Varlen:
        config, sequences, kv_tile = spec.config, len(cu_seqlens) - 1, _kv_tile(spec)
        # Of a sequence of T tokens there are (T * factor + more) // size, or none.
        of_queries = (1, 0, 1), (1, config.q_tile - 1, config.q_tile), (rows, ROWS - 1, ROWS)
        of_keys = (1, 0, 1), (1, config.stride - config.span, config.stride), (1, kv_tile - 1, kv_tile)
        known = spec.lengths_k is not None
        tokens, tiles, row_tiles, *more = starts_of(
            cu_seqlens, of_queries if known or cu_seqlens_k is not None else (*of_queries, *of_keys)
        )
        row_total = total * rows // ROWS + sequences
        if known:  # the host knows those of keys
            counts = (
                spec.lengths_k,
                *(list(map(f, spec.lengths_k)) for f in (config.compressed_length, config.num_blocks)),
            )
            starts = tuple((*accumulate(count, initial=0),) for count in counts)
            keys, blocks, kv_tiles = numbers_on(starts, cu_seqlens.device)
            totals, longest_k = (starts[1][-1], starts[2][-1], row_total), max(spec.lengths_k)
        else:
            longest_k = spec.bound
            if cu_seqlens_k is not None:
                more, total, longest_k = starts_of(cu_seqlens_k, of_keys), total_k, total_k
            keys, blocks, kv_tiles = more
            totals = (total // config.stride, total // kv_tile + sequences, row_total)
        longest = (spec.bound, longest_k, config.compressed_length(longest_k))
        return cls(tokens, keys, blocks, tiles, kv_tiles, row_tiles, *totals, *longest, bounded=True)

    def clear_behind_blocks(self, x: torch.Tensor) -> None:
        """Fill x [total_compressed, H, D] with 0 where no sequence has a compressed block."""
        behind = torch.arange(len(x), device=x.device) >= self.cu_compressed[-1]
        x.masked_fill_(behind[:, None, None], 0)


def _kv_tile(spec: CallSpec) -> int:
    """Tokens that `Varlen.cu_key_blocks` count."""
    size = spec.config.block_size
    return size if reads_unions(spec.config, listed=spec.listed) else hopper_kv_tile(size)


def starts_of(cu_seqlens: torch.Tensor, counted: tuple[tuple[int, int, int], ...]) -> tuple[torch.Tensor, ...]:
    """Starts int32 [sequences + 1] of what packed sequences have, made on the GPU.

    Args:
        counted: (factor, more, size) each: a sequence of T tokens has ``(T * factor + more) // size``, at least 0.
    """
    factor, more, size = _columns(counted, cu_seqlens.device).ready().unbind()
    counts = torch.addcmul(more, cu_seqlens[1:] - cu_seqlens[:-1], factor).div_(size, rounding_mode="floor")
    if min(numbers[1] for numbers in counted) < 0:
        counts.clamp_(min=0)
    starts = counts.new_zeros(len(counted), aligned(len(cu_seqlens)))
    torch.cumsum(counts, 1, dtype=torch.int32, out=starts[:, 1 : len(cu_seqlens)])
    return starts[:, : len(cu_seqlens)].unbind()


@cached
def _starts(
    lengths: tuple[int, ...],
    key_lengths: tuple[int, ...],
    config: NSAConfig,
    kv_tile: int,
    rows: int,
    device: torch.device,
) -> tuple[HostCopy, list[torch.Tensor], tuple[int, int, int]]:
    """Starts of queries, keys, blocks and all kinds of tiles, together and one by one; totals of blocks, key and row
    tiles."""
    blocks, tiles = map(config.compressed_length, key_lengths), map(config.num_tiles, lengths)
    kv_tiles = (-(-length // kv_tile) for length in key_lengths)
    row_tiles = (-(-length * rows // ROWS) for length in lengths)
    counted = (lengths, key_lengths, blocks, tiles, kv_tiles, row_tiles)
    starts = [(*accumulate(counts, initial=0),) for counts in counted]
    return *copied_rows(starts, device), (starts[2][-1], starts[4][-1], starts[5][-1])


@cached
def _columns(rows: tuple[tuple[int, ...], ...], device: torch.device) -> HostCopy:
    """[columns, rows, 1]"""
    return moved(torch.tensor(rows, dtype=torch.int32, device="cpu").mT[..., None].contiguous(), device)
