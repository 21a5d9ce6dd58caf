"""Multi-query recall that a model learns from scratch: dense, by the published rule, by an index of tokens.

    python benchmarks/recall_pairs.py [--pairs 48] [--seeds 3] [--variants dense published index] [--fp8]

Pairs of a key and a value stand at random even positions of the first three quarters of a sequence, and four questions
for each, keys alone, in the last one; all other tokens are fillers. A model has two layers of width 256 with 4 query
heads over 1 of 64, rotary embeddings, and a causal depthwise convolution of 4 tokens before attention. It lists 6
blocks of 64, the first, a token's own and the one before it among them. AdamW takes 1,500 steps: 40, 20 and 40 % of
them at 256, 1,024 and 2,048 tokens, in batches of 32,768; its rate rises for 75 steps and falls as a
cosine to 0. "recall" is the share of questions whose value the model says at 2,048 tokens; with --fp8 also where it
reads keys, values and compressed or index keys from caches in float8_e4m3fn. On a GPU attention is in bf16 on the
kernels, on a CPU in fp32 by eager.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from nsa_layer import NSACache, NSAConfig, NSAttention, index_loss
from nsa_layer.rope import RotaryEmbedding
from nsa_tools.demo.model import DenseAttention
from nsa_tools.report.tables import markdown

SYMBOLS = 256  # keys, and as many values, and fillers behind them
WIDTH, HEADS, HEAD_DIM, LAYERS, TAPS = 256, 4, 64, 2, 4
STAGES = ((256, 0.4), (1024, 0.2), (2048, 0.4))  # tokens, share of the steps
BATCH = 32768  # tokens
ASKED = 4  # times that a pair is
RATE, WEIGHT = 1e-3, 0.1  # of AdamW, and of the index' loss
RISE = 75  # steps until AdamW has its rate
BLOCKS = NSAConfig(block_size=64, block_counts=6, q_tile=1, window_size=64, init_blocks=1, local_blocks=2)
VARIANTS = {"dense": None, "published": BLOCKS, "index": BLOCKS.replace(rule="index", branches=("selected",))}


def draw(T: int, batch: int, pairs: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences and the values that are asked for: two int64 [batch, T], -100 where nothing is asked."""
    device = generator.device

    def some(count: int, of: int) -> torch.Tensor:
        return torch.rand(batch, of, generator=generator, device=device).argsort(1)[:, :count]

    fillers = torch.randint(2 * SYMBOLS, 3 * SYMBOLS, (batch, T), generator=generator, device=device)
    keys, slots = some(pairs, SYMBOLS), 2 * some(pairs, T * 3 // 8)
    values = torch.randint(SYMBOLS, 2 * SYMBOLS, (batch, pairs), generator=generator, device=device)
    tokens = fillers.scatter(1, slots, keys).scatter(1, slots + 1, values)
    questions = T * 3 // 4 + some(min(ASKED * pairs, T // 4), T // 4)
    which = torch.arange(questions.shape[1], device=device).expand(batch, -1) % pairs
    tokens.scatter_(1, questions, keys.gather(1, which))
    return tokens, torch.full_like(tokens, -100).scatter(1, questions, values.gather(1, which))


class Layer(nn.Module):
    """A causal convolution and attention of one kind, then an MLP, both with a residual.

    Attributes:
        kept: the dtype of caches that attention reads, new ones for each call; None: without caches.
    """

    kept: torch.dtype | None = None

    def __init__(self, config: NSAConfig | None) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.convolution = nn.Conv1d(WIDTH, WIDTH, TAPS, groups=WIDTH)
        options = dict(num_heads=HEADS, num_kv_heads=1, rope=RotaryEmbedding(HEAD_DIM))
        self.attention = DenseAttention(WIDTH, **options) if config is None else NSAttention(
            WIDTH, config=config, **options
        )  # fmt: skip
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.convolution(F.pad(self.norms[0](x).mT, (TAPS - 1, 0))).mT
        given = {}
        if self.kept is not None:
            sizes = (*x.shape[:2], 1, HEAD_DIM)
            given["cache"] = NSACache(*sizes, config=self.attention.config, dtype=self.kept, device=x.device)
        x = x + self.attention(mixed, **given)
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """Tokens [B, T] to logits [B, T, symbols]."""

    def __init__(self, config: NSAConfig | None) -> None:
        super().__init__()
        self.symbols = nn.Embedding(3 * SYMBOLS, WIDTH)
        self.layers = nn.Sequential(*(Layer(config) for _ in range(LAYERS)), nn.RMSNorm(WIDTH))
        self.head = nn.Linear(WIDTH, 3 * SYMBOLS, bias=False)
        nn.init.normal_(self.symbols.weight, std=WIDTH**-0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=tokens.is_cuda):
            return self.head(self.layers(self.symbols(tokens))).float()


def learn(name: str, seed: int, args: argparse.Namespace) -> list[float]:
    """The recall of a new model at the last length, on sequences that it was not trained on; then from FP8 caches."""
    torch.manual_seed(seed)
    generator, config = torch.Generator(args.device).manual_seed(seed), VARIANTS[name]
    model = Model(config).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min(1, (n + 1) / RISE) * (0.5 + 0.5 * math.cos(math.pi * n / args.steps))
    )
    with tqdm(total=args.steps, desc=f"{name}, seed {seed}", leave=False) as bar:
        for T, share in STAGES:
            for _ in range(round(share * args.steps)):
                tokens, asked = draw(T, args.batch // T, args.pairs, generator)
                loss = of_model = F.cross_entropy(model(tokens).flatten(0, 1), asked.flatten())
                if config is not None and config.rule == "index":
                    loss = of_model + WEIGHT * index_loss(model)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                bar.update()
            bar.set_postfix_str(f"{T} tokens: loss {of_model.item():.3f}")
    kept = [None, torch.float8_e4m3fn][: 1 + (args.fp8 and config is not None)]
    found, count = [0] * len(kept), 0
    model.eval()
    for _ in range(8):
        tokens, asked = draw(STAGES[-1][0], args.batch // STAGES[-1][0], args.pairs, generator)
        count += int((asked >= 0).sum())
        for i, Layer.kept in enumerate(kept):
            with torch.no_grad():
                found[i] += int((model(tokens).argmax(-1) == asked).sum())
    Layer.kept = None
    return [x / count for x in found]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=48)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=BATCH, help="tokens of a step")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--fp8", action="store_true", help="also read caches in float8_e4m3fn, of sparse attention")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="also write the shares to this file")
    args = parser.parse_args(argv)
    if not 1 <= args.pairs <= STAGES[0][0] * 3 // 8:
        parser.error(f"--pairs has to be from 1 to {STAGES[0][0] * 3 // 8}, got {args.pairs}")
    shares: dict[str, list[float]] = {name: [] for name in args.variants}
    try:
        for name, seed in ((name, seed) for name in args.variants for seed in args.seeds):
            for kept, share in zip(("", ", FP8 caches"), learn(name, seed, args)):
                shares.setdefault(name + kept, []).append(share)
            if args.json:
                args.json.write_text(json.dumps(shares, indent=1) + "\n")
    except KeyboardInterrupt:
        print("interrupted; what was trained:")
    rows = [[name, *(f"{x:.3f}" for x in of), *[""] * (len(args.seeds) - len(of))] for name, of in shares.items()]
    print(markdown(["attention", *(f"recall, seed {seed}" for seed in args.seeds)], rows))


if __name__ == "__main__":
    main()
