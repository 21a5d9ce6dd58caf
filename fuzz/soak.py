"""`python -m fuzz soak`: training steps of the layer with changing shapes, and whether memory stays where it is.

After a warm-up, host and GPU memory may grow by less than 1 MiB a minute, and no parameter or loss may become NaN.
Steps of every kind come first, so that kernels are compiled early. Exit codes: 0 all of it held; 1 some did not; 2 too
few steps ran to say, or it was interrupted.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import random
import sys
import time
from collections.abc import Sequence
from itertools import combinations, product
from typing import NamedTuple

import torch
from torch import nn
from tqdm import tqdm

from nsa_layer import NSAConfig, NSAttention
from nsa_layer.rope import RotaryEmbedding
from nsa_tools.report.tables import markdown

MIB = 1 << 20
MOST_GROWTH = 1.0  # MiB a minute
WARM_UP = 0.4  # of the time
LEAST_SAMPLES = 8
INTERRUPTED = "interrupted"


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
    slopes = sorted((getattr(b, name) - getattr(a, name)) / (b.at - a.at) * 60 for a, b in pairs)
    return slopes[len(slopes) // 2] if slopes else 0.0


def first_steps(layers: int, longest: int) -> list[tuple[int, int, int]]:
    """Steps of every kind: layer, tokens, batch, 0 for a pack. What is compiled or loaded once is so early."""
    return list(product(range(layers), (longest >> i for i in range(longest.bit_length())), (0, 1, 2)))


class Trainer:
    """Layers of a few configurations, each with an optimizer, and steps of drawn shapes."""

    def __init__(self, device: str, seed: int) -> None:
        self.device, self.draw, cuda = device, random.Random(seed), device == "cuda"
        self.dtype, self.longest = (torch.bfloat16, 4096) if cuda else (torch.float32, 200)
        torch.manual_seed(seed)
        width, D, size = (512, 64, 64) if cuda else (32, 8, 8)
        base = NSAConfig(block_size=size, block_counts=6, window_size=3 * size)
        # On a GPU only Hopper's kernels have a deterministic backward of such tiles.
        exact = not cuda or torch.cuda.get_device_capability()[0] == 9
        forced = dict(init_blocks=0, local_blocks=0)
        configs = (base, base.replace(q_tile=2 * size, deterministic=exact), base.replace(**forced))
        heads = dict(num_heads=width // D, num_kv_heads=width // D // 4 or 1)
        options = heads | dict(compression="linear", rope=RotaryEmbedding(D), device=device, dtype=self.dtype)
        self.layers = [NSAttention(width, config=config, **options) for config in configs]
        self.optimizers = [torch.optim.AdamW(layer.parameters(), lr=1e-3) for layer in self.layers]
        self._first = iter(first_steps(len(self.layers), self.longest))

    def step(self) -> float:
        which, T, batch = next(self._first, None) or self._drawn()
        layer, optimizer, starts = self.layers[which], self.optimizers[which], None
        if not batch:
            cuts = sorted(self.draw.randint(0, T) for _ in range(self.draw.randint(0, 5)))
            starts = torch.tensor([0, *cuts, T], dtype=torch.int32, device=self.device)
        x = torch.randn(*((batch, T) if batch else (T,)), layer.dim, device=self.device, dtype=self.dtype)
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.mse_loss(layer(x, cu_seqlens=starts).float(), x.roll(1, -2).float())
        loss.backward()
        optimizer.step()
        value = float(loss.detach())
        if value != value or any(bool(p.isnan().any()) for p in layer.parameters()):
            raise FloatingPointError(f"NaN after a step with shape {tuple(x.shape)}, cu_seqlens {starts}")
        return value

    def _drawn(self) -> tuple[int, int, int]:
        """A layer's number, tokens, and the batch: 0 for a pack."""
        T = self.draw.choice((1, self.draw.randint(1, self.longest), self.longest))
        return self.draw.randrange(len(self.layers)), T, 0 if self.draw.random() < 0.4 else self.draw.randint(1, 2)


def soak(minutes: float, device: str, seed: int) -> tuple[int, list[Sample], str]:
    """Train for so long: steps, samples, and what went wrong on the way."""
    trainer, started, samples, steps = Trainer(device, seed), time.monotonic(), [], 0
    end, every = minutes * 60, max(1.0, minutes * 60 / 120)
    with tqdm(total=round(end), desc="soak", unit="s", file=sys.stderr, mininterval=1) as bar:
        while (now := time.monotonic() - started) < end:
            try:
                loss = trainer.step()
            except (FloatingPointError, KeyboardInterrupt) as error:
                return steps, samples, str(error) or INTERRUPTED
            steps += 1
            if not samples or now - samples[-1].at >= every:
                samples.append(take_sample(started, device))
                bar.set_postfix(steps=steps, loss=f"{loss:.3f}", host=f"{samples[-1].host:.0f} MiB")
                bar.update(min(round(now), round(end)) - bar.n)
    return steps, samples, ""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    steps, samples, wrong = soak(options.minutes, options.device, options.seed)
    seconds = options.minutes * 60
    settled = [sample for sample in samples if sample.at >= WARM_UP * seconds]
    rows = [[f"{s.at:.0f}", *(f"{x:.1f}" for x in s[1:])] for s in samples[:: max(1, len(samples) // 12)]]
    print(markdown(["s", "host, MiB", "GPU live, MiB", "GPU reserved, MiB"], rows))
    if wrong and wrong != INTERRUPTED:
        print(wrong)
        return 1
    if len(settled) < LEAST_SAMPLES:
        print(f"{steps} steps, {len(settled)} samples after the warm-up: too few to say")
        return 2
    grown = {name: growth(settled, name) for name in Sample._fields[1:]}
    said = ", ".join(f"{name} {value:+.2f}" for name, value in grown.items())
    print(f"{steps} steps; growth after the warm-up, MiB a minute: {said}")
    if wrong:
        print(f"{wrong} after {samples[-1].at:.0f} of {seconds:.0f} s")
        return 2
    return 1 if max(grown.values()) >= MOST_GROWTH else 0
