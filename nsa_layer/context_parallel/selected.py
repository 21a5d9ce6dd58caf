"""`selected_attention` of a rank's tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nsa_layer.config import WIDEST_TILE
from nsa_layer.context_parallel.collectives import gather
from nsa_layer.context_parallel.heads import Tokens, over_heads
from nsa_layer.context_parallel.rows import Rows, of_tiles
from nsa_layer.context_parallel.spec import ContextParallel
from nsa_layer.context_parallel.stretches import stretches_of
from nsa_layer.context_parallel.whole import check_tokens, whole_lengths
from nsa_layer.inputs import check_lists, check_qkv

Tensor = torch.Tensor


def check(
    cp: ContextParallel, q: Tensor, k: Tensor, v: Tensor, lists: Tensor, cu_seqlens: Tensor | None, apart: bool
) -> tuple[tuple[int, ...], Rows, int]:
    """Lengths of the whole call's sequences, rows of lists and queries of a tile; errors before anything is sent.

    Args:
        apart: keys were given starts, or queries an offset.
    """
    check_qkv(q, k, v, packed=cu_seqlens is not None)
    cp.mode_of(k.shape[-2])
    tokens, local = check_tokens(q.shape[-3], cp), q.shape[-3]
    if apart:
        raise ValueError("cp: queries are those of all keys; cu_seqlens_k and q_offset must be None")
    lengths = (local * cp.size,) if cu_seqlens is None else whole_lengths(cu_seqlens, q, cp)
    if not isinstance(lists, Tensor) or lists.dim() != q.dim() or lists.shape[-3] == local:
        check_lists(lists, q, k.shape[-2], [local], [-(-max(lengths) // 1)], packed=cu_seqlens is not None)
        return lengths, tokens, 1
    q_tile = 2
    while cu_seqlens is None and q_tile <= min(WIDEST_TILE, tokens.counts[0]):
        if not tokens.counts[0] % q_tile and local // q_tile == lists.shape[-3]:
            return lengths, of_tiles(cp, lengths, tokens.counts[0], q_tile), q_tile
        q_tile *= 2
    raise ValueError(
        f"block_indices must have a list for each of the rank's {local} queries, or, not packed, for each tile of its "
        f"chunks of {tokens.counts[0]}, got {lists.shape[-3]} lists"
    )


def attend(
    selected_attention: Callable[..., Any],
    cp: ContextParallel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    *,
    cu_seqlens: Tensor | None,
    causal: bool,
    return_lse: bool,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`selected_attention`, which is given, of a rank's tokens; arguments as there."""
    packed = cu_seqlens is not None
    lengths, lists, q_tile = check(cp, q, k, v, block_indices, cu_seqlens, False)
    tokens, options = Rows.of_tokens(cp, q.shape[-3]), options | dict(causal=causal, return_lse=True)
    if cp.mode_of(k.shape[-2]) == "heads":

        def call(**tensors: Tensor) -> list[Tokens]:
            o, lse = selected_attention(**tensors, cu_seqlens=cu_seqlens, **options)
            return [Tokens(o, tokens), *([Tokens(lse.mT, tokens)] if return_lse else [])]

        parts = {name: Tokens(x, tokens) for name, x in dict(q=q, k=k, v=v).items()}
        parts["block_indices"] = Tokens(block_indices, lists)
        o, *lses = over_heads(call, cp, parts, {}, packed=packed, heads=k.shape[-2])
        return (o, lses[0].mT.contiguous()) if return_lse else o
    k, v = (gather(x[None], tokens, cp)[0] if packed else gather(x, tokens, cp) for x in (k, v))

    def rows(x: Tensor, begin: int, end: int) -> Tensor:
        return x[begin:end] if packed else x[:, begin:end]

    found = []
    for stretch in stretches_of(cp, q.shape[-3], lengths if packed else None, cut=False):
        begin, end = stretch.queries.start, stretch.queries.stop
        keys = (rows(x, stretch.keys.start, stretch.keys.stop) for x in (k, v))
        starts = {}
        if packed:
            counts = (torch.tensor([0, *x], dtype=torch.int32).cumsum(0).int() for x in list(zip(*stretch.lengths))[:2])
            starts = dict(zip(("cu_seqlens", "cu_seqlens_k"), counts))
        own = rows(block_indices, begin // q_tile, end // q_tile)
        at = stretch.offsets(1 if packed else len(q), q.device)
        found.append(selected_attention(rows(q, begin, end), *keys, own, q_offset=at, **starts, **options))
    o = torch.cat([o for o, _ in found], 0 if packed else 1)
    return (o, torch.cat([lse for _, lse in found], -1)) if return_lse else o
