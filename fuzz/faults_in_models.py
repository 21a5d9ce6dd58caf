"""Faults in models of transformers: masks, options, and parameters that nothing initialises."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from fuzz.mutations import fault, instead

HF = "nsa_layer.integrations.hf"
RAGGED, MODELS, ATTENTION, CONVERT = f"{HF}.ragged", f"{HF}.models", f"{HF}.attention", f"{HF}.convert"


@fault("padding in front kept", f"{RAGGED}:_of_padding", "models.padding")
def _front(original: Callable) -> Callable:
    """Padding in front of a row's first token counts as tokens."""
    return lambda is_token, T: original(is_token.bool().flip(1).cummax(1).values.flip(1), T)


@fault("padding of one row", f"{RAGGED}:_of_padding", "models.padding")
def _one_row(original: Callable) -> Callable:
    """All rows have the padding of the first."""
    return lambda is_token, T: original(is_token[:1].expand_as(is_token), T)


@fault("mask of any shape", "transformers.masking_utils:AttentionMaskInterface._global_mapping", "models.wrong masks")
def _shape(original: Any) -> Any:
    """A mask of another shape is none."""

    def wrong(
        batch_size: int, q_length: int, kv_length: int, *args: Any, attention_mask: Any = None, **more: Any
    ) -> Any:
        fits = attention_mask is not None and attention_mask.shape == (batch_size, kv_length)
        more |= dict(attention_mask=attention_mask if fits else None)
        return original["nsa"](batch_size, q_length, kv_length, *args, **more)

    return {**original, "nsa": wrong}


@instead("options set later", f"{MODELS}:NSABranches.forward", "models.settings")
def _later(original: Callable, module: Any, *args: Any, **more: Any) -> Any:
    """Options that are set after a model is made are ignored without an error."""
    module.fixed = {}
    return original(module, *args, **more)


@fault("option dropped", f"{ATTENTION}:_check_options", "models.settings")
def _dropped(original: Callable) -> Callable:
    """Options that sparse attention lacks are dropped."""
    return lambda options: None


@fault("gates not reset", f"{MODELS}:EqualGates.reset_parameters", "models.start")
def _gates(original: Callable) -> Callable:
    """Gates start as any other layer does."""
    return torch.nn.Linear.reset_parameters


@fault("matrices not reset", f"{MODELS}:NSABranches.reset_parameters", "models.start")
def _matrices(original: Callable) -> Callable:
    """Matrices of compression have what was in memory."""
    return lambda module: None


@fault("jumps start sequences", f"{RAGGED}:_starts", "models.positions")
def _jumps(original: Callable) -> Callable:
    """A sequence starts where a position does not follow the one before."""
    return lambda position_ids: position_ids.diff(dim=1) != 1


@fault("one sequence of single tokens", f"{RAGGED}:_starts", "models.positions")
def _singles(original: Callable) -> Callable:
    """A sequence starts only where positions fall, not where 0 follows 0."""
    return lambda position_ids: position_ids.diff(dim=1) < 0


@instead("parametrized ignored", f"{MODELS}:nsa_attention_forward", "models.parametrized")
def _parametrized(original: Callable, layer: Any, *args: Any, nsa_options: dict, **more: Any) -> Any:
    """Of gates and matrices only those that are parameters of the module itself are used."""
    own = dict(layer.nsa.named_parameters(recurse=False))
    kept = {name: value for name, value in nsa_options.items() if not name.endswith("weight") or name in own}
    return original(layer, *args, nsa_options=kept, **more)


@fault("other options reset", f"{MODELS}:nsa_config", "models.part")
def _reset(original: Callable) -> Callable:
    """Fields that a dictionary does not name have their defaults."""
    return lambda value, base=None: original(value)


@fault("static cache too small", f"{HF}.cache:NSACacheLayer.require_room", "models.caches")
def _room(original: Callable) -> Callable:
    """A static cache takes more tokens than its capacity."""
    return lambda layer, columns: None


