"""`torch.use_deterministic_algorithms`, as PyTorch's own operators take it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import torch

from nsa_layer.call_spec import CallSpec


def in_force(spec: CallSpec, check: Callable[..., object]) -> CallSpec:
    """The spec as it has to be computed now: with ``deterministic`` where PyTorch is told to be.

    Args:
        check: called as ``check(config=...)``; raises NotImplementedError for options that cannot be had.

    Raises:
        NotImplementedError: there is no deterministic way; with ``warn_only`` it is a warning, and the spec stays.
    """
    config = spec.config
    if config.deterministic or not torch.are_deterministic_algorithms_enabled():
        return spec
    deterministic = config.replace(deterministic=True)
    try:
        check(config=deterministic)
    except NotImplementedError as error:
        check(config=config)  # raises where it is not for want of determinism
        message = f"torch.use_deterministic_algorithms asks for determinism; {error}"
        if not torch.is_deterministic_algorithms_warn_only_enabled():
            raise NotImplementedError(message) from None
        warnings.warn(message, stacklevel=3)
        return spec
    return replace(spec, config=deterministic)
