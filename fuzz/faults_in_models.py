"""Faults in models of transformers: masks, options, and parameters that nothing initialises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fuzz.mutations import fault

RAGGED, MODELS = "nsa_layer.integrations.hf.ragged", "nsa_layer.integrations.hf.models"


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


@fault("options set later", f"{MODELS}:NSABranches.forward", "models.settings")
def _later(original: Callable) -> Callable:
    """What is set after a model is made changes nothing, without a word."""

    def wrong(module: Any, *args: Any, **more: Any) -> Any:
        module.fixed = {}
        return original(module, *args, **more)

    return wrong


@fault("option dropped", "nsa_layer.integrations.hf.attention:_check_options", "models.settings")
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


@fault("parametrized ignored", f"{MODELS}:nsa_attention_forward", "models.parametrized")
def _parametrized(original: Callable) -> Callable:
    """Of gates and matrices only those that are parameters of the module itself are used."""

    def wrong(layer: Any, *args: Any, nsa_options: dict, **more: Any) -> Any:
        own = dict(layer.nsa.named_parameters(recurse=False))
        kept = {name: value for name, value in nsa_options.items() if not name.endswith("weight") or name in own}
        return original(layer, *args, nsa_options=kept, **more)

    return wrong


@fault("other options reset", f"{MODELS}:nsa_config", "models.part")
def _reset(original: Callable) -> Callable:
    """Fields that a dictionary does not name have their defaults."""
    return lambda value, base=None: original(value)


@fault("static cache too small", "nsa_layer.integrations.hf.cache:NSACacheLayer.require_room", "models.caches")
def _room(original: Callable) -> Callable:
    """A static cache takes more tokens than it has places."""
    return lambda layer, columns: None


@fault("cache of another model", "nsa_layer.integrations.hf.cache:NSACacheLayer.attend", "models.caches")
def _other(original: Callable) -> Callable:
    """A cache goes on with the options that it was filled with."""

    def wrong(layer: Any, *args: Any, config: Any, **more: Any) -> Any:
        return original(layer, *args, config=layer.cache.config if layer.cache is not None else config, **more)

    return wrong
