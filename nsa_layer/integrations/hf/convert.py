"""`convert_to_nsa`: a dense model of transformers becomes a sparse one with its parameters."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import asdict

import torch
from torch import nn
from transformers import (
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen3ForCausalLM,
    Qwen3Model,
)

from nsa_layer.config import NSAConfig
from nsa_layer.integrations.hf import models

SPARSE = {
    LlamaForCausalLM: models.NSALlamaForCausalLM,
    LlamaModel: models.NSALlamaModel,
    Qwen2ForCausalLM: models.NSAQwen2ForCausalLM,
    Qwen2Model: models.NSAQwen2Model,
    Qwen3ForCausalLM: models.NSAQwen3ForCausalLM,
    Qwen3Model: models.NSAQwen3Model,
}
NOT_KEPT = ("model_type", "architectures", "transformers_version")


def convert_to_nsa(
    model: PreTrainedModel, config: NSAConfig = NSAConfig(), *, gate: str = "input", compression: str = "mean"
) -> PreTrainedModel:
    """A model with Native Sparse Attention that shares the modules of a dense one, but its attention's.

    With ``gate="input"`` the gates start at nearly 1 for the selected branch and nearly 0 for the others: as long as
    a list holds all blocks, the model says about what the dense one does. Training makes use of the other branches.

    Args:
        model: a Llama, Qwen2 or Qwen3 model or causal language model; it stays usable.
        config: the operator's options.
        gate, compression: as in `NSAttention`.

    Returns:
        The model of this package; `save_pretrained`, `AutoConfig` and `AutoModelForCausalLM` know it by its own type.

    Raises:
        NotImplementedError: a model of another class.
        TypeError: ``config`` is not an NSAConfig.
        ValueError: ``gate`` or ``compression`` is unknown.
    """
    if type(model) not in SPARSE:
        names = ", ".join(sorted(dense.__name__ for dense in SPARSE))
        raise NotImplementedError(f"convert_to_nsa takes {names}, got {type(model).__name__}")
    sparse = SPARSE[type(model)]
    if not isinstance(config, NSAConfig):
        raise TypeError(f"config must be an NSAConfig, got {type(config).__name__}")
    values = {name: value for name, value in model.config.to_dict().items() if name not in NOT_KEPT}
    values |= dict(nsa=asdict(config), nsa_gate=gate, nsa_compression=compression)
    with torch.device("meta"):
        made = sparse(sparse.config_class.from_dict(values))
    _share(made, model)
    for layer in made.base_model.layers:
        branches, like = layer.self_attn.nsa, layer.self_attn.q_proj.weight
        branches.to_empty(device=like.device).to(model.dtype).reset_parameters()
        if gate == "input":
            branches.start_selected()
    if model.can_generate():
        made.generation_config = deepcopy(model.generation_config)
    return made.train(model.training)


def _share(sparse: nn.Module, dense: nn.Module) -> None:
    """Give a sparse model the dense one's modules, but for those with gates and compression inside."""
    for name, child in dense.named_children():
        own = getattr(sparse, name)
        if any(isinstance(part, models.NSABranches) for part in own.modules()):
            _share(own, child)
        else:
            setattr(sparse, name, child)
