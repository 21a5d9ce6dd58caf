"""Llama and Qwen with Native Sparse Attention, whose gates and compression are parameters."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass
from inspect import signature

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    CompileConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
)
from transformers import (
    initialization as init,
)
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from nsa_layer.block_mlp import BlockMLP
from nsa_layer.integrations.hf.attention import nsa_attention_forward, nsa_config
from nsa_layer.integrations.hf.cache import NSAModelCache
from nsa_layer.integrations.hf.ragged import Ragged
from nsa_layer.module import COMPRESSIONS, GATES
from nsa_layer.support import BACKENDS

Tensor = torch.Tensor
START = 4.0  # sigmoid(4) = 0.982
KNOWN = dict(nsa_gate=GATES, nsa_compression=COMPRESSIONS, nsa_backend=(None, *BACKENDS))
# The cache among the arguments of models: "cache" since transformers 5.24.
CACHE = "cache" if "cache" in signature(LlamaForCausalLM.forward).parameters else "past_key_values"


class EqualGates(nn.Linear):
    """Scores of gates, which start at 1/2 each."""

    def reset_parameters(self) -> None:
        """Set all parameters to 0."""
        for parameter in self.parameters():
            init.zeros_(parameter)


class NSABranches(nn.Module):
    """Gates and compression of a layer, as in `NSAttention`: the gates start at 1/2, matrices at the identity."""

    def __init__(self, config: PreTrainedConfig, head_dim: int) -> None:
        super().__init__()
        dim, Hq, Hkv, D = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, head_dim
        self.num_heads, self.config = Hq, nsa_config(config.nsa)
        self.fixed = {name: deepcopy(getattr(config, name)) for name in ("nsa", "nsa_gate", "nsa_compression")}
        self.gate_mlp = None
        if config.nsa_gate == "input":
            hidden = max(1, dim // 4)
            self.gate_mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), EqualGates(hidden, 3 * Hq))
        weight = nn.Parameter(torch.empty(Hq, 3, D)) if config.nsa_gate == "query" else None
        self.register_parameter("gate_weight", weight)
        for name in ("compress_k_weight", "compress_v_weight"):
            weight = nn.Parameter(torch.empty(Hkv, D, D)) if config.nsa_compression == "linear" else None
            self.register_parameter(name, weight)
        self.networks = nn.ModuleDict()
        if config.nsa_compression == "mlp":
            made = {name: BlockMLP(Hkv, D, config=self.config) for name in ("k_cmp", "v_cmp")}
            self.networks = nn.ModuleDict(made)

    def reset_parameters(self) -> None:
        """Set a weight of gates to 0 and matrices of compression to the identity; parts have functions of their own."""
        if self.gate_weight is not None:
            init.zeros_(self.gate_weight)
        for weight in (self.compress_k_weight, self.compress_v_weight):
            if weight is not None:
                init.copy_(weight, torch.eye(weight.shape[-1]).to(weight).expand_as(weight))

    @torch.no_grad()
    def start_selected(self) -> None:
        """Set the gates by input to nearly 1 for the selected branch, and nearly 0 for the others."""
        start = torch.tensor([-START, START, -START]).repeat(self.num_heads)
        self.gate_mlp[-1].bias.copy_(start)

    def forward(
        self, layer: nn.Module, x: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Ragged | None, **options: object
    ) -> Tensor:
        """`nsa_attention_forward` of a layer with input x [B, T, dim], with gates and compression of this module.

        It is called in here, and with all tensors, so that whatever gathers a module's parameters for its forward and
        backward, as FSDP does, gathers them for the attention.
        """
        for name, value in self.fixed.items():
            if (now := getattr(layer.config, name)) != value:
                raise ValueError(f"config.{name} must be that of the model when it was made, {value!r}, got {now!r}")
        names = ("gate_weight", "compress_k_weight", "compress_v_weight")
        given = {"config": self.config} | {name: getattr(self, name) for name in names}
        if self.gate_mlp is not None:
            given["gates"] = self.gate_mlp(x).sigmoid().unflatten(-1, (self.num_heads, 3))
        options |= dict(nsa_options=given, nsa_networks=dict(self.networks.items()))
        return nsa_attention_forward(layer, q, k, v, mask, **options)[0]


class _Attention:
    """An attention of transformers that calls "nsa" with its gates and weights, and with its layer of a cache."""

    def __init__(self, config: PreTrainedConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.nsa = NSABranches(config, self.head_dim)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Ragged | None = None,
        **options: object,
    ) -> tuple[Tensor, None]:
        if self.config._attn_implementation != "nsa":
            raise ValueError(f"attn_implementation must be 'nsa', got {self.config._attn_implementation!r}")
        cache = options.pop(CACHE, options.pop("past_key_values", None))
        q, k, v = (f(hidden_states).unflatten(-1, (-1, self.head_dim)) for f in (self.q_proj, self.k_proj, self.v_proj))
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        if isinstance(cache, NSAModelCache):
            if self.layer_idx >= len(cache):
                raise ValueError(f"the cache has {len(cache)} layers, fewer than the model: make one of its config")
            options["nsa_cache"] = cache.layers[self.layer_idx]
        elif cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        options |= dict(scaling=self.scaling, dropout=self.attention_dropout if self.training else 0.0)
        o = self.nsa(self, hidden_states, q, k, v, attention_mask, **options)
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
        if isinstance(module, (NSABranches, EqualGates, BlockMLP)):  # each draws its own, and nothing that was loaded
            module.reset_parameters()


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
            room = max(max_cache_length, getattr(generation_config, "max_cache_len", None) or 0)
            model_kwargs[CACHE] = NSAModelCache(self.config, room, static=kind == "static")
        else:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, mode, batch_size, max_cache_length)

    def create_masks_for_generate(
        self, *, inputs_embeds: Tensor, attention_mask: Tensor | None, **options: object
    ) -> Tensor | None:
        """The mask for a static cache: none for a step behind a call's first one, whose shape would change in each."""
        is_step = inputs_embeds.shape[1] == 1 and options[CACHE].is_initialized
        if attention_mask is not None:
            options[CACHE].layers[0].require_room(attention_mask.shape[1])
        return None if is_step and not options.get("is_first_iteration") else attention_mask

    def get_compiled_call(self, compile_config: CompileConfig | None) -> Callable:
        """The model, compiled for a token in each row; chunks of a prompt are not compiled."""
        compiled = super().get_compiled_call(compile_config)

        def call(input_ids: Tensor | None = None, **inputs: object) -> object:
            is_step = input_ids is not None and input_ids.shape[1] == 1 and inputs[CACHE].is_initialized
            return (compiled if is_step else self)(input_ids=input_ids, **inputs)

        return call


