"""Batches whose rows are padded or hold several sequences: the mask function of "nsa", read once a forward pass."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from nsa_layer.checks import starts_of_lengths

Tensor = torch.Tensor
NOT_THE_CACHED = "attention_mask must be that of the cached tokens, of which it may hide a row's last, and the new ones"
NOT_COMPILED = "position_ids start anew, and a compiled graph accepts packed sequences by cu_seq_lens_q alone: pass it"

# By position_ids, the packing that `of_positions` read from them for all layers of a forward pass.
_read: MutableMapping[Tensor, tuple[tuple[int, int] | None, BatchPacking]] = WeakTensorKeyDictionary()


@dataclass(frozen=True, eq=False)
class BatchPacking:
    """Packing of the tokens of a batch: none without ``cu_seqlens``, every row being one sequence.

    Attributes:
        shape: (B, T) of the queries.
        cu_seqlens: int32 [sequences + 1] on the CPU: starts of the sequences among the packed tokens, and the total.
        rows: int64 [total] on the batch's device: numbers of the tokens among B * T; None: all are tokens.
        is_token: bool [B, S] on the CPU: False at padding among S columns, cached ones and T; None: no padding.
    """

    shape: tuple[int, int]
    cu_seqlens: Tensor | None = None
    rows: Tensor | None = None
    is_token: Tensor | None = None

    @property
    def starts_at_0(self) -> bool:
        """True if each row is one sequence whose first token is in column 0."""
        if self.is_token is None:
            return self.cu_seqlens is None
        return not (self.is_token.int().diff(dim=1) > 0).any()

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [total, ...]"""
        if self.cu_seqlens is None:
            return x
        x = x.flatten(0, 1)
        return x if self.rows is None else x[self.rows.to(x.device)]

    def unpack(self, x: Tensor) -> Tensor:
        """[total, ...] -> [B, T, ...], 0 at padding."""
        if self.cu_seqlens is None:
            return x
        if self.rows is not None:
            B, T = self.shape
            x = x.new_zeros(B * T, *x.shape[1:]).index_copy(0, self.rows.to(x.device), x)
        return x.unflatten(0, self.shape)

    @lru_cache(maxsize=1)  # for all layers of a forward pass
    def kept(self, before: Tensor | None, columns: int) -> tuple[int, ...]:
        """Tokens of each row among the first columns; ValueError unless they are the row's first ones of ``is_token``
        of the call before, behind which, or without which, all are tokens.

        A row that ended early has padding behind its last token, which `generate` shows until its next call.
        """
        if self.is_token is None and before is None:
            return (columns,) * self.shape[0]
        was, now = (first_columns(x, self.shape[0], columns) for x in (before, self.is_token))
        if (now & (~was | ((was & ~now).cumsum(1) > 0))).any():
            raise ValueError(NOT_THE_CACHED)
        return tuple(now.sum(1).tolist())


def first_columns(is_token: Tensor | None, B: int, columns: int) -> Tensor:
    """bool [B, columns] of a mask [B, any]: True behind its columns, and everywhere where it is None."""
    if is_token is None:
        return torch.ones(B, columns, dtype=torch.bool)
    return F.pad(is_token, (0, columns - is_token.shape[1]), value=True)


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
) -> BatchPacking | None:
    """The packing of a padded batch, instead of a mask; None: there is no padding.

    Reads attention_mask, bool [batch_size, kv_length or more], False at padding, on the host: once a forward pass.

    Raises:
        NotImplementedError: the mask is not that of whole causal sequences, or the cache has a fixed length.
        ValueError: attention_mask has another shape.
    """
    is_static = isinstance(q_offset, Tensor)
    if is_static and kv_length == q_length == 1:
        return None  # a step on a static `NSAModelCache`, which knows its lengths
    columns, fits = q_offset + q_length, not (is_static or kv_offset)
    if fits and attention_mask is not None:
        shape = tuple(attention_mask.shape)
        if len(shape) != 2 or shape[0] != batch_size or shape[1] < columns or shape[1] == kv_length != columns:
            raise ValueError(f"attention_mask must be [B, cached and new tokens], {(batch_size, columns)}, got {shape}")
    if not fits or kv_length != columns:
        raise NotImplementedError(
            'attention "nsa" does not support caches of a fixed length or a window: use NSAModelCache'
        )
    if use_vmap or options.get("local_size") is not None:
        raise NotImplementedError('attention "nsa" does not support masks other than the causal one of whole sequences')
    if mask_function is not causal_mask_function and q_length > 1 and not torch.compiler.is_compiling():
        row, head = torch.arange(batch_size, device=device)[:, None], torch.zeros((), dtype=torch.long, device=device)
        later = torch.arange(q_offset + 1, columns, device=device)[None]
        if mask_function(row, head, later - 1, later).any():
            raise NotImplementedError('attention "nsa" does not support a mask that shows later tokens')
    return None if attention_mask is None else _of_padding(attention_mask[:, :columns], q_length)


def _of_padding(is_token: Tensor, T: int) -> BatchPacking | None:
    """The packing of a mask bool [B, S] whose last T columns are the queries."""
    on_host = is_token.cpu()
    if on_host.all():
        return None
    queries, shape = on_host[:, -T:], (len(on_host), T)
    if queries.all():
        return BatchPacking(shape, is_token=on_host)
    rows = queries.flatten().nonzero()[:, 0].to(is_token.device)
    return BatchPacking(shape, starts_of_lengths(queries.sum(1).tolist()), rows, on_host)


def of_positions(position_ids: Tensor | None, B: int, T: int) -> BatchPacking:
    """The packing of rows without padding, of positions [B or 1, T].

    A sequence starts where positions fall, or where 0 follows 0, which ends a sequence of one token. The host reads
    them once a forward pass. A graph that is being compiled holds rows of one sequence, and an assertion that they are.
    """
    if position_ids is None or position_ids.dim() != 2 or T == 1:
        return BatchPacking((B, T))
    if torch.compiler.is_compiling():
        torch._assert_async(_starts(position_ids).logical_not().all(), NOT_COMPILED)
        return BatchPacking((B, T))
    state = None if position_ids.is_inference() else (position_ids._version, B)
    read, packing = _read.get(position_ids, (None, None))
    if state is None or read != state:
        starts = torch.ones(B, T, dtype=torch.bool)
        starts[:, 1:] = _starts(position_ids).cpu()
        first = starts.flatten().nonzero()[:, 0].int()
        packing = BatchPacking((B, T), None if len(first) == B else torch.cat((first, first.new_tensor([B * T]))))
        _read[position_ids] = state, packing
    return packing


def _starts(position_ids: Tensor) -> Tensor:
    """bool [B, T - 1], True where the next token starts a sequence."""
    before, after = position_ids[:, :-1], position_ids[:, 1:]
    return (after < before) | ((before == 0) & (after == 0))


AttentionMaskInterface.register("nsa", nsa_mask)
