"""A byte-level transformer with sparse or with dense attention; everything else is the same."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from nsa_layer.call import Aux
from nsa_layer.config import require_one_of
from nsa_layer.kvcache.nsa_cache import NSACache
from nsa_layer.module import NSAttention
from nsa_layer.rope import RotaryEmbedding
from nsa_tools.demo.demo_config import DemoConfig

VOCABULARY = 256
KINDS = ("nsa", "dense")
CHOSEN = ("by nsa", "by index")  # the dense model's weights, with attention to chosen blocks


class DenseAttention(nn.Module):
    """Causal attention over every earlier token, with the projections of `NSAttention` under the same names."""

    def __init__(self, dim: int, *, num_heads: int, num_kv_heads: int, rope: nn.Module) -> None:
        super().__init__()
        self.rope, self.head_dim = rope, dim // num_heads
        D = self.head_dim
        self.q_proj = nn.Linear(dim, num_heads * D, bias=False)
        self.k_proj = nn.Linear(dim, num_kv_heads * D, bias=False)
        self.v_proj = nn.Linear(dim, num_kv_heads * D, bias=False)
        self.o_proj = nn.Linear(num_heads * D, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, dim] -> [B, T, dim]."""
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)) for f in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.rope(q, k, torch.arange(x.shape[1], device=x.device))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.o_proj(o.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each after a normalisation and beside a residual path.

    Args:
        kind: "nsa" or "dense"; or "by nsa", "by index": attention to the blocks alone that this rule chooses.
    """

    def __init__(self, config: DemoConfig, kind: str) -> None:
        super().__init__()
        heads = {"num_heads": config.heads, "num_kv_heads": config.kv_heads}
        rope = RotaryEmbedding(config.dim // config.heads)
        self.attention_norm = nn.RMSNorm(config.dim)
        if kind == "nsa":
            self.attention = NSAttention(config.dim, **heads, config=config.nsa(), compression="linear", rope=rope)
        elif kind == "dense":
            self.attention = DenseAttention(config.dim, **heads, rope=rope)
        else:
            options = dict(config=config.chosen(kind.removeprefix("by ")), rope=rope)
            self.attention = NSAttention(config.dim, **heads, **options, gate="linear" if kind == "by nsa" else None)
        self.mlp_norm = nn.RMSNorm(config.dim)
        self.up = nn.Linear(config.dim, 4 * config.dim, bias=False)
        self.down = nn.Linear(4 * config.dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor, seen: list[Aux] | None, cache: NSACache | None) -> torch.Tensor:
        options = {} if cache is None else dict(cache=cache)
        out = self.attention(self.attention_norm(x), **options if seen is None else dict(return_aux=True))
        if seen is not None:
            out, aux = out
            seen.append(aux)
        x = x + out
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class ByteModel(nn.Module):
    """Bytes to logits of the next byte; ``kind`` as in `Block`."""

    def __init__(self, config: DemoConfig, kind: str) -> None:
        super().__init__()
        require_one_of("kind", kind, (*KINDS, *CHOSEN))
        self.embedding = nn.Embedding(VOCABULARY, config.dim)
        self.blocks = nn.ModuleList(Block(config, kind) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, VOCABULARY, bias=False)
        self._autocast = None if config.dtype == "float32" else getattr(torch, config.dtype)

    def new_caches(self, batch: int, max_seqlen: int) -> list[NSACache] | None:
        """Empty ones for each layer; None where there are none: dense attention, or a choice by tile."""
        layers = [block.attention for block in self.blocks]
        if not all(isinstance(layer, NSAttention) and layer.config.by_token for layer in layers):
            return None
        weight = self.head.weight
        options = dict(dtype=self._autocast or weight.dtype, device=weight.device)
        sizes = [(batch, max_seqlen, layer.num_kv_heads, layer.head_dim) for layer in layers]
        return [NSACache(*size, config=layer.config, **options) for size, layer in zip(sizes, layers)]

    def forward(
        self, tokens: torch.Tensor, *, seen: list[Aux] | None = None, caches: list[NSACache] | None = None
    ) -> torch.Tensor:
        """int64 [B, T] -> fp32 logits [B, T, 256].

        Args:
            seen: collects each sparse layer's `Aux`.
            caches: from `new_caches`, of the tokens ahead of these, which are appended.
        """
        with torch.autocast(tokens.device.type, dtype=self._autocast, enabled=self._autocast is not None):
            x = self.embedding(tokens)
            for block, cache in zip(self.blocks, caches or [None] * len(self.blocks)):
                x = block(x, seen, cache)
            return self.head(self.norm(x)).float()

    def loss(self, sequences: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy in nats per byte, of int64 [B, T + 1]."""
        logits = self(sequences[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())


def build_models(config: DemoConfig) -> dict[str, ByteModel]:
    """Both models on the device; what they have in common starts from the same values."""
    torch.manual_seed(config.seed)
    models = {kind: ByteModel(config, kind) for kind in KINDS}
    _initialise(models["nsa"], config)
    shared = models["dense"].state_dict().keys()
    models["dense"].load_state_dict({name: models["nsa"].state_dict()[name] for name in shared})
    return {kind: model.to(config.device) for kind, model in models.items()}


@torch.no_grad()
def with_blocks_chosen(dense: ByteModel, config: DemoConfig, kind: str) -> ByteModel:
    """The dense model's weights with attention to the blocks of `CHOSEN`; an index starts from them."""
    model = ByteModel(config, kind).to(dense.head.weight.device)
    model.load_state_dict(dense.state_dict(), strict=False)
    for attention in (block.attention for block in model.blocks):
        if kind == "by nsa":  # 1 for the selected branch, 0 for the others
            attention.gate_mlp.bias.copy_(attention.gate_mlp.bias.new_tensor([-99.0, 99.0, -99.0]).repeat(config.heads))
        else:
            attention.start_index(attention)
    return model


@torch.no_grad()
def _initialise(model: ByteModel, config: DemoConfig) -> None:
    """Normal weights of deviation 1 / sqrt(fan in), smaller for what is added to the residual path."""
    model.embedding.weight.normal_(std=1.0)
    model.head.weight.normal_(std=0.1 * config.dim**-0.5)
    for block in model.blocks:
        for linear in (m for m in block.modules() if isinstance(m, nn.Linear)):
            residual = linear is block.down or linear is block.attention.o_proj
            scale = (2 * config.layers) ** -0.5 if residual else 1.0
            linear.weight.normal_(std=scale * linear.in_features**-0.5)
