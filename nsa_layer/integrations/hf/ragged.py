"""Places of a batch that are tokens, and their sequences: the mask function of "nsa", read once a forward pass."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field

import torch
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from nsa_layer.checks import starts_of_lengths

Tensor = torch.Tensor
NOT_THE_CACHED = "attention_mask must be that of the cached tokens, of which it may hide a row's last, and the new ones"
NOT_COMPILED = "position_ids start anew, and a compiled graph takes packed sequences by cu_seq_lens_q alone: give it"

# What `of_positions` found, for all layers of a forward pass.
_of_positions: MutableMapping[Tensor, tuple[tuple[int, int] | None, Ragged | None]] = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class Ragged:
    """Sequences of a batch [B, T] of queries whose rows are padded, or hold several sequences.

    Attributes:
        places: int64 [total], those of B * T that are tokens, on the batch's device; None: all are.
        cu_seqlens: int32 [sequences + 1] on the CPU: starts of the sequences among these tokens, and the total.
        is_token: bool [B, S] on the CPU, of the cached places and the T of the queries; None: rows hold several
            sequences.
    """

    places: Tensor | None
    cu_seqlens: Tensor
    is_token: Tensor | None = None
    _kept: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [total, ...]"""
        x = x.flatten(0, 1)
        return x if self.places is None else x[self.places.to(x.device)]

    def unpack(self, x: Tensor, B: int, T: int) -> Tensor:
        """[total, ...] -> [B, T, ...], 0 where there is no token."""
        if self.places is not None:
            x = x.new_zeros(B * T, *x.shape[1:]).index_copy(0, self.places.to(x.device), x)
        return x.unflatten(0, (B, T))

    def kept(self, before: Tensor | None, columns: int) -> tuple[int, ...]:
        """Tokens of each row among the first columns, all of them in front of those that are no tokens any more.

        A row that ended early has padding behind its last token, which `generate` shows until the next turn.

        Args:
            before: is_token as it was, with tokens in all further columns; None: in all.

        Raises:
            ValueError: others are no tokens any more, or some are that were none.
        """
        if (key := (id(before), columns)) not in self._kept:  # once for all layers
            now = self.is_token[:, :columns]
            was = torch.ones_like(now)
            if before is not None:
                was[:, : before.shape[1]] = before[:, :columns]
            if (now & (~was | ((was & ~now).cumsum(1) > 0))).any():
                raise ValueError(NOT_THE_CACHED)
            self._kept[key] = tuple(now.sum(1).tolist())
        return self._kept[key]


def nsa_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | None = None,
    **options: object,
) -> Ragged | None:
    """The sequences of a batch, in place of a mask; None: there is no padding.

    Reads the mask on the host, which waits for a GPU once a forward pass.

    Args:
        batch_size: B.
        q_length: T.
        kv_length: cached places and T.
        mask_function: (row, head, query, key) -> bool: causal, of whole rows or packed sequences.
        attention_mask: bool [B, kv_length or more], False at padding.

    Raises:
        NotImplementedError: the mask is not that of whole causal sequences, or the cache has a fixed length.
        ValueError: attention_mask has another shape.
    """
    if isinstance(q_offset, Tensor) and kv_length == q_length == 1:
        return None  # a step on a static `NSAModelCache`, which knows its lengths
    fixed, columns = isinstance(q_offset, Tensor) or kv_offset, q_offset + q_length
    if not fixed and attention_mask is not None:
        shape = tuple(attention_mask.shape)
        if len(shape) != 2 or shape[0] != batch_size or shape[1] < columns or shape[1] == kv_length != columns:
            raise ValueError(f"attention_mask must be [B, cached and new tokens], {(batch_size, columns)}, got {shape}")
    if fixed or kv_length != columns:
        raise NotImplementedError('attention "nsa" with a cache of a fixed length or a window: use NSAModelCache')
    if use_vmap or options.get("local_size") is not None:
        raise NotImplementedError('attention "nsa" with a mask other than the causal one of whole sequences')
    if mask_function is not causal_mask_function and q_length > 1 and not torch.compiler.is_compiling():
        row, head = torch.arange(batch_size, device=device)[:, None], torch.zeros((), dtype=torch.long, device=device)
        later = torch.arange(q_offset + 1, columns, device=device)[None]
        if mask_function(row, head, later - 1, later).any():
            raise NotImplementedError('attention "nsa" with a mask that shows later tokens')
    return None if attention_mask is None else _of_padding(attention_mask[:, :columns], q_length)


def _of_padding(is_token: Tensor, T: int) -> Ragged | None:
    """The sequences of a mask bool [B, S], the queries being its last T columns."""
    on_host = is_token.cpu()
    if on_host.all():
        return None
    queries = on_host[:, -T:]
    places = None if queries.all() else queries.flatten().nonzero()[:, 0].to(is_token.device)
    return Ragged(places, starts_of_lengths(queries.sum(1).tolist()), on_host)


def of_positions(position_ids: Tensor | None, B: int, T: int) -> Ragged | None:
    """The sequences of rows without padding; None: each row is one.

    One starts where positions fall, or where 0 follows 0, which ends a sequence of one token. Positions that jump
    forward, or repeat another number, start none.

    Reads positions on the host, which waits for a GPU once a forward pass. A graph that is being compiled holds rows of
    one sequence, and an assertion that they are.

    Args:
        position_ids: [B or 1, T].
    """
    if position_ids is None or position_ids.dim() != 2 or T == 1:
        return None
    if torch.compiler.is_compiling():
        torch._assert_async(_starts(position_ids).logical_not().all(), NOT_COMPILED)
        return None
    state = None if position_ids.is_inference() else (position_ids._version, B)
    seen = _of_positions.get(position_ids)
    if state is None or seen is None or seen[0] != state:
        starts = torch.ones(B, T, dtype=torch.bool)
        starts[:, 1:] = _starts(position_ids).cpu()
        ragged = None
        if starts[:, 1:].any():
            at = starts.flatten().nonzero()[:, 0]
            ragged = Ragged(None, torch.cat((at, torch.tensor([B * T]))).int())
        seen = _of_positions[position_ids] = state, ragged
    return seen[1]


def _starts(position_ids: Tensor) -> Tensor:
    """bool [B, T - 1], True where another sequence starts than that of the position before."""
    before, after = position_ids[:, :-1], position_ids[:, 1:]
    return (after < before) | ((before == 0) & (after == 0))


AttentionMaskInterface.register("nsa", nsa_mask)
