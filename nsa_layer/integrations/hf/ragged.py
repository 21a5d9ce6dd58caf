"""The mask function of "nsa": which places of a batch are tokens, and of which sequence, read once a forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from transformers import AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

Tensor = torch.Tensor
NOT_THE_CACHED = "attention_mask must be that of the cached tokens and the new ones, a sequence in each row"


@dataclass(frozen=True)
class Ragged:
    """Sequences of a batch [B, T] of queries whose rows are padded, or hold several sequences.

    Attributes:
        places: int64 [total], those of B * T that are tokens, on the batch's device; None: all are.
        cu_seqlens: int32 [sequences + 1] on the CPU: starts of the sequences among these tokens, and the total.
        is_token: bool [B, S] on the CPU, of the cached places and the T of the queries; None: rows hold several
            sequences.
        cached: tokens among the cached places of each row.
    """

    places: Tensor | None
    cu_seqlens: Tensor
    is_token: Tensor | None = None
    cached: tuple[int, ...] = ()

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [total, ...]"""
        x = x.flatten(0, 1)
        return x if self.places is None else x[self.places.to(x.device)]

    def unpack(self, x: Tensor, B: int, T: int) -> Tensor:
        """[total, ...] -> [B, T, ...], 0 where there is no token."""
        if self.places is not None:
            x = x.new_zeros(B * T, *x.shape[1:]).index_copy(0, self.places.to(x.device), x)
        return x.unflatten(0, (B, T))


def nsa_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **options: object,
) -> Ragged | None:
    """The sequences of a batch, in place of a mask; None: each row is one, without padding.

    Reads the mask on the host, which waits for a GPU once a forward pass. In a graph that is being compiled,
    ``position_ids`` that start anew within a row are not looked at: pass ``cu_seq_lens_q``.

    Args:
        batch_size: B.
        q_length: T.
        kv_length: cached places and T.
        mask_function: (row, head, query, key) -> bool: causal, and of packed sequences where positions start anew.
        attention_mask: bool [B, kv_length or more], False at padding.

    Raises:
        NotImplementedError: the mask is not that of whole causal sequences, or the cache has a fixed length.
    """
    if isinstance(q_offset, Tensor) or kv_offset or kv_length != q_offset + q_length:
        raise NotImplementedError('attention "nsa" with a cache of a fixed length or a window: use NSAModelCache')
    if use_vmap or options.get("local_size") is not None:
        raise NotImplementedError('attention "nsa" with a mask other than the causal one of whole sequences')
    if attention_mask is not None:
        return _of_padding(attention_mask[:, :kv_length], q_length)
    if mask_function is causal_mask_function or torch.compiler.is_compiling():
        return None
    return _of_packed(mask_function, batch_size, q_length, options.get("device"))


def _of_padding(is_token: Tensor, T: int) -> Ragged | None:
    """Of a mask bool [B, S], the queries being its last T columns."""
    on_host = is_token.cpu()
    if on_host.all():
        return None
    queries = on_host[:, -T:]
    places = None if queries.all() else queries.flatten().nonzero()[:, 0].to(is_token.device)
    starts = torch.tensor([0, *accumulate(queries.sum(1).tolist())], dtype=torch.int32)
    return Ragged(places, starts, on_host, tuple(on_host[:, :-T].sum(1).tolist()))


def _of_packed(mask_function: Callable, B: int, T: int, device: torch.device | None) -> Ragged | None:
    """Of rows without padding: a sequence starts at a token that does not see the one before it."""
    row, head = torch.arange(B, device=device)[:, None], torch.zeros((), dtype=torch.long, device=device)
    token = torch.arange(1, T, device=device)[None]
    if T > 1 and mask_function(row, head, token - 1, token).any():
        raise NotImplementedError('attention "nsa" with a mask that shows later tokens')
    goes_on = mask_function(row, head, token, token - 1).expand(B, T - 1).cpu()
    if goes_on.all():
        return None
    starts = torch.cat((torch.zeros(B, 1, dtype=torch.bool), goes_on), dim=1).logical_not().flatten().nonzero()[:, 0]
    return Ragged(None, torch.cat((starts, torch.tensor([B * T]))).int())


AttentionMaskInterface.register("nsa", nsa_mask)
