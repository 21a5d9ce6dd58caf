"""`torch.use_deterministic_algorithms`, as PyTorch's own operators take it."""

from __future__ import annotations

from dataclasses import replace

import torch

from nsa_layer.call_spec import CallSpec


def in_force(spec: CallSpec) -> CallSpec:
    """The spec as it has to be computed now: with ``deterministic`` where PyTorch is told to be."""
    config = spec.config
    if config.deterministic or not torch.are_deterministic_algorithms_enabled():
        return spec
    return replace(spec, config=config.replace(deterministic=True))
