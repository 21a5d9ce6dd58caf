"""Small models of transformers with sparse attention, and batches for them."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from nsa_layer import NSAConfig
from nsa_layer.integrations.hf import NSALlamaConfig, NSALlamaForCausalLM

CONFIG = NSAConfig(block_size=8, block_counts=4, window_size=16)
WIDE = CONFIG.replace(block_counts=64)
INDEX = CONFIG.replace(rule="index", branches=("selected",), block_counts=6)
VOCABULARY = 64
SIZES = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2)
SIZES |= dict(bos_token_id=None, eos_token_id=None, pad_token_id=0)
CLOSE = dict(rtol=0, atol=1e-9)
MARKS = [pytest.mark.xdist_group("hf"), pytest.mark.usefixtures("same_numbers")]


def dense(family: str = "Llama", **changes: object) -> PreTrainedModel:
    """A dense model in fp64."""
    config = getattr(transformers, f"{family}Config")(**SIZES | changes)
    return getattr(transformers, f"{family}ForCausalLM")(config).double().eval()


def sparse(**changes: object) -> NSALlamaForCausalLM:
    """A sparse model in fp64 whose gates and matrices are not those that they start with."""
    model = NSALlamaForCausalLM(NSALlamaConfig(**SIZES | dict(nsa=CONFIG) | changes)).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".nsa." in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def plain(**changes: object) -> LlamaForCausalLM:
    """A dense model in fp64 with the attention alone."""
    sizes = SIZES | dict(attn_implementation="nsa", nsa=dict(block_size=8)) | changes
    return LlamaForCausalLM(LlamaConfig(**sizes)).double().eval()


@torch.no_grad()
def selected_alone(model: PreTrainedModel) -> None:
    """Give gates by input that start with the selected branch a weight of 1 for it, and of 0 for the others."""
    for layer in model.model.layers:
        *_, last = layer.self_attn.nsa.gate_mlp.modules()
        last.bias.mul_(1e3)


def tokens(*shape: int) -> torch.Tensor:
    """Without the one that pads."""
    return torch.randint(1, VOCABULARY, shape)


def padded(ids: torch.Tensor, left: tuple[int, ...], right: tuple[int, ...] = (0, 0)) -> dict[str, torch.Tensor]:
    """Rows of ids without their first or last tokens, and padding there."""
    at = torch.arange(ids.shape[1])
    mask = (at >= torch.tensor(left)[:, None]) & (at < ids.shape[1] - torch.tensor(right)[:, None])
    return dict(input_ids=ids * mask, attention_mask=mask.long())


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Counted from each row's first token: angles of others would differ, rounded to fp32 as they are."""
    return (mask.cumsum(1) - 1).clamp(min=0)


def counted(*lengths: int) -> torch.Tensor:
    """Positions [1, total] of packed sequences."""
    return torch.cat([torch.arange(n) for n in lengths])[None]
