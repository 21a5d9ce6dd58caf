"""Llama and Qwen with Native Sparse Attention, whose gates and compression are parameters."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass
from inspect import signature
from types import ModuleType

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, CompileConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from nsa_layer.block_mlp import BlockMLP
from nsa_layer.branches import COMPRESSIONS, GATES, Branches, EqualGates, check_branches, slowest_pairs
from nsa_layer.config import require_one_of, require_sizes
from nsa_layer.integrations.hf.attention import nsa_attention_forward, nsa_config
from nsa_layer.integrations.hf.cache import NSAModelCache
from nsa_layer.integrations.hf.packing import BatchPacking
from nsa_layer.support import BACKENDS

Tensor = torch.Tensor
SPARSE: dict[type[PreTrainedModel], type[PreTrainedModel]] = {}  # by class of the dense model
KNOWN = dict(nsa_gate=(None, *GATES), nsa_compression=COMPRESSIONS, nsa_index_dim=None, nsa_backend=(None, *BACKENDS))
FIXED = ("nsa", "nsa_gate", "nsa_compression", "nsa_index_dim", "_attn_implementation")  # by which a model is made
EXAMPLE = """`{dense}` with Native Sparse Attention.

    Example:
        >>> sizes = dict(hidden_size=64, intermediate_size=64, vocab_size=50, num_hidden_layers=1)
        >>> config = NSA{name}Config(**sizes, nsa=dict(block_counts=8))
        >>> NSA{name}ForCausalLM(config)(torch.ones(1, 40, dtype=torch.long)).logits.shape
        torch.Size([1, 40, 50])
    """
# The cache among the arguments of models: "cache" since transformers 5.24.
CACHE = "cache" if "cache" in signature(modeling_llama.LlamaForCausalLM.forward).parameters else "past_key_values"


class NSABranches(Branches):
    """Gates, compression and index of a layer of transformers, as in `NSAttention`.

    Args:
        layer: the attention, from whose projections and norms an index starts.
    """

    def __init__(self, config: PreTrainedConfig, layer: nn.Module) -> None:
        super().__init__()
        self.fixed = {name: deepcopy(getattr(config, name)) for name in FIXED}
        options, D = nsa_config(config.nsa), layer.head_dim
        kinds = dict(gate=config.nsa_gate, compression=config.nsa_compression, index_dim=config.nsa_index_dim)
        kinds["gate"] = check_branches(options, "input", **kinds)
        sizes = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, D, D
        networks = self._add_branches(*sizes, options, **kinds, index_bias=layer.q_proj.bias is not None)
        self.networks = nn.ModuleDict(networks)
        if self.q_index is not None:
            if (Di := self.index_dim) % 2 or Di > D:
                raise ValueError(f"nsa_index_dim must be even and at most the head dimension {D}, got {Di}")
            norms = [getattr(layer, name, None) for name in ("q_norm", "k_norm")]
            norms = [nn.Identity() if norm is None else type(norm)(Di, eps=norm.variance_epsilon) for norm in norms]
            self.q_index_norm, self.k_index_norm = norms

    def forward(
        self,
        layer: nn.Module,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: BatchPacking | None,
        angles: tuple[Tensor, Tensor],
        **options: object,
    ) -> Tensor:
        """`nsa_attention_forward` of a layer with input x [B, T, dim], with what this module adds to it.

        It is called in here, and with all tensors, so that whatever gathers a module's parameters for its forward and
        backward, as FSDP does, gathers them for the attention.
        """
        for name, value in self.fixed.items():
            if (now := getattr(layer.config, name)) != value:
                raise ValueError(f"config.{name} must be that of the model when it was made, {value!r}, got {now!r}")

        def turn(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            cos, sin = (slowest_pairs(x, self.index_dim) for x in angles)
            q, k = self.q_index_norm(q), self.k_index_norm(k)
            return modeling_llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)

        arguments = dict(config=self.config, compressors=self.compressors() if self.networks else {})
        arguments |= self.gates_of(x) | self.compress_weights() | self.index_of(x, turn)
        if self.training and self.q_index is not None and options.get("nsa_cache") is None:
            arguments["return_index_loss"] = True
        o, loss = nsa_attention_forward(layer, q, k, v, mask, nsa_options=arguments, **options)
        self._keep_loss(loss)
        return o


class _Attention:
    """An attention of transformers that calls "nsa" with its gates and weights, and with its layer of a cache."""

    def __init__(self, config: PreTrainedConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.nsa = NSABranches(config, self)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: BatchPacking | None = None,
        **options: object,
    ) -> tuple[Tensor, None]:
        cache = options.pop(CACHE, options.pop("past_key_values", None))
        q, k, v = (f(hidden_states).unflatten(-1, (-1, self.head_dim)) for f in (self.q_proj, self.k_proj, self.v_proj))
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        q, k = modeling_llama.apply_rotary_pos_emb(q, k, *position_embeddings)
        if isinstance(cache, NSAModelCache):
            if self.layer_idx >= len(cache):
                raise ValueError(f"the cache must have the model's layers, made of its config, got {len(cache)}")
            options["nsa_cache"] = cache.layers[self.layer_idx]
        elif cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        options |= dict(scaling=self.scaling, dropout=self.attention_dropout if self.training else 0.0)
        o = self.nsa(self, hidden_states, q, k, v, attention_mask, position_embeddings, **options)
        return self.o_proj(o.flatten(-2)), None


class _Model:
    """A decoder of transformers with the attention of its class's ``attention``."""

    def __init__(self, config: PreTrainedConfig) -> None:
        _use_nsa(config)
        super().__init__(config)
        for layer in self.layers:
            layer.self_attn = self.attention(config, layer.self_attn.layer_idx)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, (NSABranches, EqualGates, BlockMLP)):  # whose parameters that were loaded are kept
            module.reset_parameters()

    def _initialize_weights(self, module: nn.Module, *args: object) -> None:
        is_new = isinstance(module, _Attention) and not getattr(module, "_is_hf_initialized", False)
        super()._initialize_weights(module, *args)
        if is_new:
            module.nsa.start_index(module)


