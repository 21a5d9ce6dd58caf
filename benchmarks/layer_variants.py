"""The layer and its attention beside themselves, interleaved: compiled and not, by tile, deterministic and not.

    python benchmarks/layer_variants.py compiled [--seqlen 8192 65536]
    python benchmarks/layer_variants.py tiles [--seqlen 65536] [--q-tile 1 32 128]
    python benchmarks/layer_variants.py tiles --device cpu
    python benchmarks/layer_variants.py deterministic [--seqlen 65536] [--heads 32/8 64/4]
    python benchmarks/layer_variants.py attention [--seqlen 16384 65536] [--heads 32/8 64/4]

bf16, heads of 128, forward and backward, medians of CUDA-event timings after a warm-up, milliseconds. "compiled":
`NSAttention` of width 4,096 with 32/8 heads, by `torch.compile` and not, alone and in a block of norm, layer, norm,
mlp: one step that finds an idle GPU; a step of several in a row, as in training; and the host's part of one. "tiles"
and "deterministic": `nsa`, gated, of smooth inputs; on a CPU in plain PyTorch, of the demo's sizes, by one thread.
"attention": backward of `flash_attn_func` alone, deterministic and not, the host's part hidden.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import torch
from tabulate import tabulate
from torch import nn
from tqdm import tqdm

from nsa_layer import NSAConfig, NSAttention
from nsa_tools.demo.demo_config import DemoConfig
from nsa_tools.measure.timed_calls import BACKWARD, BOTH, FORWARD, Timer, step_of
from nsa_tools.measure.timing import interleaved
from nsa_tools.shape import Shape

DIM, HEADS = 4096, dict(num_heads=32, num_kv_heads=8)
MODES = ("default", "reduce-overhead")
ROW = 5  # steps
SIZES = dict(B=1, Hq=32, Hkv=8, D=128, Dv=128, dtype=torch.bfloat16, device="cuda")
SEQLEN = {"compiled": [8192, 65536], "tiles": [65536], "deterministic": [65536], "attention": [65536]}
MASKS = {
    "compressed": dict(compress_factor=64, compress_offset=63),
    "window 512": dict(window_size=(511, 0)),
    "window 2,048": dict(window_size=(2047, 0)),
    "causal": {},
}
TILES = [1, 2, 4, 8, 16, 32, 64, 128, 256]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=tuple(SEQLEN))
    parser.add_argument("--seqlen", type=int, nargs="+", help="tokens")
    parser.add_argument("--q-tile", type=int, nargs="+")
    parser.add_argument("--heads", nargs="+", default=["32/8"], help="of queries / of keys and values")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)
        sizes, config, lengths = sizes_of_demo()
        if args.what != "tiles":
            parser.error("--device cpu is for tiles")
    else:
        sizes, config, lengths = SIZES, NSAConfig(), SEQLEN[args.what]
        if not torch.cuda.is_available():
            sys.exit("layer_variants.py measures on a GPU, and PyTorch finds none")
    if args.what == "tiles":
        configs = {q_tile: config.replace(q_tile=q_tile) for q_tile in args.q_tile or TILES}
    else:
        configs = {str(flag): config.replace(deterministic=flag) for flag in (False, True)}
    rows = []
    for T in args.seqlen or lengths:
        if args.what == "compiled":
            rows += compiled(T, args.repeats)
            continue
        for heads in args.heads if args.device == "cuda" else [f"{sizes['Hq']}/{sizes['Hkv']}"]:
            Hq, Hkv = map(int, heads.split("/"))
            if args.what == "attention":
                rows += attention(T, args.repeats, Hq, Hkv)
                continue
            rows += in_turns(T, args.repeats, configs, sizes | dict(Hq=Hq, Hkv=Hkv))
    print(tabulate(rows, headers="keys", tablefmt="pipe"))


class Block(nn.Module):
    """A transformer's: norm, layer, norm, mlp."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(DIM) for _ in range(2))
        self.layer = NSAttention(DIM, **HEADS)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.SiLU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.layer(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


def compiled(T: int, repeats: int) -> list[dict[str, object]]:
    """Rows of a length: the layer and the block, not compiled and compiled in each mode."""
    torch.manual_seed(0)
    rows = []
    for name, make in (("layer", partial(NSAttention, DIM, **HEADS)), ("block", Block)):
        with torch.device("cuda"):
            module = make().bfloat16()
        calls = {"not compiled": module}
        calls |= {mode: torch.compile(module, fullgraph=True, mode=mode) for mode in MODES}
        steps = {mode: training_step(call, module, T) for mode, call in calls.items()}
        calls = steps | {(mode, "row"): partial(in_a_row, step) for mode, step in steps.items()}
        timings = interleaved(calls, repeats=repeats, device="cuda", label=f"{name}, {T:,} tokens")
        for mode, step in steps.items():
            one, row = (statistics.median(timings[key]) for key in (mode, (mode, "row")))
            found = {"one step": one, "in a row": row / ROW, "host": host_milliseconds(step, repeats)}
            rows.append({"T": f"{T:,}", "of": name, "mode": mode} | {key: round(ms, 2) for key, ms in found.items()})
    return rows


def training_step(call: Callable, module: nn.Module, T: int) -> Callable[[], None]:
    """Forward and backward of an output with a gradient that is given."""
    x = torch.randn(1, T, DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    do = torch.randn_like(x)

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        torch.autograd.grad(call(x), [x, *module.parameters()], do)

    return step


def in_a_row(step: Callable[[], None]) -> None:
    for _ in range(ROW):
        step()


def host_milliseconds(step: Callable[[], None], repeats: int) -> float:
    """Median time of a step that the GPU is not waited for."""
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        found.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(found)


def attention(T: int, repeats: int, Hq: int, Hkv: int) -> list[dict[str, object]]:
    """A row a mask: backward alone, deterministic and not."""
    from flash_attn.cute import flash_attn_func

    rows = []
    for mask, options in MASKS.items():
        Tk = T // options.get("compress_factor", 1)
        sizes = ((T, Hq), (Tk, Hkv), (Tk, Hkv), (T, Hq))
        *qkv, do = (torch.randn(1, *size, 128, device="cuda", dtype=torch.bfloat16) for size in sizes)
        leaves, calls = [x.requires_grad_() for x in qkv], {}
        for flag in (False, True):
            o = flash_attn_func(*leaves, causal=True, deterministic=flag, **options)[0]
            calls[str(flag)] = partial(torch.autograd.grad, o, leaves, do, retain_graph=True)
        timings = interleaved(calls, repeats=repeats, device="cuda", label=f"{mask}, {T:,} tokens", hide_host=True)
        medians = {name: round(statistics.median(ms), 3) for name, ms in timings.items()}
        rows.append({"heads": f"{Hq}/{Hkv}", "T": f"{T:,}", "": mask} | medians)
    return rows


def sizes_of_demo() -> tuple[dict[str, object], NSAConfig, list[int]]:
    """Those of a call in the demo on a CPU: of its tensors, of blocks and window, and the length."""
    demo = DemoConfig.for_device("cpu")
    D, dtype = demo.dim // demo.heads, getattr(torch, demo.dtype)
    sizes = dict(B=demo.batch, Hq=demo.heads, Hkv=demo.kv_heads, D=D, Dv=D, dtype=dtype, device="cpu")
    return sizes, demo.nsa(), [demo.seqlen]


def in_turns(
    T: int, repeats: int, configs: dict[object, NSAConfig], sizes: dict[str, object]
) -> list[dict[str, object]]:
    """A row a direction, of all configurations."""
    steps, found, device = {}, defaultdict(list), sizes["device"]
    for name, config in configs.items():
        shape = Shape(**sizes, T=T, config=config, data="smooth")
        backend = "cute" if device == "cuda" else "eager"
        steps[name] = Timer(step_of(shape, backend), (FORWARD, BACKWARD, BOTH))
    for turn in tqdm(range(2 + repeats), desc=f"{T:,} tokens", leave=False):
        for name, step in steps.items():
            for direction, ms in step.take(device).items():
                found[direction, name] += [ms] * (turn >= 2)
    of = {"heads": f"{sizes['Hq']}/{sizes['Hkv']}", "T": f"{T:,}"}
    return [
        of | {"": direction} | {name: round(statistics.median(found[direction, name]), 2) for name in steps}
        for direction in (FORWARD, BACKWARD, BOTH)
    ]


if __name__ == "__main__":
    main()
