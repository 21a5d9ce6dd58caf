"""A rank's chunks with the tokens on either side, which other ranks have."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nsa_layer.context_parallel.collectives import gather
from nsa_layer.context_parallel.rows import Rows
from nsa_layer.context_parallel.spec import ContextParallel

Tensor = torch.Tensor


def with_neighbours(
    x: Tensor, beside: Sequence[tuple[int, int]], most: tuple[int, int], cp: ContextParallel
) -> list[Tensor]:
    """Each of a rank's chunks, and what is beside it.

    Args:
        x: [B, n, ...], a rank's tokens.
        beside: tokens before and after each chunk, [B, before + chunk + after, ...].
        most: no chunk of any rank has more: the same on every rank.
    """
    chunks = x.split(x.shape[1] // len(cp.chunks), dim=1)
    before = _of_all([chunk[:, chunk.shape[1] - min(chunk.shape[1], most[0]) :] for chunk in chunks], cp)
    after = _of_all([chunk[:, : most[1]] for chunk in chunks], cp)
    found = []
    for chunk, number, (left, right) in zip(chunks, cp.chunks, beside, strict=True):
        # A part of none too, so that backward is an exchange on every rank.
        first, end = before.shape[1] // cp.count * number, after.shape[1] // cp.count * (number + 1)
        found.append(torch.cat([before[:, first - left : first], chunk, after[:, end : end + right]], dim=1))
    return found


def _of_all(ends: Sequence[Tensor], cp: ContextParallel) -> Tensor:
    """The ends of every rank's chunks, in order."""
    x = torch.cat(ends, dim=1)
    return gather(x, Rows.of_tokens(cp, x.shape[1]), cp) if x.shape[1] else x