@instead("cache of another model", f"{HF}.cache:NSACacheLayer.attend", "models.caches")
def _other(original: Callable, layer: Any, *args: Any, config: Any, **more: Any) -> Any:
    """A cache goes on with the options that it was filled with."""
    return original(layer, *args, config=layer.cache.config if layer.cache is not None else config, **more)


@instead("padding is not a number", f"{RAGGED}:Ragged.unpack", "models.padding anywhere")
def _not_a_number(original: Callable, ragged: Any, x: torch.Tensor, B: int, T: int) -> torch.Tensor:
    """Places without a token have the softmax of nothing."""
    is_token = original(ragged, torch.ones_like(x), B, T) > 0
    return original(ragged, x, B, T).masked_fill(~is_token, float("nan"))


@instead("no gradient of padding alone", f"{ATTENTION}:_attend", "models.padding alone")
def _no_gradient(original: Callable, q: Any, k: Any, v: Any, ragged: Any, *args: Any) -> Any:
    """A batch without tokens is not connected to any parameter."""
    o = original(q, k, v, ragged, *args)
    return o if ragged is None or ragged.cu_seqlens[-1] else o.detach()


@instead("ended turn kept", f"{RAGGED}:Ragged.kept", "models.padding anywhere")
def _ended(original: Callable, ragged: Any, before: Any, columns: int) -> tuple[int, ...]:
    """The cache keeps what the mask of a next turn hides behind a row's last token."""
    original(ragged, before, columns)
    hidden = 0 if before is None else before[:, :columns].logical_not().sum(1)
    return tuple((torch.full((len(ragged.is_token),), columns) - hidden).tolist())


@instead("ended turn refused", f"{RAGGED}:Ragged.kept", "models.padding anywhere")
def _refused(original: Callable, ragged: Any, before: Any, columns: int) -> tuple[int, ...]:
    """A mask that hides any cached token is an error."""
    shown = ragged.is_token[:, :columns]
    if before is not None and not shown[:, : before.shape[1]].equal(before[:, :columns]):
        raise ValueError("attention_mask must be that of the cached tokens")
    return original(ragged, before, columns)


@instead("padding counted in front", f"{ATTENTION}:_attend_to_cached", "models.padding anywhere")
def _in_front(original: Callable, q: Any, k: Any, v: Any, ragged: Any, *args: Any) -> Any:
    """All padding among cached tokens counts as if it stood in front of them."""
    if ragged is not None:
        ragged = replace(ragged, is_token=ragged.is_token.int().sort(dim=1).values.bool())
    return original(q, k, v, ragged, *args)


@instead("cache of another batch", f"{HF}.cache:NSACacheLayer.attend", "models.caches")
def _another_batch(original: Callable, layer: Any, *args: Any, gates: Any = None, **more: Any) -> Any:
    """A cache that is reset goes on with as many rows as it had."""
    rows = len(layer.cache.cache_seqlens) if layer.cache is not None else len(args[0])
    args = [x[:rows] if isinstance(x, torch.Tensor) else x for x in args]
    return original(layer, *args, gates=None if gates is None else gates[:rows], **more)


@instead("cache of fewer layers", f"{MODELS}:_Attention.forward", "models.caches")
def _fewer_layers(original: Callable, layer: Any, *args: Any, **more: Any) -> Any:
    """Layers that a cache does not have share its last one."""
    cache, own = more.get("cache", more.get("past_key_values")), layer.layer_idx
    layer.layer_idx = own if cache is None else min(own, len(cache) - 1)
    try:
        return original(layer, *args, **more)
    finally:
        layer.layer_idx = own


@instead("projection's weight asked for", f"{MODELS}:_Attention.forward", "models.projections")
def _weight(original: Callable, layer: Any, x: torch.Tensor, *args: Any, **more: Any) -> Any:
    """A layer asks its projections' weights for their dtype."""
    weights = [part.weight for part in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj)]
    return original(layer, x.to(weights[0].dtype), *args, **more)


