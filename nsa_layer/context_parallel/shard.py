"""Shards of whole sequences: cut, put together, and compressed by a module."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from nsa_layer.config import NSAConfig
from nsa_layer.context_parallel.checks import check_same_on_all_ranks
from nsa_layer.context_parallel.layout import ShardLayout, block_ranges
from nsa_layer.context_parallel.spec import ContextParallel, rank_chunks
from nsa_layer.context_parallel.transport import exchange


def shard_sequence(x: torch.Tensor, cp: ContextParallel, *, dim: int = 1) -> torch.Tensor:
    """This rank's part of a tensor that every rank holds whole: inputs, labels, positions.

    Of R ranks rank r gets chunk r of R, with "zigzag" chunks r and 2R - 1 - r of 2R, in this order. Only tokens count:
    a pack is cut as one row, wherever its sequences start. Labels, which are of the next tokens, are shifted before.

    Args:
        x: [.., T, ..] of any dtype; R divides T, 2R with "zigzag".
        cp: the ranks.
        dim: of the tokens: 1 of [B, T, ..], 0 of packed [total, ..].

    Returns:
        [.., T / R, ..]; a view without "zigzag". The gradient of x is zero outside of the part.

    Raises:
        TypeError, ValueError: an argument is bad; the message names it.

    Example:
        >>> cp = ContextParallel(torch.distributed.group.WORLD)
        >>> part = shard_sequence(torch.randn(1, 256, 64), cp)  # [1, 256 / R, 64]
    """
    _check_sequences(x, cp, dim)
    chunks = x.split(x.shape[dim] // cp.num_chunks, dim)
    local = [chunks[number] for number in cp.chunks]
    return local[0] if len(local) == 1 else torch.cat(local, dim)


def unshard_sequence(x: torch.Tensor, cp: ContextParallel, *, dim: int = 1) -> torch.Tensor:
    """The whole tensor on every rank, of the parts that ranks hold: the inverse of `shard_sequence`.

    Backward sums the ranks' gradients of each part: the loss is the sum of the ranks' losses.

    Args:
        x: [.., T / R, ..] of any dtype, and of the same shape on every rank; returned is [.., T, ..].
        cp, dim: as for `shard_sequence`.

    Raises:
        TypeError, ValueError: an argument is bad, or the ranks' differ, as for `nsa`; the message names it.

    Example:
        >>> cp, x = ContextParallel(torch.distributed.group.WORLD), torch.randn(1, 256, 64)
        >>> torch.equal(unshard_sequence(shard_sequence(x, cp), cp), x)
        True
    """
    check = partial(_check_sequences, x, cp, dim, ranks=1)
    check_same_on_all_ranks(cp, [check], x=x, dim=dim)
    check()
    parts = x.movedim(dim, 0)
    (whole,) = exchange("gather", [parts[None]], [ShardLayout.of_tokens(cp, len(parts))])
    return whole[0].movedim(0, dim)


def compress_shard(
    x: torch.Tensor,
    lengths: tuple[int, ...] | None,
    cp: ContextParallel,
    compress: Callable[[torch.Tensor, tuple[int, ...] | None], torch.Tensor],
    *,
    config: NSAConfig,
) -> torch.Tensor:
    """Compressed rows of the blocks that start in this rank's chunks, and reach into the next ranks' tokens.

    Args:
        x: [B, n, H, D], packed [n, H, D].
        lengths: of the whole call's packed sequences.
        compress: [B, T, H, D] -> [B, Tc, H, D], or packed and lengths -> packed, as is returned.
    """
    if lengths is None and x.dim() == 3:
        raise NotImplementedError("cp in a graph, with cu_seqlens and rows of blocks")
    batch = x if lengths is None else x[None]
    layout = ShardLayout.of_tokens(cp, batch.shape[1])
    blocks = block_ranges(layout, lengths or (layout.total,), config.span, config.stride)
    ranges = [[blocks[chunk][0] for chunk in of_rank] for of_rank in rank_chunks(cp.size, cp.load_balance)]
    layout, rows = layout._replace(ranges=ranges), []
    (read,) = exchange("gather", [batch], [layout])
    for tokens, chunk in zip(read.split(layout.sizes, 1), cp.chunks, strict=True):
        rows.append(compress(tokens, None) if lengths is None else compress(tokens[0], blocks[chunk][1]))
    return torch.cat(rows, dim=1 if lengths is None else 0)


def _check_sequences(x: torch.Tensor, cp: ContextParallel, dim: int, *, ranks: int | None = None) -> None:
    """Raise TypeError or ValueError unless x has equal chunks of the ranks in `dim`; `ranks`: by default all."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    if not isinstance(cp, ContextParallel):
        raise TypeError(f"cp must be a ContextParallel, got {type(cp).__name__}")
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim must be an int, got {dim!r}")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim must be a dimension of x, got {dim} for shape {tuple(x.shape)}")
    chunks = len(cp.chunks) * (cp.size if ranks is None else ranks)
    if x.shape[dim] % chunks:
        raise ValueError(
            f"x must have a multiple of {chunks} tokens in dimension {dim}, with load_balance={cp.load_balance!r}, got "
            f"shape {tuple(x.shape)}"
        )
