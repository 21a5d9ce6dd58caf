"""Converting dense models of transformers: what modules hold is kept, and what cannot be kept is refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from fuzz.case import Prompt
from fuzz.prop import holds, refused
from fuzz.properties.models import CONFIG, SIZES, prompts

KEPT = ("checkpointing", "hook", "attention's hook", "device map", "training")
REFUSED = {
    "quantizer": "quantized",
    "offloaded": "offloads or dispatches",
    "adapter": "adapters or changed layers",
    "wrapped forward": "wrapped or compiled",
    "window": "sliding_attention",
}


def dense_model(case: Prompt, **options: object) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(case.seed)
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, **options))


def convert(case: Prompt, model: Any) -> Any:
    from nsa_layer.integrations.hf import convert_to_nsa

    return convert_to_nsa(model, CONFIG, gate=case.gate, compression=case.compression)


@holds("models.conversion keeps what modules hold", lambda: prompts(changes=KEPT), pr=6)
def conversion_keeps_what_modules_hold(case: Prompt) -> None:
    """Gradient checkpointing, hooks, a map of devices and flags of a dense model are those of the converted one."""
    model, calls = dense_model(case).train(), []
    layer = model.model.layers[0]
    hooked = layer.self_attn if case.change == "attention's hook" else layer
    if case.change == "checkpointing":
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
    elif case.change == "device map":
        model.hf_device_map = {"": "cpu"}
    elif case.change == "training":
        layer.self_attn.eval()
    else:
        hooked.register_forward_hook(lambda *_: calls.append("called"))
    sparse = convert(case, model)
    assert sparse.is_gradient_checkpointing == (case.change == "checkpointing")
    assert getattr(sparse, "hf_device_map", None) == getattr(model, "hf_device_map", None)
    assert sparse.model.layers[0].self_attn.training == layer.self_attn.training
    counts = []
    for each in (model, sparse):
        calls.clear()
        handle = each.model.layers[0].mlp.register_forward_hook(lambda *_: calls.append("mlp"))
        each(torch.ones(1, case.T, dtype=torch.long), use_cache=False).logits.sum().backward()
        handle.remove()
        counts.append(sorted(calls))
    assert counts[0] == counts[1], f"dense: {counts[0]}, sparse: {counts[1]}"


@holds("models.conversion refuses what it cannot keep", lambda: prompts(changes=tuple(REFUSED)), pr=6)
def conversion_refuses_what_it_cannot_keep(case: Prompt) -> None:
    """A quantized, offloaded, adapted or wrapped model, and one with windows, is refused by name."""
    windows = dict(use_sliding_window=True, sliding_window=8, max_window_layers=0) if case.change == "window" else {}
    model = dense_model(case, **windows)
    attention = model.model.layers[0].self_attn
    if case.change == "quantizer":
        model.hf_quantizer = SimpleNamespace(quantization_config=SimpleNamespace(quant_method="awq"))
    elif case.change == "offloaded":
        attention._hf_hook = object()
    elif case.change == "adapter":
        attention.q_proj = nn.Sequential(nn.Linear(16, 16))
    elif case.change == "wrapped forward":
        forward = attention.forward
        attention.forward = lambda *args, **options: forward(*args, **options)
    with refused(REFUSED[case.change], NotImplementedError):
        convert(case, model)
