"""Times of a sparse attention layer of MiniMax-M3 at its real sizes: on `nsa`, as transformers has it, and dense.

    python benchmarks/minimax_layer.py [--seqlen 8192 32768 262144] [--json FILE]

bf16, B 1, width 6,144, 64 query heads and 4 key/value heads of 128, an index of 128 dimensions with one key, 16 blocks
of 128, random weights, hidden states that change slowly along the sequence; projections, norms and rotations included.
"nsa" is the layer by `use_nsa_kernels`, "sdpa" transformers' own, whose mask is [heads, T, T], "dense" transformers'
without an index, on the fork's causal kernel. Milliseconds of forward alone, and of forward and backward: medians of
CUDA-event timings after a warm-up, interleaved; dense attention of 131,072 tokens and more is timed once. GiB are a
step's peak beyond weights and input; "differs" is the norm of the difference to the output of "sdpa", over its norm.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import torch
from tabulate import tabulate
from torch import nn
from transformers import AttentionInterface
from transformers.models.minimax_m3_vl import MiniMaxM3VLTextConfig, modeling_minimax_m3_vl

from nsa_layer.integrations.hf import use_nsa_kernels
from nsa_tools.measure.peak_memory import is_out_of_memory, peak_bytes
from nsa_tools.measure.timed_calls import BOTH, FORWARD, dense_attention
from nsa_tools.measure.timing import milliseconds
from nsa_tools.shape import SMOOTH, smooth_

Tensor = torch.Tensor
KINDS = {"nsa": "minimax_m3_sparse", "sdpa": "minimax_m3_sparse", "dense": "full_attention"}
ONCE = 1 << 17  # tokens from which dense attention takes seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, nargs="+", default=[8192, 32768, 262144])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write every timing")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("minimax_layer.py measures on a GPU, and PyTorch finds none")
    layers, rows = {name: layer(name, "cuda", torch.bfloat16) for name in KINDS}, []
    for T in args.seqlen:
        rows += measure(T, layers, args.repeats)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1) + "\n")
    shown = [row | {way: row[way] and statistics.median(row[way]) for way in (FORWARD, BOTH)} for row in rows]
    print(torch.cuda.get_device_name(), tabulate(shown, headers="keys", tablefmt="pipe", floatfmt=",.4g"), sep="\n\n")


def layer(name: str, device: str, dtype: torch.dtype, **sizes: int) -> nn.Module:
    """A layer without its norm; those of all names have the same weights."""
    dense = dense_attention(device, {})

    def attend(module: nn.Module, *qkv: Tensor, **_: object) -> tuple[Tensor, None]:
        return dense(*(x.transpose(1, 2) for x in qkv[:3])), None

    AttentionInterface.register("fork", attend)
    sizes = dict(layer_types=[KINDS[name]], partial_rotary_factor=0.5) | sizes
    config = MiniMaxM3VLTextConfig(num_hidden_layers=1, **sizes)
    config._attn_implementation = "fork" if name == "dense" else "sdpa"
    torch.manual_seed(0)
    with torch.device(device):
        layer = modeling_minimax_m3_vl.MiniMaxM3VLAttention(config, 0).to(dtype)
        layer.rotary = modeling_minimax_m3_vl.MiniMaxM3VLRotaryEmbedding(config)
    return use_nsa_kernels(layer) if name == "nsa" else layer


def measure(T: int, layers: dict[str, nn.Module], repeats: int) -> list[dict]:
    """A row for each layer of this length; None for what does not fit the memory."""
    weight = layers["nsa"].q_proj.weight
    device, options = weight.device.type, dict(device=weight.device, dtype=weight.dtype)
    x = torch.randn(1, T, weight.shape[1], **options)
    smooth_(x.unsqueeze(-2), *SMOOTH["q"], torch.Generator(device).manual_seed(0))
    do, angles = torch.randn_like(x), layers["nsa"].rotary(x, torch.arange(T, device=device)[None])
    calls = {(name, way): call_of(layers[name], x, angles, do, way) for name, way in product(layers, (FORWARD, BOTH))}
    call_of(layers["dense"], x[:, :1024], [y[:, :1024] for y in angles], do[:, :1024], BOTH)()  # compiles its kernels
    found, peaks, lacking = defaultdict(list), {}, set()
    for repeat in range(1 + repeats):
        for name, way in product(layers, (FORWARD, BOTH)):
            once = name == "dense" and T >= ONCE
            if name in lacking or (once and repeat != 1):
                continue
            if (timing := timed(calls[name, way], device)) is None:
                lacking.add(name)
            elif repeat:
                found[name, way].append(timing[0])
                peaks[name] = timing[1]
    outputs = {name: calls[name, FORWARD]() for name in ("nsa", "sdpa") if name not in lacking}
    if differs := len(outputs) == 2:
        differs = ((outputs["nsa"] - outputs["sdpa"]).norm() / outputs["sdpa"].norm()).item()
    of_nsa = dict(nsa=differs or None)
    return [
        dict(T=T, layer=name, differs=of_nsa.get(name), GiB=peaks.get(name))
        | {way: None if name in lacking else found[name, way] for way in (FORWARD, BOTH)}
        for name in layers
    ]


def call_of(layer: nn.Module, x: Tensor, angles: Sequence[Tensor], do: Tensor, way: str) -> Callable[[], Tensor]:
    """A call of a layer, with gradients of x and of all weights that have one; returns the output."""

    def forward() -> Tensor:
        with torch.no_grad():
            return layer(x, angles, None)[0]

    leaf = x.detach().requires_grad_()

    def both() -> Tensor:
        o = layer(leaf, angles, None)[0]
        torch.autograd.grad(o, [leaf, *layer.parameters()], do, allow_unused=True)
        return o

    return forward if way == FORWARD else both


def timed(call: Callable[[], Tensor], device: str) -> tuple[float, float] | None:
    """Milliseconds and GiB, or None where the memory does not suffice."""
    taken: list[float] = []
    try:
        peak = peak_bytes(lambda: taken.append(milliseconds(call, device)), device)
        return taken[0], peak / (1 << 30)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    torch.cuda.empty_cache()
    return None


if __name__ == "__main__":
    main()
