"""Compressed-causal attention: `compress_factor` against every other way to compute it, forward and backward.

    python benchmarks/compress_factor.py [--seqlen 16384 65536] [--json FILE] [--plot FILE]

Shape: bf16, 32 query heads, 8 key/value heads, D 128; T queries over T / factor keys, key j visible to query t iff
j * factor + offset <= t. Medians of CUDA-event timings after a warm-up, the host's part hidden;
inputs rotate past the L2; variants are interleaved. cuDNN's flex attention takes part where it is installed
(`pip install nvidia-cudnn-frontend`, 1.32 or newer).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from tabulate import tabulate

from nsa_tools.measure.timing import Call, interleaved, rotating, sets_past_l2

HQ, HKV, D = 32, 8, 128
LENGTHS = [4096, 16384, 65536, 262144, 1048576]
CUDNN = "cuDNN flex"
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, nargs="+", default=LENGTHS, help="query tokens")
    parser.add_argument("--factor", type=int, default=64)
    parser.add_argument("--offset", type=int, help="default: factor - 1")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", nargs="+", help="variants to run (default: all that are there)")
    parser.add_argument("--json", type=Path, help="write every timing, in milliseconds")
    parser.add_argument("--plot", type=Path, help="write a PNG")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("compress_factor.py measures on a GPU, and PyTorch finds none")
    offset = given.factor - 1 if given.offset is None else given.offset
    results = {}
    rate = dense_rate()
    for T in given.seqlen:
        calls = dict(variants(T, given.factor, offset, only=given.only))
        repeats = given.repeats if T < 1 << 20 else 3
        timings = interleaved(calls, repeats=repeats, device="cuda", label=f"T={T:,}", hide_host=True)
        results[T] = {name: statistics.median(ms) for name, ms in timings.items()}
        results[T] |= {f"floor, {way}": flops(T, given.factor, offset, way) / rate[way] / 1e9 for way in rate}
        if given.json:
            given.json.write_text(json.dumps(results, indent=1) + "\n")
    for way in ("forward", "backward"):
        print(f"\n{way}, ms (times the floor)\n\n{table(results, way)}")
    if given.plot:
        plot(results, given.plot)


def table(results: dict[int, dict[str, float]], way: str) -> str:
    """A row a length; the floor is the visible pairs' arithmetic at the dense causal kernel's own rate."""
    names = list(dict.fromkeys(name for row in results.values() for name in row if name.endswith(way)))
    rows = []
    for T, row in results.items():
        floor = row[f"floor, {way}"]
        rows.append([f"{T:,}", *(f"{row[n]:.3f} ({row[n] / floor:.2f})" if n in row else "-" for n in names)])
    return tabulate(rows, ["T", *(n.removesuffix(f", {way}") for n in names)], tablefmt="pipe", disable_numparse=True)


def flops(T: int, factor: int, offset: int, way: str) -> float:
    """FLOP of the visible pairs alone: two products forward, five backward."""
    keys = T // factor
    t = torch.arange(T, dtype=torch.float64)
    visible = ((t - offset) / factor).floor().add(1).clamp(0, keys).sum().item()
    return visible * HQ * D * 2 * (2 if way == "forward" else 5)


def dense_rate(T: int = 16384) -> dict[str, float]:
    """FLOP/s, in TFLOP/s, of the dense causal kernel."""
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    q, k, v = inputs(T, T)
    o, lse, *_ = _flash_attn_fwd(q, k, v, causal=True, return_lse=True)
    do = torch.randn_like(q)
    calls: dict[str, Call] = {
        "forward": lambda: _flash_attn_fwd(q, k, v, causal=True),
        "backward": lambda: _flash_attn_bwd(q, k, v, o, do, lse, causal=True),
    }
    timings = interleaved(calls, repeats=7, device="cuda", label="dense", hide_host=True)
    return {way: flops(T, 1, 0, way) / statistics.median(ms) / 1e9 for way, ms in timings.items()}


def inputs(T: int, keys: int) -> Inputs:
    """q [1, T, Hq, D], k and v [1, keys, Hkv, D]."""
    shapes = ((1, T, HQ, D), (1, keys, HKV, D), (1, keys, HKV, D))
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    return q, k, v


def variants(T: int, factor: int, offset: int, *, only: list[str] | None) -> Iterator[tuple[str, Call]]:
    """(name, call) pairs: forward and backward of each way, every call on the next of the rotating inputs."""
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    keys = T // factor
    sets = [inputs(T, keys) for _ in range(sets_past_l2(T * HQ * D * 2))]
    do = torch.randn_like(sets[0][0])
    for name, (forward, backward) in ways(T, keys, factor, offset).items():
        if only and name not in only:
            continue
        yield f"{name}, forward", rotating([partial(_flash_attn_fwd, *qkv, **forward) for qkv in sets])
        calls = []
        for q, k, v in sets:
            o, lse, *_ = _flash_attn_fwd(q, k, v, return_lse=True, **forward)
            calls.append(partial(_flash_attn_bwd, q, k, v, o, do, lse, **backward))
        yield f"{name}, backward", rotating(calls)
    if not only or CUDNN in only:
        yield from cudnn_flex(sets, do, factor, offset)


def ways(T: int, keys: int, factor: int, offset: int) -> dict[str, tuple[dict, dict]]:
    """The options of forward and of backward for each way that the fork's own kernels offer."""
    native = dict(causal=True, compress_factor=factor, compress_offset=offset)
    mask = dict(mask_mod=mask_mod(factor, offset))
    sparse = block_lists(T, keys, factor, offset)
    return {
        "compress_factor": (native, native),
        "mask_mod": (mask, mask),
        "block sparse": (mask | dict(block_sparse_tensors=sparse[0]), mask | dict(block_sparse_tensors=sparse[1])),
        "not causal": ({}, {}),
    }


