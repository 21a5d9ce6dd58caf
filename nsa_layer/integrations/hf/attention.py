"""The attention "nsa" of transformers: `nsa` on whole sequences, `nsa_with_kvcache` on the last of cached tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from transformers import AttentionInterface

from nsa_layer import autocast
from nsa_layer.api import nsa
from nsa_layer.block_mlp import BlockMLP, compressed
from nsa_layer.caches.kvcache import nsa_with_kvcache
from nsa_layer.config import NSAConfig
from nsa_layer.integrations.hf.cache import NSACacheLayer
from nsa_layer.integrations.hf.ragged import NOT_THE_CACHED, Ragged, of_positions

Tensor = torch.Tensor
Networks = Mapping[str, BlockMLP]


def nsa_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Ragged | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    nsa_options: Mapping[str, object] | None = None,
    nsa_networks: Networks | None = None,
    nsa_cache: NSACacheLayer | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    position_ids: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Native Sparse Attention as an attention function of transformers.

    Args:
        module: the layer.
        query: [B, Hq, T, D], the last T tokens of key's.
        key: [B, Hkv, S, D].
        value: [B, Hkv, S, Dv].
        attention_mask: from `nsa_mask`.
        scaling: factor of q . k.
        nsa_options: config, gates and weights by their names in `nsa`. None: branches count 1/3 each, and config has
            the fields that are in ``module.config.nsa``, if that is there.
        nsa_networks: "k_cmp" and "v_cmp", which compress blocks in place of means.
        nsa_cache: this layer's, to which key and value, of S = T tokens, are appended.
        cu_seq_lens_q: int32 [sequences + 1], starts of the sequences among the B * T tokens, and the total.
        max_length_q: an upper bound of their lengths.
        position_ids: [B or 1, T]; those of packed sequences start anew in each, which is looked at where there is no
            padding, no ``cu_seq_lens_q`` and no cached token. A graph being compiled asserts that they do not.

    Returns:
        [B, T, Hq, Dv], and no attention weights. With cached tokens, or ``nsa_cache``, backward raises RuntimeError.

    Raises:
        NotImplementedError: an option of the layer that sparse attention does not have.
        ValueError: rows with cached tokens that hold several sequences, or are not those of the cache.
    """
    for name in ("sliding_window", "softcap", "s_aux"):
        if options.get(name) is not None:
            raise NotImplementedError(f'attention "nsa" with {name}')
    if dropout or options.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise NotImplementedError('attention "nsa" with dropout, or without a causal mask')
    ragged, networks = attention_mask, nsa_networks or {}
    if ragged is not None and not isinstance(ragged, Ragged):
        raise NotImplementedError(f'attention "nsa" with a mask of shape {tuple(ragged.shape)}, not [B, T]')
    q, k, v = autocast.cast(*(x.transpose(1, 2) for x in (query, key, value)))
    if cu_seq_lens_q is not None and (nsa_cache is not None or k.shape[1] > q.shape[1]):
        raise ValueError("cu_seq_lens_q is for sequences without a cache")
    given = {"config": config_of(module.config)} if nsa_options is None else dict(nsa_options)
    given["softmax_scale"] = scaling
    if nsa_cache is not None:
        return nsa_cache.attend(q, k, v, ragged, networks=networks, **given), None
    if k.shape[1] > q.shape[1]:
        return _attend_to_cached(q, k, v, ragged, networks, given), None
    if ragged is None and cu_seq_lens_q is None:
        ragged = of_positions(position_ids, *q.shape[:2])
    if cu_seq_lens_q is not None:
        ragged, given["max_seqlen"] = Ragged(None, cu_seq_lens_q), max_length_q
    return _attend(q, k, v, ragged, networks, given), None


def config_of(config: object) -> NSAConfig:
    """The operator's options in a configuration of transformers, the default ones where it has none."""
    return NSAConfig(**(getattr(config, "nsa", None) or {}))


def _attend(q: Tensor, k: Tensor, v: Tensor, ragged: Ragged | None, networks: Networks, given: dict) -> Tensor:
    """Whole sequences: [B, T, Hq, D] -> [B, T, Hq, Dv]."""
    B, T = q.shape[:2]
    lengths, starts = None, None
    if ragged is not None:
        q, k, v = map(ragged.pack, (q, k, v))
        if "gates" in given:
            given["gates"] = ragged.pack(given["gates"])
        starts = given["cu_seqlens"] = ragged.cu_seqlens
        if networks and not torch.compiler.is_compiling():
            lengths = tuple(starts.diff().tolist())
    for name, network in networks.items():
        of = dict(network=network, weight=None, config=given["config"])
        given[name] = compressed(k if name == "k_cmp" else v, lengths, starts, **of)
    o = nsa(q, k, v, **given)
    return o if ragged is None else ragged.unpack(o, B, T)


def _attend_to_cached(
    q: Tensor, k: Tensor, v: Tensor, ragged: Ragged | None, networks: Networks, given: dict
) -> Tensor:
    """The last T tokens of sequences whose keys and values transformers has cached: k is [B, S, Hkv, D]."""
    if networks:
        raise NotImplementedError("compression by a network with a cache of transformers' own: use NSAModelCache")
    (B, T), S, device = q.shape[:2], k.shape[1], q.device
    lengths = torch.full((B,), S, dtype=torch.int32, device=device)
    if ragged is not None:
        if ragged.is_token is None:
            raise ValueError(NOT_THE_CACHED)
        is_token = ragged.is_token.to(device)
        lengths, tokens_first = is_token.sum(1).int(), is_token.logical_not().argsort(dim=1, stable=True)
        k, v = (x[torch.arange(B, device=device)[:, None], tokens_first] for x in (k, v))
    packed = ragged is not None and ragged.places is not None
    if packed:
        q, given["cu_seqlens_q"] = ragged.pack(q), ragged.cu_seqlens
        if "gates" in given:
            given["gates"] = ragged.pack(given["gates"])
        if not len(q):
            return q.new_zeros(B, T, q.shape[-2], v.shape[-1])
    o = nsa_with_kvcache(q, k, v, cache_seqlens=lengths, **given)
    return ragged.unpack(o, B, T) if packed else o


AttentionInterface.register("nsa", nsa_attention_forward)
