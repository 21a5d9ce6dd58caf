"""Slices of heads: a call's tensors and what is saved, narrowed to a group of key/value heads, and joined again."""

from __future__ import annotations

import torch

from nsa_layer.call import OWN_KEYS, Call, Saved

Tensor = torch.Tensor


def head_group(call: Call, first: int, end: int) -> Call:
    """The call of key/value heads `first` to `end` and their query heads."""
    if (first, end) == (0, call.k.shape[-2]):
        return call
    query, key = query_heads(call.q, call.k, first, end), (first, end)
    parts = dict(q=narrow(call.q, -2, query), gates=narrow(call.gates, -2, query))
    parts |= {name: narrow(getattr(call, name), -2, key) for name in ("k", "v", *OWN_KEYS, "q_index")}
    if call.k_index is not None and call.k_index.shape[-2] > 1:
        parts["k_index"] = narrow(call.k_index, -2, key)
    if call.block_indices is not None:
        of_query_heads = call.block_indices.shape[-2] == call.q.shape[-2]
        parts["block_indices"] = narrow(call.block_indices, -2, query if of_query_heads else key)
    parts |= {name: narrow(getattr(call, name), 0, key) for name in ("compress_k_weight", "compress_v_weight")}
    return call._replace(**parts, gate_weight=narrow(call.gate_weight, 0, query))


def query_heads(q: Tensor, k: Tensor, first: int, end: int) -> tuple[int, int]:
    """(first, end) of the query heads of key/value heads `first` to `end`."""
    G = q.shape[-2] // k.shape[-2]
    return first * G, end * G


def narrow(x: Tensor | None, dim: int, heads: tuple[int, int]) -> Tensor | None:
    """Heads (first, end) of a tensor; None of None."""
    if x is None or heads == (0, x.shape[dim]):
        return x
    return x.narrow(dim, heads[0], heads[1] - heads[0])


def join_saved(saved: Saved, part: Saved, group: tuple[int, int], heads: int) -> Saved:
    """`saved` of all heads with the part of key/value heads (first, end) copied to it, and the sums of a loss added;
    the part if it has all heads."""
    if group == (0, heads):
        return part
    for name, x in part._asdict().items():
        if name == "index_sums" and saved.index_sums is not None:
            saved.index_sums.add_(x)
        elif name == "index_sums":
            saved = saved._replace(index_sums=x)
        elif x is not None:
            each = x.shape[-2] // (group[1] - group[0])
            if getattr(saved, name) is None:
                saved = saved._replace(**{name: x.new_empty(*x.shape[:-2], each * heads, x.shape[-1])})
            getattr(saved, name).narrow(-2, each * group[0], x.shape[-2]).copy_(x)
    return saved


def saved_of_group(saved: Saved, group: tuple[int, int], heads: int) -> Saved:
    """The part of key/value heads (first, end) of all, contiguous, without the fields of an index."""
    if group == (0, heads):
        return saved

    def part(x: Tensor) -> Tensor:
        each = x.shape[-2] // heads
        return narrow(x, -2, (group[0] * each, group[1] * each)).contiguous()

    saved = saved._replace(index_scores=None, index_dz=None, index_tokens=None, index_sums=None)
    return Saved(*(x if x is None else part(x) for x in saved))


def joined(parts: list[Tensor | None], dim: int) -> Tensor | None:
    """The groups' tensors as one, along their heads."""
    return parts[0] if len(parts) == 1 or parts[0] is None else torch.cat(parts, dim)
