"""`convert_to_nsa`: a dense model of transformers becomes a sparse one with its parameters."""

from __future__ import annotations

from copy import copy, deepcopy
from dataclasses import asdict
from inspect import unwrap

import torch
from torch import nn
from transformers import PreTrainedModel

from nsa_layer.checks import require_config
from nsa_layer.config import NSAConfig
from nsa_layer.integrations.hf.models import SPARSE, NSABranches

OPEN_LOGIT = 4.0  # sigmoid(4) = 0.982
NOT_KEPT = ("model_type", "architectures", "transformers_version", "quantization_config")
# Of the dense model alone: accelerate's forward of mixed precision, compiled steps, and names in the file it is of.
NOT_SHARED = ("_modules", "config", "forward", "_original_forward")
NOT_SHARED += ("_compiled_call", "_last_compile_config", "_weight_conversions")
NOT_SHARED += ("hf_quantizer", "is_quantized", "quantization_method")


def convert_to_nsa(
    model: PreTrainedModel,
    config: NSAConfig = NSAConfig(),
    *,
    gate: str | None = None,
    compression: str = "mean",
    index_dim: int | None = None,
) -> PreTrainedModel:
    """A model with Native Sparse Attention that shares a dense one's modules, except for its attention's.

    With a ``gate`` by input the gates start at nearly 1 for the selected branch and nearly 0 for the others: while a
    list holds all blocks, the outputs are close to the dense model's, and with ``branches=("selected",)`` equal to
    them. Training makes use of the other branches. An index starts as the keys and the mean of each group's queries,
    rotated by the slowest pairs where it has fewer dimensions.

    Args:
        model: a Llama, Qwen2 or Qwen3 model or causal language model; it stays usable.
        config: the operator's options.
        gate: as in `NSAttention`; None: "input", and none where ``config`` has one branch.
        compression, index_dim: as in `NSAttention`.

    Returns:
        The model of this package; `save_pretrained`, `AutoConfig` and `AutoModelForCausalLM` know it by its own type.

    Raises:
        NotImplementedError: a model of another class, or one with parts that the new one could not keep or save: layers
            with windows, quantized weights, adapters, offloading, wrapped or compiled parts.
        TypeError: ``config`` is not an NSAConfig.
        ValueError: ``gate`` or ``compression`` is unknown, or ``index_dim`` odd or larger than a head.

    Example:
        >>> sizes = dict(hidden_size=64, intermediate_size=64, vocab_size=50, num_hidden_layers=1)
        >>> dense = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        >>> type(convert_to_nsa(dense, NSAConfig(block_counts=8))).__name__
        'NSALlamaForCausalLM'
    """
    if type(model) not in SPARSE:
        names = ", ".join(sorted(dense.__name__ for dense in SPARSE))
        raise NotImplementedError(f"convert_to_nsa converts {names}, got {type(model).__name__}")
    sparse = SPARSE[type(model)]
    require_config(config)
    quantizer = getattr(model, "hf_quantizer", None)
    method = getattr(getattr(quantizer, "quantization_config", None), "quant_method", None)
    if quantizer is not None and method != "gguf":  # whose weights are plain ones
        raise NotImplementedError("convert_to_nsa of a quantized model: convert it first")
    if any(hasattr(part, "_hf_hook") for part in model.modules()):
        raise NotImplementedError("convert_to_nsa of a model that accelerate offloads or dispatches: convert it first")
    values = {name: value for name, value in model.config.to_dict().items() if name not in NOT_KEPT}
    values |= dict(nsa=asdict(config), nsa_gate=gate, nsa_compression=compression, nsa_index_dim=index_dim)
    with torch.device("meta"):
        converted = sparse(sparse.config_class.from_dict(values))
    saved = converted.state_dict().keys()
    _share(converted, model, type(model).__name__)
    if others := sorted(saved ^ converted.state_dict().keys()):
        raise NotImplementedError(f"convert_to_nsa of a model with adapters or changed layers: {others[0]!r}")
    for layer in converted.base_model.layers:
        branches, device = layer.self_attn.nsa, next(layer.parameters()).device
        branches.to_empty(device=device).to(model.dtype).train(layer.training)
        for part in branches.modules():
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()
        branches.start_index(layer.self_attn)
        if branches.gate_mlp is not None:
            *_, last = branches.gate_mlp.modules()
            start = [OPEN_LOGIT if branch == "selected" else -OPEN_LOGIT for branch in config.branches]
            last.bias.data.copy_(torch.tensor(start).repeat(branches.num_heads))
    if model.can_generate():
        converted.generation_config = deepcopy(model.generation_config)
    return converted


def _share(sparse: nn.Module, dense: nn.Module, name: str) -> None:
    """Give a sparse model the dense one's modules, except modules with gates and compression inside.

    Excepted modules get the attributes of the dense model's: hooks, flags, how to checkpoint.
    """
    set_here = vars(dense).get("forward", type(dense).forward)
    is_its_own = getattr(unwrap(set_here), "__func__", unwrap(set_here)) is unwrap(type(dense).forward)
    is_compiled = "_compiled_call_impl" in vars(dense) or hasattr(set_here, "_torchdynamo_orig_callable")
    if is_compiled or not is_its_own or not isinstance(sparse, type(dense)):
        raise NotImplementedError(f"convert_to_nsa of a model whose {name} is wrapped or compiled: convert it first")
    for key, value in vars(dense).items():
        if key not in NOT_SHARED:
            vars(sparse)[key] = copy(value) if isinstance(value, dict) else value
    for key, child in dense.named_children():
        part = getattr(sparse, key)
        if any(isinstance(inner, NSABranches) for inner in part.modules()):
            _share(part, child, f"{name}.{key}")
        else:
            setattr(sparse, key, child)
