"""`python -m fuzz soak`: training steps of the layer with changing shapes, and whether memory stays where it is.

After a warm-up, host and GPU memory may grow by less than 1 MiB a minute, and no parameter or loss may become NaN.
Steps of every kind come first, so that kernels are compiled early. Exit codes: 0 all of it held; 1 some did not; 2 too
few steps ran to say.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from statistics import median
from typing import NamedTuple

import torch
from torch import nn
from tqdm import tqdm

from nsa_layer import NSAConfig, NSAttention
from nsa_layer.rope import RotaryEmbedding

MIB = 1 << 20
MOST_GROWTH = 1.0  # MiB a minute
WARM_UP = 0.4  # of the time
LEAST_SAMPLES = 8


class Sample(NamedTuple):
    """Seconds since the start; MiB of the process, of live and of reserved GPU memory."""

    at: float
    host: float
    live: float = 0.0
    reserved: float = 0.0


def take_sample(started: float, device: str) -> Sample:
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)  # what the allocator keeps for itself is no leak
    with open("/proc/self/statm", encoding="ascii") as file:
        host = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB
    if device == "cpu":
        return Sample(time.monotonic() - started, host)
    torch.cuda.synchronize()
    on_gpu = (torch.cuda.memory_allocated() / MIB, torch.cuda.memory_reserved() / MIB)
    return Sample(time.monotonic() - started, host, *on_gpu)


def growth(samples: Sequence[Sample], name: str) -> float:
    """MiB a minute: the median of all slopes, which no single peak moves."""
    pairs = [(a, b) for a, b in combinations(samples, 2) if b.at > a.at]
    return median([(getattr(b, name) - getattr(a, name)) / (b.at - a.at) * 60 for a, b in pairs] or [0.0])


def shapes(layers: int, longest: int, draw: random.Random) -> Iterator[tuple[int, int, int]]:
    """Layer, tokens and batch, 0 for a pack, of each step. Every kind comes first: what is compiled or loaded once, is
    so early."""
    yield from product(range(layers), (longest >> i for i in range(longest.bit_length())), (0, 1, 2))
    while True:
        T = draw.choice((1, draw.randint(1, longest), longest))
        yield draw.randrange(layers), T, 0 if draw.random() < 0.4 else draw.randint(1, 2)


def train(device: str, seed: int = 0) -> Iterator[float]:
    """Loss of each training step, of layers of a few configurations; FloatingPointError once anything is NaN."""
    draw, cuda = random.Random(seed), device == "cuda"
    dtype, longest = (torch.bfloat16, 4096) if cuda else (torch.float32, 200)
    torch.manual_seed(seed)
    width, D, size = (512, 64, 64) if cuda else (32, 8, 8)
    base = NSAConfig(block_size=size, block_counts=6, window_size=3 * size)
    # On a GPU only Hopper's kernels have a deterministic backward of such tiles.
    exact = not cuda or torch.cuda.get_device_capability()[0] == 9
    tiled, unforced = dict(q_tile=2 * size, deterministic=exact), dict(init_blocks=0, local_blocks=0)
    heads = dict(num_heads=width // D, num_kv_heads=width // D // 4 or 1)
    options = heads | dict(compression="linear", rope=RotaryEmbedding(D), device=device, dtype=dtype)
    layers = [NSAttention(width, config=base.replace(**own), **options) for own in ({}, tiled, unforced)]
    optimizers = [torch.optim.AdamW(layer.parameters(), lr=1e-3) for layer in layers]
    for which, T, batch in shapes(len(layers), longest, draw):
        layer, optimizer, starts = layers[which], optimizers[which], None
        if not batch:
            cuts = sorted(draw.randint(0, T) for _ in range(draw.randint(0, 5)))
            starts = torch.tensor([0, *cuts, T], dtype=torch.int32, device=device)
        x = torch.randn(*((batch, T) if batch else (T,)), width, device=device, dtype=dtype)
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.mse_loss(layer(x, cu_seqlens=starts).float(), x.roll(1, -2).float())
        loss.backward()
        optimizer.step()
        value = float(loss.detach())
        if value != value or any(bool(p.isnan().any()) for p in layer.parameters()):
            raise FloatingPointError(f"NaN after a step with shape {tuple(x.shape)}, cu_seqlens {starts}")
        yield value


def soak(minutes: float, device: str) -> list[Sample]:
    """Train for so long; about 120 samples."""
    losses, started, samples, end = train(device), time.monotonic(), [], minutes * 60
    with tqdm(total=round(end), desc="soak", unit="s", file=sys.stderr, mininterval=1) as bar:
        while (now := time.monotonic() - started) < end:
            loss = next(losses)
            if not samples or now - samples[-1].at >= max(1.0, end / 120):
                samples.append(take_sample(started, device))
                bar.set_postfix(loss=f"{loss:.3f}", host=f"{samples[-1].host:.0f} MiB")
                bar.update(min(round(now), round(end)) - bar.n)
    return samples


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    samples = soak(options.minutes, options.device)
    settled = [sample for sample in samples if sample.at >= WARM_UP * options.minutes * 60]
    if len(settled) < LEAST_SAMPLES:
        print(f"{len(settled)} samples after the warm-up: too few to say")
        return 2
    grown = {name: growth(settled, name) for name in Sample._fields[1:]}
    print("growth, MiB a minute: " + ", ".join(f"{name} {value:+.2f}" for name, value in grown.items()))
    return 1 if max(grown.values()) >= MOST_GROWTH else 0
