"""Multi-query recall learned with dense attention, with a choice of blocks by token, and by tile.

    python benchmarks/recall.py [--lengths 32 64 128 ... 1024] [--steps 600] [--tokens 32768] [--seeds 2] [--json FILE]
    python benchmarks/recall.py --variants "by tile of 8" "by tile of 128"

Pairs of a key and a value stand at random positions of the first half of a sequence, one for every 8 tokens; the second
half asks for each key once. The share of values that a model finds at the last length is its recall; blocks hold
several pairs, so that the compressed branch alone cannot tell them apart. A model has two layers of width 128 with 4
query heads, 1 key/value head, and for sparse attention blocks of 16, 8 of them listed, and a window of 32; it also sees
each token's predecessor, and its output layer is its table of symbols. It goes from one length to the next when it
finds 99 % or has taken its steps, twice as many at the last. On a GPU the models learn side by side, and a step is a
CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from nsa_layer import NSAConfig, nsa
from nsa_tools.report.tables import markdown

SPARSE = NSAConfig(block_size=16, block_counts=8, window_size=32)
VARIANTS = {"dense": None, "by token": SPARSE.replace(q_tile=1)}
VARIANTS |= {f"by tile of {q_tile}": SPARSE.replace(q_tile=q_tile) for q_tile in (2, 4, 8, 16, 32, 64, 128, 256)}
SHOWN = ["dense", "by token", "by tile of 32"]
SYMBOLS = 256  # keys, and as many values; the last symbol of the alphabet fills the rest
FILLER = 2 * SYMBOLS
WIDTH, HEADS, LAYERS = 128, 4, 2
FOUND = 0.99  # share of values at which a model goes on to the next length
RATE = 3e-3
LENGTHS = [32, 64, 128, 256, 512, 1024]
LOOK = 25  # steps between looks at what a model finds


def draw(T: int, batch: int, generator: torch.Generator, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences and the values that are asked for: two int64 [batch, T], -100 where nothing is asked."""

    def positions(count: int, of: int) -> torch.Tensor:
        return torch.rand(batch, of, generator=generator, device=device).argsort(1)[:, :count]

    pairs = T // 8
    keys = positions(pairs, SYMBOLS)
    values = torch.randint(SYMBOLS, 2 * SYMBOLS, (batch, pairs), generator=generator, device=device)
    tokens = torch.full((batch, T), FILLER, device=device)
    asked = torch.full_like(tokens, -100)
    slots, questions = 2 * positions(pairs, T // 4), T // 2 + positions(pairs, T // 2)
    tokens.scatter_(1, slots, keys).scatter_(1, slots + 1, values).scatter_(1, questions, keys)
    asked.scatter_(1, questions, values)
    return tokens, asked


class Layer(nn.Module):
    """Attention of one kind, then an MLP, both with a residual."""

    def __init__(self, config: NSAConfig | None) -> None:
        super().__init__()
        self.config, D = config, WIDTH // HEADS
        self.qkv, self.out = nn.Linear(WIDTH, WIDTH + 2 * D, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.gate = nn.Parameter(torch.zeros(HEADS, 3, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (HEADS + 2, -1)).split((HEADS, 1, 1), dim=2)
        if self.config is None:
            o = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True)
            o = o.transpose(1, 2)
        else:  # blocks of 16 are not for the kernels
            o = nsa(q, k, v, config=self.config, gate_weight=self.gate, backend="eager")
        x = x + self.out(o.flatten(2))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """Tokens [B, T] to logits [B, T, symbols]."""

    def __init__(self, config: NSAConfig | None) -> None:
        super().__init__()
        self.symbols, self.before = nn.Embedding(FILLER + 1, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.Sequential(*(Layer(config) for _ in range(LAYERS)), nn.RMSNorm(WIDTH))
        self.head = nn.Linear(WIDTH, FILLER + 1, bias=False)
        nn.init.normal_(self.symbols.weight, std=WIDTH**-0.5)
        self.head.weight = self.symbols.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.symbols(F.pad(tokens, (1, 0), value=FILLER))
        return self.head(self.layers(x[:, 1:] + self.before(x[:, :-1])))


def captured(step: Callable[[], None], generator: torch.Generator, stream: torch.cuda.Stream) -> Callable[[], None]:
    """A replay of a training step, which is thousands of small kernels, as a CUDA graph; it takes three steps first."""
    for _ in range(3):
        step()
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph.replay


def learn(name: str, seed: int, args: argparse.Namespace, shares: list[float]) -> Iterator[None]:
    """Train a model of a kind, `LOOK` steps at a time, and append the share of values that it finds at each length.

    On a GPU it has a stream of its own, so that it learns on while others are asked for their steps.
    """
    torch.manual_seed(seed)
    generator, stream = torch.Generator(args.device).manual_seed(seed), None
    model = Model(VARIANTS[name]).to(args.device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=RATE, weight_decay=0.01, capturable=generator.device.type == "cuda"
    )
    found = torch.zeros((), device=args.device)  # in the last batches, which were never seen before
    if generator.device.type == "cuda":
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())

    def own_stream() -> AbstractContextManager:
        return nullcontext() if stream is None else torch.cuda.stream(stream)

    def step(T: int) -> None:
        tokens, asked = draw(T, max(1, args.tokens // T), generator, args.device)
        logits = model(tokens).flatten(0, 1)
        optimizer.zero_grad()
        F.cross_entropy(logits, asked.flatten()).backward()
        optimizer.step()
        found.mul_(0.9).add_((logits.argmax(-1) == asked.flatten()).sum(), alpha=0.1 / (len(tokens) * (T // 8)))

    for T in args.lengths:
        take, what = partial(step, T), f"{name}, seed {seed}, {T} tokens"
        with own_stream():
            found.zero_()
            take = take if stream is None else captured(take, generator, stream)
        most, taken, share = args.steps * (1 + (T == args.lengths[-1])), 0, 0.0
        with tqdm(total=most, desc=what, leave=False, disable=stream is not None) as bar:
            while taken < most and share < FOUND:
                with own_stream():
                    for _ in range(min(LOOK, most - taken)):
                        take()
                        bar.update()
                yield
                with own_stream():
                    share = found.item()
                taken += LOOK
                bar.set_postfix_str(f"found {share:.2f}")
        if stream is not None:  # where bars would overwrite one another
            print(f"{what}: found {share:.2f} after {min(taken, most)} steps", file=sys.stderr, flush=True)
        shares.append(share)


def main(argv: list[str] | None = None) -> None:
    """Train every variant with every seed, and print the recall of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="multiples of 8 tokens")
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=SHOWN, metavar="NAME", help=", ".join(VARIANTS)
    )
    parser.add_argument("--steps", type=int, default=600, help="at most, of each length; of the last twice as many")
    parser.add_argument("--tokens", type=int, default=32768, help="of a batch")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="also write the shares to this file")
    args = parser.parse_args(argv)
    wrong = [T for T in args.lengths if T % 8 or not 8 <= T <= 8 * SYMBOLS]
    if wrong:
        parser.error(f"--lengths has to be multiples of 8 up to {8 * SYMBOLS}, got {wrong[0]}")
    shares: dict[str, list[list[float]]] = {name: [[] for _ in range(args.seeds)] for name in args.variants}
    models = [learn(name, seed, args, own) for name, seeds in shares.items() for seed, own in enumerate(seeds)]
    try:
        for together in [[model] for model in models] if torch.device(args.device).type == "cpu" else [models]:
            while together:
                together = [model for model in together if next(model, models) is None]
    except KeyboardInterrupt:
        print("interrupted; what was trained:")
    rows = [
        [name, seed, *(f"{share:.2f}" for share in own), *[""] * (len(args.lengths) - len(own))]
        for name, seeds in shares.items()
        for seed, own in enumerate(seeds)
    ]
    print(markdown(["attention", "seed", *(f"{T:,} tokens" for T in args.lengths)], rows, left=1))
    if args.json:
        args.json.write_text(json.dumps(dict(lengths=args.lengths, shares=shares), indent=1) + "\n")


if __name__ == "__main__":
    main()
