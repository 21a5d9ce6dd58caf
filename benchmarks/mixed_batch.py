"""A step of a server, one sequence's chunk of a prompt and a token of each other one: by two calls, and by one.

    python benchmarks/mixed_batch.py [--seqlen 16384] [--sequences 64] [--chunk 2048] [--rule index] [--json FILE]

bf16, 32 query heads, 8 key/value heads, D 128, the default configuration, gated, or the selected branch by an index.
Caches are pages in a random order, full but for the step's tokens. Microseconds, medians of replays of CUDA graphs,
variants interleaved. First, the outputs of one call and of two are compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from nsa_layer import NSAConfig, nsa_with_kvcache
from nsa_layer.checks import starts_of_lengths
from nsa_tools.measure.timing import captured, interleaved
from nsa_tools.report.tables import markdown

HQ, HKV, D, INDEX_DIM = 32, 8, 128, 32
PAGES = (16, "NHD"), (64, "NHD"), (64, "HND"), (256, "NHD")
Tensor = torch.Tensor


def caches(pages: int, page: int, layout: str, config: NSAConfig) -> dict[str, Tensor]:
    """Full caches of so many pages."""
    rows = dict(k=(page, HKV, D), v=(page, HKV, D))
    if config.rule == "index":
        rows["k_index"] = (page, HKV, INDEX_DIM)
    else:
        rows |= dict.fromkeys(("k_cmp", "v_cmp"), (max(1, page // config.stride), HKV, D))
    full = {}
    for name, (slots, heads, dim) in rows.items():
        x = torch.randn(pages, heads, slots, dim, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
        full[f"{name}_cache"] = x if layout == "HND" else x.contiguous()
    return full


def variants(page: int, layout: str, config: NSAConfig, args: argparse.Namespace) -> dict[str, Callable[[], object]]:
    """Calls by name; sequence 0 has the chunk."""
    draw, width = partial(torch.randn, dtype=torch.bfloat16, device="cuda"), args.seqlen // page
    counts, every = [args.chunk, *[1] * (args.sequences - 1)], max(1, config.stride // page)
    table = torch.randperm(args.sequences * width, device="cuda").int().view(args.sequences, width)
    by_sequence = dict(page_table=table, cache_seqlens=torch.tensor([args.seqlen - n for n in counts]).int().cuda())
    rows = dict(q=(HQ, D), k=(HKV, D), v=(HKV, D))
    if config.rule == "index":
        rows |= dict(q_index=(HKV, INDEX_DIM), k_index=(HKV, INDEX_DIM))
    else:  # compressed keys lie with their last tokens
        by_sequence["cmp_page_table"] = table[:, every - 1 :: every].contiguous()
    new = {name: draw(sum(counts), *row) for name, row in rows.items()}
    fixed = caches(table.numel(), page, layout, config) | dict(config=config)
    if config.num_branches > 1:
        fixed["gate_weight"] = draw(HQ, config.num_branches, D) * D**-0.5
    chunk = {name: x[: args.chunk].unsqueeze(0) for name, x in new.items()}
    tokens = {name: x[args.chunk :].unsqueeze(1) for name, x in new.items()}
    first, others = ({name: x[part] for name, x in by_sequence.items()} for part in (slice(0, 1), slice(1, None)))
    calls = {
        "decode": lambda: nsa_with_kvcache(**tokens, **others, **fixed).flatten(0, 1),
        "chunk": lambda: nsa_with_kvcache(**chunk, **first, **fixed).flatten(0, 1),
        "one call": lambda: nsa_with_kvcache(**new, **by_sequence, **fixed, cu_seqlens_q=starts_of_lengths(counts)),
    }
    return calls | {"two calls": lambda: torch.cat((calls["chunk"](), calls["decode"]()))}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, default=16384, help="tokens of each sequence, a multiple of 256")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=2048, help="new tokens of one of them")
    parser.add_argument("--rule", choices=("nsa", "index"), default="nsa")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("mixed_batch.py measures on a GPU, and PyTorch finds none")
    config = NSAConfig(rule="index", branches=("selected",)) if args.rule == "index" else NSAConfig()
    names, rows = ("decode", "chunk", "two calls", "one call"), []
    for page, layout in PAGES:
        calls = variants(page, layout, config, args)
        one, two = (calls[name]().float() for name in ("one call", "two calls"))
        difference = ((one - two).norm() / two.norm()).item()
        graphs = {name: captured(calls[name], warm_ups=2) for name in names}
        timings = interleaved(graphs, repeats=args.repeats, device="cuda", label=f"{page}, {layout}")
        us = {name: statistics.median(each) * 1e3 for name, each in timings.items()}
        rows.append(dict(page=page, layout=layout, difference=difference) | us)
        del calls, graphs
    cells = [[row["page"], row["layout"], *(f"{row[name]:.1f}" for name in names)] for row in rows]
    print(markdown(["page", "layout", *names], cells, left=2))
    print(f"largest difference of one call from two, of its norm: {max(row['difference'] for row in rows):.2g}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
