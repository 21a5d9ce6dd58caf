"""Starts of packed sequences on the GPU, in tokens, compressed blocks and tiles.

The host makes them of the lengths, where it knows these; otherwise the GPU does, and totals are bounds.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch

from nsa_layer.call_spec import CallSpec
from nsa_layer.config import NSAConfig
from nsa_layer.kernels.token_lists.sizes import ROWS
from nsa_layer.support import device_arch, hopper_kv_tile, kernel_family, takes_unions


class Packing(NamedTuple):
    """Starts are int32 [sequences + 1] on the GPU and end with the total.

    Copies, or made of the caller's ``cu_seqlens``, which may be refilled at any time.

    Attributes:
        cu_seqlens, cu_seqlens_k, cu_blocks, cu_tiles, cu_kv_tiles, cu_row_tiles: of queries, of keys, of compressed
            blocks, of the choice's query tiles, of Hopper's key tiles (with unions: of blocks), and of tiles of 128
            rows, where each query has a row for each head that shares its list.
        total_blocks, total_kv_tiles, total_row_tiles: of all sequences.
        longest, longest_k, longest_blocks: of one sequence, in queries, in keys and in compressed blocks.
        bounded: these six are bounds; the host does not know the lengths.
    """

    cu_seqlens: torch.Tensor
    cu_seqlens_k: torch.Tensor
    cu_blocks: torch.Tensor
    cu_tiles: torch.Tensor
    cu_kv_tiles: torch.Tensor
    cu_row_tiles: torch.Tensor
    total_blocks: int
    total_kv_tiles: int
    total_row_tiles: int
    longest: int
    longest_k: int
    longest_blocks: int
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
    ) -> Packing | None:
        """The starts of a call, without a synchronisation; None for a batch of equal length.

        Args:
            rows: of a token in a tile: query heads that share a list.
            cu_seqlens: on the GPU, and total tokens; for a spec with bounds alone.
        """
        if spec.bound is not None:
            return cls._bounded(spec, cu_seqlens, total, rows)
        if spec.lengths is None:
            return None
        config, longest, longest_k = spec.config, max(spec.lengths), max(spec.key_lengths)
        find = _starts if _are_lasting() else _starts.__wrapped__
        copy, starts, totals = find(spec.lengths, spec.key_lengths, config, _kv_tile(spec), rows, device)
        copy.ready()
        return cls(*starts, *totals, longest, longest_k, config.compressed_length(longest_k))

    @classmethod
    def _bounded(cls, spec: CallSpec, cu_seqlens: torch.Tensor, total: int, rows: int) -> Packing:
        config, sequences, kv_tile = spec.config, len(cu_seqlens) - 1, _kv_tile(spec)
        # Of a sequence of T tokens there are (T * factor + more) // size, or none.
        counted = (
            (1, 0, 1),
            (1, config.stride - config.span, config.stride),
            (1, config.q_tile - 1, config.q_tile),
            (1, kv_tile - 1, kv_tile),
            (rows, ROWS - 1, ROWS),
        )
        tokens, blocks, tiles, kv_tiles, row_tiles = starts_of(cu_seqlens, counted)
        totals = (total // config.stride, total // kv_tile + sequences, total * rows // ROWS + sequences)
        longest_k, keys = spec.bound, tokens
        if spec.lengths_k is not None:  # the host knows those of keys
            counts = (
                spec.lengths_k,
                *(list(map(f, spec.lengths_k)) for f in (config.compressed_length, config.num_blocks)),
            )
            starts = tuple((*accumulate(count, initial=0),) for count in counts)
            keys, blocks, kv_tiles = numbers_on(starts, cu_seqlens.device)
            totals, longest_k = (starts[1][-1], starts[2][-1], totals[2]), max(spec.lengths_k)
        longest = (spec.bound, longest_k, config.compressed_length(longest_k))
        return cls(tokens, keys, blocks, tiles, kv_tiles, row_tiles, *totals, *longest, bounded=True)

    def clear_behind_blocks(self, x: torch.Tensor) -> None:
        """Fill x [total_blocks, H, D] with 0 where no sequence has a compressed block."""
        behind = torch.arange(len(x), device=x.device) >= self.cu_blocks[-1]
        x.masked_fill_(behind[:, None, None], 0)


def _kv_tile(spec: CallSpec) -> int:
    """Tokens that `Packing.cu_kv_tiles` count."""
    size = spec.config.block_size
    return size if takes_unions(spec.config, listed=spec.listed) else hopper_kv_tile(size)


def takes_starts(
    cu_seqlens: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    config: NSAConfig,
    block_indices: torch.Tensor | None,
    *compressed: torch.Tensor | None,
) -> bool:
    """True if the kernels take a packed call whose starts are on the GPU without the host's reading them.

    Args:
        block_indices: the caller's lists.
        compressed: the caller's k_cmp and v_cmp; one alone needs rows for as many blocks as there could be.
    """

    def rows(x: torch.Tensor) -> int:
        return x.shape[0] if isinstance(x, torch.Tensor) and x.dim() else 0

    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.device.type != "cuda":
        return False
    if len([x for x in compressed if x is not None]) == 1:
        if any(x is not None and rows(x) < q.shape[0] // config.stride for x in compressed):
            return False
    if block_indices is not None:
        return config.q_tile > 1 or rows(block_indices) == q.shape[0]
    from nsa_layer.kernels.block_topk import topk_kernel
    from nsa_layer.kernels.token_topk import kernel

    G, size = q.shape[-2] // k.shape[-2], config.block_size
    if config.by_token:
        return kernel.takes(config, G)
    if not takes_unions(config):  # lists by key tile are made by kernels on Hopper, of blocks of whole tiles
        if kernel_family(device_arch(q.device.index)) != 90 or size % hopper_kv_tile(size):
            return False
    return config.rule == "nsa" and topk_kernel.takes(config, G)


def starts_of(cu_seqlens: torch.Tensor, counted: tuple[tuple[int, int, int], ...]) -> tuple[torch.Tensor, ...]:
    """Starts int32 [sequences + 1] of what packed sequences have, made on the GPU.

    Args:
        counted: (factor, more, size) each: a sequence of T tokens has ``(T * factor + more) // size``, at least 0.
    """
    find = _columns if _are_lasting() else _columns.__wrapped__
    factor, more, size = find(counted, cu_seqlens.device).ready().unbind()
    counts = torch.addcmul(more, cu_seqlens[1:] - cu_seqlens[:-1], factor).div_(size, rounding_mode="floor")
    if min(numbers[1] for numbers in counted) < 0:
        counts.clamp_(min=0)
    # Rows of a multiple of 16 bytes: attention copies what starts elsewhere, at every call.
    starts = counts.new_zeros(len(counted), _aligned(len(cu_seqlens)))
    torch.cumsum(counts, 1, dtype=torch.int32, out=starts[:, 1 : len(cu_seqlens)])
    return starts[:, : len(cu_seqlens)].unbind()


def starts_on(cu_seqlens: torch.Tensor, device: torch.device) -> torch.Tensor:
    """cu_seqlens [sequences + 1] on `device`: itself, or a cached copy of one on the CPU."""
    if cu_seqlens.device == device:
        return cu_seqlens
    find = _copied if _are_lasting() else _copied.__wrapped__
    return find(tuple(cu_seqlens.tolist()), device).ready()


def numbers_on(rows: tuple[tuple[int, ...], ...], device: torch.device) -> list[torch.Tensor]:
    """Rows of integers as int32 tensors on `device`, from one copy, which is cached."""
    find = _joined if _are_lasting() else _joined.__wrapped__
    numbers, places = find(rows, device).ready(), accumulate(map(_aligned, map(len, rows)), initial=0)
    return [numbers.narrow(0, place, len(row)) for place, row in zip(places, rows)]


class _Copy(NamedTuple):
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


@lru_cache(maxsize=64)  # the same packing is seen layer after layer, and by every call that a CUDA graph captures
def _copied(numbers: tuple[int, ...], device: torch.device) -> _Copy:
    return _moved(torch.tensor(numbers, dtype=torch.int32, device="cpu"), device)


@lru_cache(maxsize=64)
def _joined(rows: tuple[tuple[int, ...], ...], device: torch.device) -> _Copy:
    padded = [n for row in rows for n in (*row, *[0] * (_aligned(len(row)) - len(row)))]
    return _moved(torch.tensor(padded, dtype=torch.int32, device="cpu"), device)


@lru_cache(maxsize=64)
def _columns(rows: tuple[tuple[int, ...], ...], device: torch.device) -> _Copy:
    """[columns, rows, 1]"""
    return _moved(torch.tensor(rows, dtype=torch.int32, device="cpu").mT[..., None].contiguous(), device)


def _aligned(size: int) -> int:
    """Numbers of a multiple of 16 bytes: attention copies what starts elsewhere, at every call."""
    return -(-size // 4) * 4


@lru_cache(maxsize=64)
def _starts(
    lengths: tuple[int, ...],
    key_lengths: tuple[int, ...],
    config: NSAConfig,
    kv_tile: int,
    rows: int,
    device: torch.device,
) -> tuple[_Copy, tuple[torch.Tensor, ...], tuple[int, int, int]]:
    """Starts of queries, keys, blocks and all kinds of tiles, together and one by one; totals of blocks, key and row
    tiles."""
    blocks, tiles = map(config.compressed_length, key_lengths), map(config.num_tiles, lengths)
    kv_tiles = (-(-length // kv_tile) for length in key_lengths)
    row_tiles = (-(-length * rows // ROWS) for length in lengths)
    starts = [
        list(accumulate(counts, initial=0)) for counts in (lengths, key_lengths, blocks, tiles, kv_tiles, row_tiles)
    ]
    size = len(lengths) + 1
    # Rows of a multiple of 16 bytes: attention copies what starts elsewhere, at every call.
    numbers = torch.zeros(len(starts), -(-size // 4) * 4, dtype=torch.int32, device="cpu")
    numbers[:, :size] = torch.tensor(starts, device="cpu")
    copy = _moved(numbers, device)
    # Not by indexing, which looks for the device: fake tensors have none.
    return copy, copy.numbers.narrow(1, 0, size).unbind(), (starts[2][-1], starts[4][-1], starts[5][-1])


def _moved(numbers: torch.Tensor, device: torch.device) -> _Copy:
    """An asynchronous copy.

    Raises:
        RuntimeError: in a CUDA graph, whose replays would copy from memory that is freed.
    """
    if _is_captured(device):
        raise RuntimeError(
            "a call with these cu_seqlens is captured in a CUDA graph before it was made once; make it once before"
        )
    if device.type != "cuda" or type(numbers) is not torch.Tensor:
        return _Copy(numbers.to(device), None, None)
    stream = torch.cuda.current_stream(device)
    return _Copy(numbers.pin_memory().to(device, non_blocking=True), stream, stream.record_event())


def _are_lasting() -> bool:
    """True if tensors that are made now may serve later calls: not within a transform, nor a mode with tensors of its
    own, such as the fake ones that kernels are compiled with."""
    return not torch._C._are_functorch_transforms_active() and not torch._C._len_torch_dispatch_stack()


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
