"""Faults in models of transformers: masks, options, and parameters that nothing initialises."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from fuzz.mutations import Change, always, fault, faults, given, instead, result

HF = "nsa_layer.integrations.hf"
PACKING, MODELS, ATTENTION, CACHE = f"{HF}.packing", f"{HF}.models", f"{HF}.attention", f"{HF}.cache:NSACacheLayer"
ATTEND, LAYER, CONVERT = f"{ATTENTION}:nsa_attention_forward", f"{MODELS}:_Attention.forward", f"{HF}.convert"
KEEPS, REFUSES = "models.conversion keeps", "models.conversion refuses"


def left_behind(word: str) -> Change:
    """Convert without the attributes whose names hold a word."""

    class Left(tuple):
        def __contains__(self, key: object) -> bool:
            return tuple.__contains__(self, key) or word in str(key)

    return Left


def unseen(attribute: str) -> Change:
    """Convert a model whose parts lack an attribute."""

    def wrong(original: Callable, model: Any, *args: Any, **more: Any) -> Any:
        for part in model.modules():
            vars(part).pop(attribute, None)
        return original(model, *args, **more)

    return instead(wrong)


faults(
    ("padding in front kept", f"{PACKING}:_of_padding", "models.padding",
     "Padding in front of a row's first token counts as tokens.",
     given(is_token=lambda is_token: is_token.bool().flip(1).cummax(1).values.flip(1))),
    ("padding of one row", f"{PACKING}:_of_padding", "models.padding", "All rows have the padding of the first.",
     given(is_token=lambda is_token: is_token[:1].expand_as(is_token))),
    ("padding is not a number", f"{PACKING}:BatchPacking.unpack", "models.padding anywhere",
     "Columns without a token have the softmax of nothing.",
     instead(lambda original, packing, x: original(packing, x).masked_fill(
         original(packing, torch.ones_like(x)) <= 0, float("nan")))),
    ("option dropped", f"{ATTENTION}:check_options", "models.settings",
     "Options that sparse attention lacks are dropped.", always(None)),
    ("gates not reset", "nsa_layer.branches:EqualGates.reset_parameters", "models.start",
     "Gates start as any other layer does.", lambda original: torch.nn.Linear.reset_parameters),
    ("matrices not reset", "nsa_layer.branches:Branches.reset_parameters", "models.start",
     "Matrices of compression have what was in memory.", always(None)),
    ("jumps start sequences", f"{PACKING}:_starts", "models.positions",
     "A sequence starts where a position does not follow the one before.",
     instead(lambda original, position_ids: position_ids.diff(dim=1) != 1)),
    ("one sequence of single tokens", f"{PACKING}:_starts", "models.positions",
     "A sequence starts only where positions fall, not where 0 follows 0.",
     instead(lambda original, position_ids: position_ids.diff(dim=1) < 0)),
    ("other options reset", f"{MODELS}:nsa_config", "models.part",
     "Fields that a dictionary does not name have their defaults.", given(base=None)),
    ("static cache too small", f"{CACHE}.require_capacity", "models.caches",
     "A static cache holds more tokens than its capacity.", always(None)),
    ("cache of another model", f"{CACHE}.attend", "models.caches",
     "A cache goes on with the options that it was filled with.",
     instead(lambda original, layer, *args, config, **more: original(
         layer, *args, config=config if layer.cache is None else layer.cache.config, **more))),
    ("no gradient of padding alone", f"{ATTENTION}:_attend", "models.padding alone",
     "A batch without tokens is not connected to any parameter.", result(lambda o: o if len(o) else o.detach())),
    ("padding counted in front", f"{ATTENTION}:_attend_to_cached", "models.padding anywhere",
     "All padding among cached tokens counts as if it stood in front of them.",
     given(packing=lambda packing: packing if packing.is_token is None else replace(
         packing, is_token=packing.is_token.int().sort(dim=1).values.bool()))),
    ("lists ignored", ATTEND, "models.lists", "Lists that a model gives are ignored: blocks are selected anew.",
     instead(lambda original, *args, block_indices=None, **options: original(*args, **options))),
    ("unsupported not looked for", "nsa_layer.support:missing_feature", "models.backend",
     "Kernels support every dtype and head size.", always(None)),
    ("keyword swallowed", f"{ATTENTION}:CHANGES_RESULT", "models.settings are",
     "Of options that change the result, some are only warned of.",
     lambda original: tuple(name for name in original if name not in ("sinks", "position_bias", "head_mask"))),
    ("unknown options unsaid", f"{ATTENTION}:_warn_of", "models.settings that",
     "Options that nobody knows are dropped without a warning.", always(None)),
    ("checkpointing lost", f"{CONVERT}:NOT_SHARED", KEEPS, "A converted model lacks gradient checkpointing.",
     left_behind("gradient_checkpointing")),
    ("hooks lost", f"{CONVERT}:NOT_SHARED", KEEPS, "A converted model lacks hooks.", left_behind("hooks")),
    ("map of devices lost", f"{CONVERT}:NOT_SHARED", KEEPS, "A converted model lacks the map of devices.",
     left_behind("hf_device_map")),
    ("flags lost", f"{CONVERT}:NOT_SHARED", KEEPS, "A converted model lacks `training`.", left_behind("training")),
    ("quantized taken", f"{CONVERT}:convert_to_nsa", REFUSES, "A quantized model is converted without an error.",
     unseen("hf_quantizer")),
    ("offloaded taken", f"{CONVERT}:convert_to_nsa", REFUSES,
     "A model that accelerate offloads is converted without an error.", unseen("_hf_hook")),
    ("wrapped taken", f"{CONVERT}:convert_to_nsa", REFUSES,
     "A model with another forward of a part is converted without an error.", unseen("forward")),
)  # fmt: skip


@fault("mask of any shape", f"{PACKING}:AttentionMaskInterface._global_mapping", "models.wrong masks")
def _shape(original: Any) -> Any:
    """A mask of another shape is none."""

    def wrong(attention_mask: Any = None, **more: Any) -> Any:
        fits = attention_mask is not None and attention_mask.shape == (more["batch_size"], more["kv_length"])
        return original["nsa"](**more, attention_mask=attention_mask if fits else None)

    return {**original, "nsa": wrong}


@fault("options set later", f"{MODELS}:NSABranches.forward", "models.settings")
@instead
def _later(original: Callable, module: Any, *args: Any, **more: Any) -> Any:
    """Options that are set after a model is made are ignored without an error."""
    module.fixed = {}
    return original(module, *args, **more)


@fault("parametrized ignored", f"{MODELS}:nsa_attention_forward", "models.replaced")
@instead
def _parametrized(original: Callable, layer: Any, *args: Any, nsa_options: dict, **more: Any) -> Any:
    """Of gates and matrices only those that are parameters of the module itself are used."""
    own = dict(layer.nsa.named_parameters(recurse=False))
    kept = {name: value for name, value in nsa_options.items() if not name.endswith("weight") or name in own}
    return original(layer, *args, nsa_options=kept, **more)


@fault("ended turn kept", f"{PACKING}:BatchPacking.kept", "models.padding anywhere")
@instead
def _ended(original: Callable, packing: Any, before: Any, columns: int) -> tuple[int, ...]:
    """The cache keeps what the mask of a next turn hides behind a row's last token."""
    original(packing, before, columns)
    hidden = 0 if before is None else before[:, :columns].logical_not().sum(1)
    return tuple((torch.full(packing.shape[:1], columns) - hidden).tolist())