class _CausalLM:
    """A language model of transformers with the decoder of its class's ``decoder``; `generate` uses `NSAModelCache`."""

    def __init__(self, config: PreTrainedConfig) -> None:
        _use_nsa(config)
        super().__init__(config)
        self.model = self.decoder(config)
        self.post_init()

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, mode, batch_size, max_cache_length):
        asked, kind = model_kwargs.get(CACHE), generation_config.cache_implementation
        if asked is None and kind in (None, "static") and generation_config.use_cache is not False:
            capacity = max(max_cache_length, getattr(generation_config, "max_cache_len", None) or 0)
            model_kwargs[CACHE] = NSAModelCache(self.config, capacity, static=kind == "static")
        else:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, mode, batch_size, max_cache_length)

    def create_masks_for_generate(
        self, *, inputs_embeds: Tensor, attention_mask: Tensor | None, **options: object
    ) -> Tensor | None:
        """The mask for a static cache: none for a step behind a call's first one, whose shape would change in each."""
        is_step = inputs_embeds.shape[1] == 1 and options[CACHE].is_initialized
        if attention_mask is not None:
            options[CACHE].layers[0].require_capacity(attention_mask.shape[1])
        return None if is_step and not options.get("is_first_iteration") else attention_mask

    def get_compiled_call(self, compile_config: CompileConfig | None) -> Callable:
        """The model, compiled for a token in each row; chunks of a prompt are not compiled."""
        compiled = super().get_compiled_call(compile_config)

        def call(input_ids: Tensor | None = None, **inputs: object) -> object:
            is_step = input_ids is not None and input_ids.shape[1] == 1 and inputs[CACHE].is_initialized
            return (compiled if is_step else self)(input_ids=input_ids, **inputs)

        return call


def _use_nsa(config: PreTrainedConfig) -> None:
    require_one_of("attn_implementation", config._attn_implementation, (None, "nsa"))
    config._attn_implementation = "nsa"
    if windows := sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"}):
        raise NotImplementedError(f"sparse attention for layers of {', '.join(windows)}: config.layer_types")


@dataclass(kw_only=True)
class _Fields:
    """Fields that a configuration adds to the dense model's.

    Attributes:
        nsa: fields of `NSAConfig`; a `NSAConfig` becomes them. Set again, named fields change, others stay.
        nsa_gate: "input", "linear" or "query", as in `NSAttention`; None: "input", and none where there is one branch.
        nsa_compression: "mean", "linear" or "mlp", as in `NSAttention`.
        nsa_index_dim: as in `NSAttention`, even.
        nsa_backend: as in `nsa`, read in each call; the other fields are fixed once a model is made.
    """

    nsa: dict | None = None
    nsa_gate: str | None = None
    nsa_compression: str = "mean"
    nsa_index_dim: int | None = None
    nsa_backend: str | None = None

    def __setattr__(self, name: str, value: object) -> None:
        if name == "nsa":
            value = asdict(nsa_config(value, vars(self).get("nsa")))
        elif name.startswith("nsa_") and name not in KNOWN:
            raise AttributeError(f"a configuration has nsa, {', '.join(KNOWN)}, and no {name}")
        elif name == "nsa_index_dim" and value is not None:
            require_sizes(nsa_index_dim=value)
        elif KNOWN.get(name):
            require_one_of(name, value, KNOWN[name])
        super().__setattr__(name, value)


def _family(name: str, modeling: ModuleType) -> tuple[type, type, type]:
    """The sparse configuration, decoder and language model of a family, which auto classes know from now on."""

    def subclass(mixin: type, kind: str, **values: object) -> type:
        dense = getattr(modeling, f"{name}{kind}")
        values |= dict(__module__=__name__, __doc__=EXAMPLE.format(dense=dense.__name__, name=name))
        return type(f"NSA{dense.__name__}", (mixin, dense), values)

    model_type = getattr(modeling, f"{name}Config").model_type
    config = subclass(_Fields, "Config", model_type=f"nsa_{model_type}")
    decoder = subclass(_Model, "Model", config_class=config, attention=subclass(_Attention, "Attention"))
    language_model = subclass(_CausalLM, "ForCausalLM", config_class=config, decoder=decoder)
    AutoConfig.register(config.model_type, config)
    AutoModel.register(config, decoder)
    AutoModelForCausalLM.register(config, language_model)
    SPARSE.update({sparse.__bases__[1]: sparse for sparse in (decoder, language_model)})
    return config, decoder, language_model


NSALlamaConfig, NSALlamaModel, NSALlamaForCausalLM = _family("Llama", modeling_llama)
NSAQwen2Config, NSAQwen2Model, NSAQwen2ForCausalLM = _family("Qwen2", modeling_qwen2)
NSAQwen3Config, NSAQwen3Model, NSAQwen3ForCausalLM = _family("Qwen3", modeling_qwen3)
