"""Convert a model of flash-linear-attention's `NSAForCausalLM` to one of `nsa_layer.integrations.hf`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from nsa_layer.integrations.hf import NSALlamaConfig, NSALlamaForCausalLM, NSAQwen2Config, NSAQwen2ForCausalLM

NAMES = {
    "model.embeddings.": "model.embed_tokens.",
    ".attn_norm.": ".input_layernorm.",
    ".mlp_norm.": ".post_attention_layernorm.",
    ".attn.g_proj.": ".self_attn.nsa.gate_mlp.",
    ".attn.": ".self_attn.",
}


def from_fla(weights: dict[str, torch.Tensor], fla: dict) -> PreTrainedModel:
    """A model of the tensors by name, as safetensors.torch.load_file gives them, and config.json's fields."""
    heads, attention = fla["num_heads"], "model.layers.0.attn."
    options = {name: fla[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "pad_token_id")}
    options |= dict(bos_token_id=fla["bos_token_id"], eos_token_id=fla["eos_token_id"], rms_norm_eps=fla["norm_eps"])
    options |= dict(num_attention_heads=heads, num_key_value_heads=fla["num_kv_heads"] or heads)
    options |= dict(head_dim=len(weights[attention + "q_proj.weight"]) // heads)
    options |= dict(intermediate_size=len(weights["model.layers.0.mlp.gate_proj.weight"]))
    options |= dict(rope_parameters=dict(rope_type="default", rope_theta=fla["rope_theta"]))
    options |= dict(max_position_embeddings=fla["max_position_embeddings"])
    options |= dict(tie_word_embeddings=fla.get("tie_word_embeddings", False), nsa_gate="linear")
    options |= dict(nsa={name: fla[name] for name in ("block_size", "block_counts", "window_size")})
    if fla["qkv_bias"]:
        model = NSAQwen2ForCausalLM(NSAQwen2Config(**options))
    else:
        model = NSALlamaForCausalLM(NSALlamaConfig(**options))
    renamed = {}
    for name, tensor in weights.items():
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        renamed[name] = tensor
    missing, unexpected = model.load_state_dict(renamed, strict=False)
    absent = [name for name in missing if not name.endswith(("gate_mlp.bias", "lm_head.weight"))]
    assert not unexpected and not absent, (unexpected, absent)  # lm_head.weight is absent where it is tied
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="with config.json and *.safetensors")
    parser.add_argument("out", type=Path, help="folder to write")
    args = parser.parse_args()
    weights = {name: x for file in sorted(args.folder.glob("*.safetensors")) for name, x in load_file(file).items()}
    from_fla(weights, json.loads((args.folder / "config.json").read_text())).save_pretrained(args.out)


if __name__ == "__main__":
    main()
