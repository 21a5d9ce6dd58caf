"""The attention "nsa" of transformers: `nsa` on whole sequences, `nsa_with_kvcache` on the last of cached tokens."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cache
from operator import index

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.utils import TransformersKwargs

from nsa_layer import autocast
from nsa_layer.api import nsa, selected_attention
from nsa_layer.block_mlp import Compressors, compress_sequences
from nsa_layer.config import NSAConfig
from nsa_layer.integrations.hf.cache import NSACacheLayer
from nsa_layer.integrations.hf.packing import BatchPacking, of_positions
from nsa_layer.kvcache.api import nsa_with_kvcache

Tensor = torch.Tensor
CHANGES_RESULT = ("sliding_window", "softcap", "s_aux", "sinks", "position_bias", "attention_bias", "alibi", "indices")
CHANGES_RESULT += ("head_mask", "score_mod", "block_table", "output_attentions", "dropout", "is_causal=False")
OF_FORWARD = {*TransformersKwargs.__annotations__, "use_cache", "cache_position"}  # of the model, no matter here


def nsa_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: BatchPacking | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    nsa_options: Mapping[str, object] | None = None,
    nsa_cache: NSACacheLayer | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    block_indices: Tensor | None = None,
    position_ids: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, Tensor | None]:
    """Native Sparse Attention as an attention function of transformers: [B, T, Hq, Dv], and in place of attention
    weights the index' loss, where ``nsa_options`` ask for it.

    Args:
        module: the layer, whose configuration may have ``nsa`` and ``nsa_backend``.
        query: [B, Hq, T, D], the last T tokens of key [B, Hkv, S, D] and value [B, Hkv, S, Dv].
        attention_mask: from `nsa_mask`.
        nsa_options: of `nsa`, and "compressors", which make k_cmp and v_cmp. None: branches count the same, and the
            operator's options are ``module.config.nsa``.
        nsa_cache: this layer's, to which key and value, of S = T tokens, are appended.
        cu_seq_lens_q: int32 [sequences + 1], starts of the sequences among the B * T tokens, and the total.
        max_length_q: an upper bound of their lengths, an integer of Python, NumPy or PyTorch.
        block_indices: [B, Hkv or Hq, T, n], blocks of ``module.indexer.block_size`` keys, counted with padding; -1 for
            none. Each query attends to these, and to no others.
        position_ids: [B or 1, T], by which `of_positions` packs where nothing else says how.

    Raises:
        NotImplementedError: an option of the layer that sparse attention lacks; an unknown one is a warning, once.
        ValueError: rows with cached tokens hold several sequences, or others than the cache.
    """
    causal = options.get("is_causal") is not False and getattr(module, "is_causal", True)
    check_options(options | {"dropout": dropout or None, "is_causal=False": not causal})
    if not isinstance(attention_mask, (BatchPacking, type(None))):
        raise NotImplementedError(f'attention "nsa" supports masks of shape [B, T], got {tuple(attention_mask.shape)}')
    q, k, v = autocast.cast(*(x.transpose(1, 2) for x in (query, key, value)))
    whole = nsa_cache is None and k.shape[1] == q.shape[1]
    packing = attention_mask or BatchPacking(tuple(q.shape[:2]))
    if cu_seq_lens_q is not None:
        if not whole or attention_mask is not None:
            raise ValueError("cu_seq_lens_q must be None with a cache or padding, got a tensor")
        packing = BatchPacking(packing.shape, cu_seq_lens_q)
    elif whole and attention_mask is None:
        packing = of_positions(position_ids, *packing.shape)
    static = dict(softmax_scale=scaling, backend=getattr(module.config, "nsa_backend", None))
    if block_indices is not None:
        if nsa_options is not None or not hasattr(module, "indexer"):
            raise NotImplementedError("block_indices of a model with gates, or without module.indexer.block_size")
        if not packing.starts_at_0:
            raise NotImplementedError("block_indices of packed sequences, or with padding in front of tokens")
        lists, block_size = block_indices.transpose(1, 2).int(), module.indexer.block_size
        return selected_attention(q, k, v, lists, block_size=block_size, **static), None
    if nsa_options is None:
        nsa_options = dict(config=nsa_config(getattr(module.config, "nsa", None)), compressors={})
    arguments = dict(nsa_options, **static)
    for name in ("gates", "q_index", "k_index"):
        if arguments.get(name) is not None:
            arguments[name] = packing.pack(arguments[name])
    if not whole and nsa_cache is None:
        return packing.unpack(_attend_to_cached(packing.pack(q), k, v, packing, **arguments)), None
    if cu_seq_lens_q is not None and max_length_q is not None:
        arguments["max_seqlen"] = index(max_length_q)
    attend = _attend if nsa_cache is None else nsa_cache.attend
    o = attend(*map(packing.pack, (q, k, v)), packing, **arguments)
    o, loss = o if isinstance(o, tuple) else (o, None)
    return packing.unpack(o), loss


def nsa_config(value: object, base: Mapping[str, object] | None = None) -> NSAConfig:
    """The operator's options of ``config.nsa``, an NSAConfig, fields of one or None; ``base`` has the other fields.

    Raises:
        TypeError, ValueError: value is something else, or a field is unknown or bad.
    """
    if isinstance(value, NSAConfig):
        return value
    if not isinstance(value, (Mapping, type(None))):
        raise TypeError(f"nsa must be an NSAConfig, its fields or None, got {type(value).__name__}")
    # Without compress_size, `from_dict` would read it as of a version with another default.
    return NSAConfig.from_dict({"compress_size": None, **(base or {}), **(value or {})})


def check_options(options: Mapping[str, object]) -> None:
    """Raise NotImplementedError for options that change the result, and warn of unknown ones."""
    is_set = [name for name, value in options.items() if value is not None and value is not False]
    if changed := [name for name in is_set if name in CHANGES_RESULT]:
        raise NotImplementedError(f'attention "nsa" does not support {", ".join(changed)}')
    if not torch.compiler.is_compiling():
        for name in set(is_set) - OF_FORWARD:
            _warn_of(name)


@cache
def _warn_of(name: str) -> None:
    warnings.warn(f'attention "nsa" ignores the option {name}', stacklevel=2)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, packing: BatchPacking, *, compressors: Compressors, **options: object
) -> Tensor | tuple[Tensor, Tensor]:
    """Whole sequences: [B, T, Hq, D] -> [B, T, Hq, Dv], or packed; with ``return_index_loss`` a pair."""
    options |= compress_sequences(compressors, k, v, packing.cu_seqlens) | dict(cu_seqlens=packing.cu_seqlens)
    if not len(q):  # nothing but padding: no rows, with a gradient of all parameters, which other ranks wait for
        zero = sum(x.flatten()[:0].sum() for x in (q, k, v, *options.values()) if isinstance(x, Tensor))
        o = q.new_zeros(0, q.shape[-2], v.shape[-1]) + zero
        return (o, zero.float()) if options.get("return_index_loss") else o
    return nsa(q, k, v, **options)


def _attend_to_cached(
    q: Tensor, k: Tensor, v: Tensor, packing: BatchPacking, *, compressors: Compressors, **options: object
) -> Tensor:
    """The last tokens of sequences whose keys and values transformers has cached: k is [B, S, Hkv, D]."""
    if compressors or "q_index" in options:
        what = "compression by a network" if compressors else "an index"
        raise NotImplementedError(f"{what} with a cache of transformers' own: use NSAModelCache")
    if not len(q):
        return q.new_zeros(0, q.shape[-2], v.shape[-1])
    (B, S), device = k.shape[:2], k.device
    lengths = torch.full((B,), S, dtype=torch.int32, device=device)
    if packing.is_token is not None:
        is_token = packing.is_token.to(device)
        lengths, tokens_first = is_token.sum(1).int(), is_token.logical_not().argsort(dim=1, stable=True)
        k, v = (x[torch.arange(B, device=device)[:, None], tokens_first] for x in (k, v))
    return nsa_with_kvcache(q, k, v, cache_seqlens=lengths, cu_seqlens_q=packing.cu_seqlens, **options)


AttentionInterface.register("nsa", nsa_attention_forward)
