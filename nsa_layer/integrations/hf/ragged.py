"""Places of a batch that are tokens, and their sequences: the mask function of "nsa", read once a forward pass."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

import torch
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from nsa_layer.inputs import starts_of_lengths

Tensor = torch.Tensor
NOT_THE_CACHED = "attention_mask must be that of the cached tokens and the new ones, a sequence in each row"
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
    """
    if isinstance(q_offset, Tensor) and kv_length == q_length == 1:
        return None  # a step on a static `NSAModelCache`, which knows its lengths
    if isinstance(q_offset, Tensor) or kv_offset or kv_length != q_offset + q_length:
        raise NotImplementedError('attention "nsa" with a cache of a fixed length or a window: use NSAModelCache')
    if use_vmap or options.get("local_size") is not None:
        raise NotImplementedError('attention "nsa" with a mask other than the causal one of whole sequences')
    if attention_mask is not None:
        return _of_padding(attention_mask[:, :kv_length], q_length)
    if mask_function is not causal_mask_function and q_length > 1 and not torch.compiler.is_compiling():
        row, head = torch.arange(batch_size, device=device)[:, None], torch.zeros((), dtype=torch.long, device=device)
        later = torch.arange(1, q_length, device=device)[None]
        if mask_function(row, head, later - 1, later).any():
            raise NotImplementedError('attention "nsa" with a mask that shows later tokens')
    return None


def _of_padding(is_token: Tensor, T: int) -> Ragged | None:
    """The sequences of a mask bool [B, S], the queries being its last T columns."""
    on_host = is_token.cpu()
    if on_host.all():
        return None
    queries = on_host[:, -T:]
    places = None if queries.all() else queries.flatten().nonzero()[:, 0].to(is_token.device)
    starts = starts_of_lengths(queries.sum(1).tolist())
    return Ragged(places, starts, on_host, tuple(on_host[:, :-T].sum(1).tolist()))


def of_positions(position_ids: Tensor | None, B: int, T: int) -> Ragged | None:
    """The sequences of rows without padding, which start where positions do not go on; None: each row is one.

    Reads positions on the host, which waits for a GPU once a forward pass. A graph that is being compiled holds rows of
    one sequence, and an assertion that they are.

    Args:
        position_ids: [B or 1, T].
    """
    if position_ids is None or position_ids.dim() != 2 or T == 1:
        return None
    if torch.compiler.is_compiling():
        torch._assert_async((position_ids.diff(dim=1) == 1).all(), NOT_COMPILED)
        return None
    state = None if position_ids.is_inference() else (position_ids._version, B)
    seen = _of_positions.get(position_ids)
    if state is None or seen is None or seen[0] != state:
        starts = torch.ones(B, T, dtype=torch.bool)
        starts[:, 1:] = (position_ids.diff(dim=1) != 1).cpu()
        ragged = None
        if starts[:, 1:].any():
            at = starts.flatten().nonzero()[:, 0]
            ragged = Ragged(None, torch.cat((at, torch.tensor([B * T]))).int())
        seen = _of_positions[position_ids] = state, ragged
    return seen[1]


AttentionMaskInterface.register("nsa", nsa_mask)
