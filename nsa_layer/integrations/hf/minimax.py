"""`use_nsa_kernels`: MiniMax-M3's sparse layers choose by `nsa`'s index of tokens, and attend to the chosen blocks."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from nsa_layer.api import nsa
from nsa_layer.config import NSAConfig, require_one_of
from nsa_layer.integrations.hf.attention import check_options
from nsa_layer.integrations.hf.models import CACHE
from nsa_layer.kvcache.api import nsa_with_kvcache
from nsa_layer.support import BACKENDS

try:
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as modeling
except ImportError:  # an older release
    modeling = None

Tensor = torch.Tensor


class NSAMiniMaxM3Attention(nn.Module if modeling is None else modeling.MiniMaxM3VLAttention):
    """A sparse attention of MiniMax-M3 with its parameters; `use_nsa_kernels` makes it of one of transformers."""

    nsa_backend: str | None = None

    @property
    def nsa_config(self) -> NSAConfig:
        """The operator's options: the best blocks by one index key, the last ones among them."""
        of = self.indexer
        blocks = dict(
            block_size=of.block_size, block_counts=of.topk_blocks, init_blocks=0, local_blocks=of.local_blocks
        )
        return NSAConfig(rule="index", branches=("selected",), **blocks)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **options: object,
    ) -> tuple[Tensor, None]:
        """As the class of transformers does, in memory that is linear in tokens.

        Raises:
            NotImplementedError: padding in front of tokens, packed sequences, attention weights, dropout.
        """
        cache = options.pop(CACHE, options.pop("past_key_values", None))
        check_options(options | {"dropout": self.training and self.attention_dropout or None})
        _check_mask(attention_mask)
        rows, index = hidden_states.shape[:-1], self.indexer
        q, k, v = (f(hidden_states).view(*rows, -1, self.head_dim) for f in (self.q_proj, self.k_proj, self.v_proj))
        of_index = (f(hidden_states).view(*rows, -1, index.head_dim) for f in (index.q_proj, index.k_proj))
        q_index, k_index = (norm(x) for norm, x in zip((index.q_norm, index.k_norm), of_index))
        q, k, q_index, k_index, v = (x.transpose(1, 2) for x in (self.q_norm(q), self.k_norm(k), q_index, k_index, v))
        q, k = modeling.apply_rotary_pos_emb(q, k, *position_embeddings)
        slow = (x[..., : index.head_dim] for x in position_embeddings)
        q_index, k_index = modeling.apply_rotary_pos_emb(q_index, k_index, *slow)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
            k_index = cache.layers[self.layer_idx].update_index(k_index)
        q, k, v, q_index, k_index = (x.transpose(1, 2) for x in (q, k, v, q_index, k_index))
        static = dict(config=self.nsa_config, softmax_scale=self.scaling, index_scale=1.0, backend=self.nsa_backend)
        if k.shape[1] == q.shape[1]:
            o = nsa(q, k, v, q_index=q_index, k_index=k_index, **static)
        else:
            lengths = q.new_full((len(q),), k.shape[1], dtype=torch.int32)
            if position_ids is not None:  # fewer than a static cache has slots for
                lengths = (position_ids[:, -1] + 1).int().expand(len(q)).contiguous()
            o = nsa_with_kvcache(q, k, v, cache_seqlens=lengths, q_index=q_index, k_index_cache=k_index, **static)
        return self.o_proj(o.flatten(-2)), None


def use_nsa_kernels(model: PreTrainedModel, *, backend: str | None = None) -> PreTrainedModel:
    """Let the sparse layers of a MiniMax-M3 model choose and attend by `nsa`; in place, with the same parameters.

    Its dense layers and everything else stay as they are: training, `generate` with the model's own caches, saving.
    The scores of transformers' layer are a tensor of [T, T] for each list; here nothing grows with the square of T.

    Args:
        model: a model of transformers with layers of ``minimax_m3_vl``.
        backend: as in `nsa`.

    Returns:
        ``model``.

    Raises:
        NotImplementedError: a release of transformers without that model, a model without such layers, or an index
            with other heads than key/value heads.
        ValueError: ``backend`` is unknown.

    Example:
        >>> sizes = dict(hidden_size=64, intermediate_size=64, vocab_size=50, num_hidden_layers=1)
        >>> config = transformers.MiniMaxM3VLTextConfig(**sizes, layer_types=["minimax_m3_sparse"], index_n_heads=4)
        >>> model = transformers.AutoModelForCausalLM.from_config(config)
        >>> model = use_nsa_kernels(model)
    """
    require_one_of("backend", backend, (None, *BACKENDS))
    if modeling is None:
        raise NotImplementedError("use_nsa_kernels needs a release of transformers with minimax_m3_vl")
    kinds = (modeling.MiniMaxM3VLAttention, NSAMiniMaxM3Attention)
    layers = [part for part in model.modules() if type(part) in kinds and part.indexer is not None]
    if not layers:
        raise NotImplementedError(f"use_nsa_kernels is for MiniMax-M3's sparse layers, {type(model).__name__} has none")
    for layer in layers:
        if layer.indexer.num_heads != layer.config.num_key_value_heads:
            heads = f"{layer.indexer.num_heads} index heads and {layer.config.num_key_value_heads} key/value heads"
            raise NotImplementedError(f"use_nsa_kernels needs as many of both, got {heads}")
    for layer in layers:
        layer.__class__, layer.nsa_backend = NSAMiniMaxM3Attention, backend
    return model


def _check_mask(mask: Tensor | None) -> None:
    """Raise NotImplementedError if a mask [B, 1, T, S] of several queries hides the first key from the last one."""
    if mask is None or mask.shape[-2] == 1 or torch.compiler.is_compiling():
        return
    first = mask[:, 0, -1, 0]
    if not (first if first.dtype == torch.bool else first == 0).all():
        raise NotImplementedError("MiniMax-M3 on the kernels with packed sequences, or padding in front of tokens")
