"""Prefill in chunks, one after the other into caches, against one call of `nsa` for the whole sequence.

    python benchmarks/chunked_prefill.py [--seqlen 262144] [--chunk 4096] [--data smooth random] [--json FILE]

bf16, batch 1, 32 query heads, 8 key/value heads, D 128, gated, the default configuration. Caches are contiguous, which
attention reads in place, or pages of 64 tokens in a random order, of which a chunk copies a part. Medians, variants
interleaved: calls as they are, the host's part in it where it takes longer than the GPU, and replays of a CUDA graph
of all chunks. First, the chunks' output is compared with the whole sequence's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from nsa_layer import NSAConfig, nsa, nsa_with_kvcache
from nsa_tools.measure.timing import captured, interleaved
from nsa_tools.report.tables import markdown
from nsa_tools.shape import DATA, Shape

PAGE = 64
Tensor = torch.Tensor


def caches(k: Tensor, v: Tensor, config: NSAConfig, *, paged: bool) -> dict[str, Tensor]:
    """Empty caches with the capacity of k and v [1, T, Hkv, D], arguments of `nsa_with_kvcache`."""
    T, stride = k.shape[1], config.stride
    leads = ((T // PAGE, PAGE), (T // PAGE, PAGE // stride)) if paged else ((1, T), (1, config.compressed_length(T)))
    found = {
        f"{name}{kind}_cache": x.new_empty(*lead, *x.shape[2:])
        for kind, lead in zip(("", "_cmp"), leads)
        for name, x in dict(k=k, v=v).items()
    }
    pages = torch.randperm(T // PAGE, device=k.device).int().unsqueeze(0)
    return found | (dict(page_table=pages, cmp_page_table=pages) if paged else {})


def in_chunks(x: dict[str, Tensor], chunk: int, config: NSAConfig, *, paged: bool) -> Callable[[], Tensor]:
    """A call that makes all chunks' calls and gives the last one's output, or writes all to ``into``."""
    kept = caches(x["k"], x["v"], config, paged=paged)
    cache_seqlens = torch.zeros(1, dtype=torch.int32, device=x["q"].device)

    def call(into: Tensor | None = None) -> Tensor:
        cache_seqlens.zero_()
        for begin in range(0, x["q"].shape[1], chunk):
            q, k, v = (x[name][:, begin : begin + chunk] for name in "qkv")
            args = dict(gate_weight=x["gate_weight"], cache_seqlens=cache_seqlens, config=config)
            o = nsa_with_kvcache(q, k=k, v=v, **kept, **args)
            if into is not None:
                into[:, begin : begin + chunk] = o
            cache_seqlens.add_(chunk)
        return o

    return call


@torch.no_grad()
def measure(data: str, args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds by variant, and the largest difference to the whole sequence's output."""
    config = NSAConfig()
    sizes = dict(B=1, T=args.seqlen, Hq=32, Hkv=8, D=128, Dv=128, dtype=torch.bfloat16)
    x = Shape(**sizes, config=config, device="cuda", data=data, backward=False).inputs()
    calls: dict[str, Callable] = {"whole": lambda: nsa(**x, config=config)}
    want, found = calls["whole"](), {}
    for name, paged in (("contiguous", False), ("pages", True)):
        calls[name] = in_chunks(x, args.chunk, config, paged=paged)
        got = torch.empty_like(want)
        calls[name](got)
        found[f"{name}, error"] = (got - want).abs().max().item()
        del got
    calls |= {f"{name}, graph": captured(call) for name, call in calls.items()}
    timings = interleaved(calls, repeats=args.repeats, device="cuda", label=data, warm_ups=1)
    return found | {name: statistics.median(times) for name, times in timings.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, default=262144, help="a multiple of the chunk")
    parser.add_argument("--chunk", type=int, default=4096, help="a multiple of 64")
    parser.add_argument("--data", nargs="+", choices=DATA, default=DATA)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args()
    if args.chunk % PAGE or args.seqlen % args.chunk:
        parser.error(f"--chunk has to be a multiple of {PAGE} that divides --seqlen, got {args.chunk}")
    if not torch.cuda.is_available():
        sys.exit("chunked_prefill.py measures on a GPU, and PyTorch finds none")
    rows, found = [], {}
    for data in args.data:
        found[data] = times = measure(data, args)
        for kind in ("", ", graph"):
            whole = times[f"whole{kind}"]
            chunks = [
                f"{times[name + kind]:.1f} ({times[name + kind] / whole:.2f}x)" for name in ("contiguous", "pages")
            ]
            rows.append([data, "replays" if kind else "calls", f"{whole:.1f}", *chunks])
    print(markdown(["data", "of", "whole, ms", "contiguous", "pages"], rows, left=2))
    errors = {
        f"{data}, {name}": times[f"{name}, error"] for data, times in found.items() for name in ("contiguous", "pages")
    }
    print(f"largest difference to the whole: {max(errors.values())}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