@fault("ended turn refused", f"{PACKING}:BatchPacking.kept", "models.padding anywhere")
@instead
def _refused(original: Callable, packing: Any, before: Any, columns: int) -> tuple[int, ...]:
    """A mask that hides any cached token is an error."""
    shown = torch.ones(packing.shape[0], columns) if packing.is_token is None else packing.is_token[:, :columns]
    if before is not None and not shown[:, : before.shape[1]].equal(before[:, :columns]):
        raise ValueError("attention_mask must be that of the cached tokens")
    return original(packing, before, columns)


@fault("cache of another batch", f"{CACHE}.attend", "models.caches")
@instead
def _another_batch(original: Callable, layer: Any, *args: Any, gates: Any = None, **more: Any) -> Any:
    """A cache that is reset goes on with as many rows as it had."""
    *tensors, packing = args
    rows = len(layer.cache.cache_seqlens) if layer.cache is not None else packing.shape[0]
    tensors, packing = [x[:rows] for x in tensors], replace(packing, shape=(rows, packing.shape[1]))
    return original(layer, *tensors, packing, gates=None if gates is None else gates[:rows], **more)


@fault("cache of fewer layers", LAYER, "models.caches")
@instead
def _fewer_layers(original: Callable, layer: Any, *args: Any, **more: Any) -> Any:
    """Layers that a cache does not have share its last one."""
    cache, own = more.get("cache", more.get("past_key_values")), layer.layer_idx
    with patch.object(layer, "layer_idx", own if cache is None else min(own, len(cache) - 1)):
        return original(layer, *args, **more)


@fault("projection's weight asked for", LAYER, "models.replaced")
@instead
def _weight(original: Callable, layer: Any, x: torch.Tensor, *args: Any, **more: Any) -> Any:
    """A layer asks its projections' weights for their dtype."""
    weights = [part.weight for part in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj)]
    return original(layer, x.to(weights[0].dtype), *args, **more)


@fault("adapter without a name", f"{CONVERT}:convert_to_nsa", REFUSES)
@instead
def _adapter(original: Callable, model: Any, *args: Any, **more: Any) -> Any:
    """A model with adapters fails where the weight of a projection is asked for."""
    device = model.base_model.layers[0].self_attn.q_proj.weight.device
    return original(model, *args, **more).to(device)


@fault("windows converted", f"{MODELS}:_use_nsa", REFUSES)
@instead
def _windows(original: Callable, config: Any) -> None:
    """Layers with a sliding window become sparse ones, which have none of its width."""
    types, config.layer_types = getattr(config, "layer_types", None), None
    original(config)
    config.layer_types = types


@fault("lengths of Python alone", ATTEND, "models.packed")
@instead
def _integers(original: Callable, *args: Any, max_length_q: Any = None, **options: Any) -> Any:
    """The longest length has to be an int of Python."""
    if not isinstance(max_length_q, (int, type(None))):
        raise TypeError(f"max_length_q must be an int, got {max_length_q!r}")
    return original(*args, max_length_q=max_length_q, **options)


@fault("backend ignored", ATTEND, "models.backend")
@instead
def _backend(original: Callable, module: Any, *args: Any, **options: Any) -> Any:
    """The backend that a configuration names is not passed on."""
    with patch.object(module, "config", copy(module.config)):
        module.config.nsa_backend = None
        return original(module, *args, **options)
