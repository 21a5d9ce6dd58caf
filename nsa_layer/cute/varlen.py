"""Starts of packed sequences on the GPU, in tokens, compressed blocks and tiles.

The host makes them of the lengths, where it knows these; otherwise the GPU does. Totals are bounds for any lengths.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch

from nsa_layer.call import OWN_KEYS, Call
from nsa_layer.cute.host_constants import aligned, numbers_on
from nsa_layer.kernels.launch import aligned_rows
from nsa_layer.support import UNION_ROWS, hopper_kv_tile, native_dims, reads_unions

READ = ("q", "k", "v", *OWN_KEYS, "q_index", "k_index")  # rows by token or block
# (factor, more, size) of a count: a sequence of T tokens has (T * factor + more) // size, at least 0.
Counts = tuple[tuple[int, int, int], ...]


class Varlen(NamedTuple):
    """Lengths of a call's sequences. Starts are int32 [sequences + 1] on the GPU and end with the total.

    Starts and totals are None for a batch. They are copies: the caller may refill ``cu_seqlens`` at any time.
    ``longest`` numbers are bounds unless ``call.lengths_known``.

    Attributes:
        cu_seqlens, cu_tiles, cu_row_tiles: of queries, of the selection's query tiles, and of tiles of 128 rows, where
            each query has a row for each head that shares its list.
        cu_seqlens_k, cu_compressed, cu_key_blocks: of keys, of compressed keys, and of Hopper's key tiles (with unions:
            of blocks).
        total_compressed, total_key_blocks, total_row_tiles: capacities for all sequences; rows behind the last one are
            unused. Of row tiles, where lengths are known, their number: CTAs that draw every n-th tile share long and
            short ones best without more.
        longest, longest_k, longest_compressed: of one sequence, in queries, in keys and in compressed blocks.
    """

    cu_seqlens: torch.Tensor | None
    cu_tiles: torch.Tensor | None
    cu_row_tiles: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    cu_compressed: torch.Tensor | None
    cu_key_blocks: torch.Tensor | None
    total_compressed: int | None
    total_key_blocks: int | None
    total_row_tiles: int | None
    longest: int
    longest_k: int
    longest_compressed: int

    @classmethod
    def of(cls, call: Call) -> Varlen:
        """The lengths of a call, without a synchronisation; its starts are on the GPU unless ``lengths_known``."""
        spec, config, (q, k), lengths_k = call.spec, call.config, call[:2], call.spec.key_lengths
        longest = call.longest, call.longest_k, config.compressed_length(call.longest_k)
        if not call.packed:
            return cls(*[None] * 9, *longest)
        rows, kv_tile = call.q_heads_per_list, config.block_size  # which `cu_key_blocks` count
        if not reads_unions(config, k.shape[-1], listed=spec.listed):
            kv_tile = hopper_kv_tile(kv_tile)
        of_q = (1, 0, 1), (1, config.q_tile - 1, config.q_tile), (rows, UNION_ROWS - 1, UNION_ROWS)
        of_k = (1, 0, 1), (1, config.stride - config.span, config.stride), (1, kv_tile - 1, kv_tile)
        blocks = (len(k) + (kv_tile - 1) * call.B) // kv_tile
        row_tiles = (len(q) * rows + (UNION_ROWS - 1) * call.B) // UNION_ROWS
        if call.lengths_known:
            numbers = (*_host_starts(spec.lengths, of_q), *_host_starts(lengths_k, of_k))
            starts, row_tiles = numbers_on(numbers, q.device), numbers[2][-1]
        elif lengths_k is not None:
            starts = (*starts_of(call.cu_seqlens, of_q), *numbers_on(_host_starts(lengths_k, of_k), q.device))
        elif call.cu_seqlens_k is not None:
            starts = (*starts_of(call.cu_seqlens, of_q), *starts_of(call.cu_seqlens_k, of_k))
        else:
            starts = starts_of(call.cu_seqlens, (*of_q, *of_k))
        totals = call.num_compressed, blocks, row_tiles
        return cls(*starts, *totals, *longest)


def as_kernels_read(call: Call) -> tuple[Call, Varlen]:
    """A call with rows aligned to 16 bytes, and its starts on the GPU; of the selected branch alone
    with q_offset, and k and v as far apart as native rows."""
    call = call.map(aligned_rows, READ)
    if call.one_branch:
        k, v = (as_far_apart(x, width) for x, width in zip(call[1:3], native_dims(*call.dims)))
        call = call._replace(k=k, v=v)
    varlen = Varlen.of(call)
    return (call._replace(q_offset=_first_positions(call, varlen)) if call.one_branch else call), varlen


def as_far_apart(rows: torch.Tensor, width: int) -> torch.Tensor:
    """Rows with the stride of rows of `width` elements, which TMA reads by whole lines; a copy unless they have it."""
    if width in (rows.shape[-1], rows.stride(-2)):
        return rows
    return rows.new_empty(*rows.shape[:-1], width)[..., : rows.shape[-1]].copy_(rows)


def _first_positions(call: Call, varlen: Varlen) -> torch.Tensor | None:
    """Int32 [sequences]: of each sequence's first query among its keys; None where all are 0, or not causal."""
    if not call.spec.causal:
        return None
    if call.q_offset is not None:
        return call.q_offset.contiguous()
    if not call.lengths_known:
        return None if call.cu_seqlens_k is None else varlen.cu_seqlens_k.diff() - varlen.cu_seqlens.diff()
    return numbers_on((call.offsets,), call.q.device)[0] if any(call.offsets) else None


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