def cudnn_flex(sets: list[Inputs], do: torch.Tensor, factor: int, offset: int) -> Iterator[tuple[str, Call]]:
    """cuDNN's attention by intervals of visible keys; its plan, as the block lists, is made ahead of time."""
    try:
        from cudnn.flex_attention import create_mask_plan, flex_attn_func
    except ImportError as error:
        print(f"{CUDNN} is left out: {error}", file=sys.stderr)
        return
    T, keys = sets[0][0].shape[1], sets[0][1].shape[1]
    t = torch.arange(T, device="cuda")
    # A query sees the keys from 0 to before this one.
    end = ((t - offset) // factor + 1).clamp(0, keys).to(torch.int32).view(1, 1, T)
    plan = create_mask_plan(end, *sets[0], build_backward=True)
    yield f"{CUDNN}, forward", rotating([partial(flex_attn_func, *qkv, mask_plan=plan) for qkv in sets])
    calls = []
    for qkv in sets:
        leaves = [x.detach().requires_grad_() for x in qkv]
        o = flex_attn_func(*leaves, mask_plan=plan)
        calls.append(partial(torch.autograd.grad, o, leaves, do, retain_graph=True))
    yield f"{CUDNN}, backward", rotating(calls)


def block_lists(T: int, keys: int, factor: int, offset: int) -> tuple:
    """Block-sparse lists of 128x128 tiles for forward and backward, made ahead of time."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    query = torch.arange(-(-T // 128), device="cuda").view(-1, 1) * 128
    key = torch.arange(-(-keys // 128), device="cuda") * 128
    seen = key * factor + offset <= (query + 127).clamp(max=T - 1)
    full = ((key + 127) * factor + offset <= query) & (key + 128 <= keys)

    def lists(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Where a row holds a tile its number sorts first, ascending.
        index = torch.where(table, torch.arange(table.shape[1], device="cuda"), table.shape[1]).sort(1).values
        index = index.clamp(max=table.shape[1] - 1).to(torch.int32)
        return table.sum(1, dtype=torch.int32)[None, None], index[None, None].contiguous()

    def tensors(partial: torch.Tensor, whole: torch.Tensor) -> BlockSparseTensorsTorch:
        return BlockSparseTensorsTorch(*lists(partial), *lists(whole), block_size=(128, 128))

    return tensors(seen & ~full, full), tensors((seen & ~full).mT, full.mT)


def mask_mod(factor: int, offset: int) -> Callable:
    """Key j is visible to query t iff ``j * factor + offset <= t``."""
    import cutlass.cute as cute

    @cute.jit
    def mask(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
        return kv_idx * factor + offset <= q_idx

    return mask


def plot(results: dict[int, dict[str, float]], path: Path) -> None:
    """Time over the floor by length, forward and backward beside one another."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, constrained_layout=True)
    for ax, way in zip(axes, ("forward", "backward")):
        names = dict.fromkeys(
            n for row in results.values() for n in row if n.endswith(way) and not n.startswith("floor")
        )
        for name in names:
            points = [(T, row[name] / row[f"floor, {way}"]) for T, row in results.items() if name in row]
            ax.plot(*zip(*points), marker="o", label=name.removesuffix(f", {way}"))
        ax.set(title=way, xlabel="query tokens", xscale="log", yscale="log")
        ax.set_xticks(list(results), [f"{2 ** round(math.log2(T)) >> 10}K" for T in results])
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("time over the arithmetic floor")
    axes[1].legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