def _use_nsa(config: PreTrainedConfig) -> None:
    if config._attn_implementation not in (None, "nsa"):
        raise ValueError(f"attn_implementation must be 'nsa', got {config._attn_implementation!r}")
    config._attn_implementation = "nsa"
    if windows := sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"}):
        raise NotImplementedError(f"sparse attention for layers of {', '.join(windows)}: config.layer_types")


@dataclass(kw_only=True)
class _Fields:
    """The fields of a configuration beside those of the dense model.

    Attributes:
        nsa: fields of `NSAConfig`; a `NSAConfig` becomes them. Set again, fields change those that they name.
        nsa_gate: "input", a network over a layer's input; or "query", ``sigmoid(q . gate_weight)``.
        nsa_compression: "mean", "linear" or "mlp", as in `NSAttention`.
        nsa_backend: as in `nsa`. It is read in each call; the other three are those of a model when it is made.
    """

    nsa: dict | None = None
    nsa_gate: str = "input"
    nsa_compression: str = "mean"
    nsa_backend: str | None = None

    def __setattr__(self, name: str, value: object) -> None:
        if name == "nsa":
            value = asdict(nsa_config(value, vars(self).get("nsa")))
        elif name.startswith("nsa_") and name not in KNOWN:
            raise AttributeError(f"a configuration has nsa, {', '.join(KNOWN)}, and no {name}")
        elif name in KNOWN and value not in KNOWN[name]:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, KNOWN[name]))}, got {value!r}")
        super().__setattr__(name, value)


class NSALlamaConfig(_Fields, LlamaConfig):
    """`LlamaConfig`, and ``nsa``, fields of `NSAConfig`; ``nsa_gate`` and ``nsa_compression`` as in `NSAttention`."""

    model_type = "nsa_llama"


class NSALlamaAttention(_Attention, LlamaAttention):
    """`LlamaAttention`, sparse."""


class NSALlamaModel(_Model, LlamaModel):
    """`LlamaModel` with `NSALlamaAttention`."""

    config_class = NSALlamaConfig
    attention = NSALlamaAttention


class NSALlamaForCausalLM(_CausalLM, LlamaForCausalLM):
    """`LlamaForCausalLM` with `NSALlamaModel`."""

    config_class = NSALlamaConfig
    decoder = NSALlamaModel


class NSAQwen2Config(_Fields, Qwen2Config):
    """`Qwen2Config`, and what `NSALlamaConfig` adds."""

    model_type = "nsa_qwen2"


class NSAQwen2Attention(_Attention, Qwen2Attention):
    """`Qwen2Attention`, sparse."""


class NSAQwen2Model(_Model, Qwen2Model):
    """`Qwen2Model` with `NSAQwen2Attention`."""

    config_class = NSAQwen2Config
    attention = NSAQwen2Attention


class NSAQwen2ForCausalLM(_CausalLM, Qwen2ForCausalLM):
    """`Qwen2ForCausalLM` with `NSAQwen2Model`."""

    config_class = NSAQwen2Config
    decoder = NSAQwen2Model


class NSAQwen3Config(_Fields, Qwen3Config):
    """`Qwen3Config`, and what `NSALlamaConfig` adds."""

    model_type = "nsa_qwen3"


class NSAQwen3Attention(_Attention, Qwen3Attention):
    """`Qwen3Attention`, sparse."""


class NSAQwen3Model(_Model, Qwen3Model):
    """`Qwen3Model` with `NSAQwen3Attention`."""

    config_class = NSAQwen3Config
    attention = NSAQwen3Attention


class NSAQwen3ForCausalLM(_CausalLM, Qwen3ForCausalLM):
    """`Qwen3ForCausalLM` with `NSAQwen3Model`."""

    config_class = NSAQwen3Config
    decoder = NSAQwen3Model


for _config, _model, _causal in (
    (NSALlamaConfig, NSALlamaModel, NSALlamaForCausalLM),
    (NSAQwen2Config, NSAQwen2Model, NSAQwen2ForCausalLM),
    (NSAQwen3Config, NSAQwen3Model, NSAQwen3ForCausalLM),
):
    AutoConfig.register(_config.model_type, _config)
    AutoModel.register(_config, _model)
    AutoModelForCausalLM.register(_config, _causal)