def _left_behind(name: str, *words: str) -> None:
    """Register the fault of a conversion that leaves attributes behind whose names hold a word."""

    class Left(tuple):
        def __contains__(self, key: object) -> bool:
            return tuple.__contains__(self, key) or any(word in str(key) for word in words)

    def change(original: Any) -> Any:
        return Left(original)

    change.__doc__ = f"A converted model lacks the dense one's {' and '.join(words)}."
    fault(name, f"{CONVERT}:NOT_SHARED", "models.conversion keeps")(change)


_left_behind("checkpointing lost", "gradient_checkpointing")
_left_behind("hooks lost", "hooks")
_left_behind("map of devices lost", "hf_device_map")
_left_behind("flags lost", "training")


def _taken(name: str, what: str, attribute: str) -> None:
    """Register the fault of a conversion that does not look for what an attribute of a part says."""

    def wrong(original: Callable, model: Any, *args: Any, **more: Any) -> Any:
        for part in model.modules():
            vars(part).pop(attribute, None)
        return original(model, *args, **more)

    wrong.__doc__ = f"{what} is converted without a word."
    instead(name, f"{CONVERT}:convert_to_nsa", "models.conversion refuses")(wrong)


_taken("quantized taken", "A quantized model", "hf_quantizer")
_taken("offloaded taken", "A model that accelerate offloads", "_hf_hook")
_taken("wrapped taken", "A model with another forward of a part", "forward")


@instead("adapter without a name", f"{CONVERT}:convert_to_nsa", "models.conversion refuses")
def _adapter(original: Callable, model: Any, *args: Any, **more: Any) -> Any:
    """A model with adapters fails where the weight of a projection is asked for."""
    device = model.base_model.layers[0].self_attn.q_proj.weight.device
    return original(model, *args, **more).to(device)


@instead("windows converted", f"{MODELS}:_use_nsa", "models.conversion refuses")
def _windows(original: Callable, config: Any) -> None:
    """Layers with a sliding window become sparse ones, which have none of its width."""
    types = getattr(config, "layer_types", None)
    config.layer_types = None
    original(config)
    config.layer_types = types


@instead("lists ignored", f"{ATTENTION}:nsa_attention_forward", "models.lists")
def _lists(original: Callable, *args: Any, block_indices: Any = None, **options: Any) -> Any:
    """Lists that a model gives are ignored: blocks are selected anew."""
    return original(*args, **options)


@instead("lengths of Python alone", f"{ATTENTION}:nsa_attention_forward", "models.packed")
def _integers(original: Callable, *args: Any, max_length_q: Any = None, **options: Any) -> Any:
    """The longest length has to be an int of Python."""
    if not isinstance(max_length_q, (int, type(None))):
        raise TypeError(f"max_length_q must be an int, got {max_length_q!r}")
    return original(*args, max_length_q=max_length_q, **options)


@instead("backend ignored", f"{ATTENTION}:nsa_attention_forward", "models.backend")
def _backend(original: Callable, module: Any, *args: Any, **options: Any) -> Any:
    """The backend that a configuration names is not passed on."""
    with patch.object(module, "config", copy(module.config)):
        module.config.nsa_backend = None
        return original(module, *args, **options)


@fault("unsupported not looked for", "nsa_layer.support:missing_feature", "models.backend")
def _unsupported(original: Callable) -> Callable:
    """Kernels take every dtype and head size."""
    return lambda request: None


@fault("keyword swallowed", f"{ATTENTION}:CHANGES_RESULT", "models.settings are")
def _swallowed(original: Any) -> Any:
    """Of options that change the result, some are only warned of."""
    return tuple(name for name in original if name not in ("sinks", "position_bias", "head_mask"))


@fault("unknown options unsaid", f"{ATTENTION}:_warn_of", "models.settings that")
def _unsaid(original: Callable) -> Callable:
    """Options that nobody knows are dropped without a warning."""
    return lambda name: None
