"""Deterministic block-sparse backward in the model of `flash_attn.cute.list_schedule`, beside measurements.

    python benchmarks/list_schedule.py [--seqlen 16384 65536] [--json FILE]

Runs on the CPU, about a minute. Shape: 32 query heads, 8 key/value heads, D 128, blocks of 128. Numbers are times over
the default mode's, launched head by head from left to right.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from tabulate import tabulate

from flash_attn.cute.block_lists import lists_from_blocks, lists_from_window, transpose_lists
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.list_schedule import heads_in_l2, launch_rows, long_rows_first, simulate
from flash_attn.cute.write_order import Walk, deterministic_walk, merged_walk

H, GROUP, BLOCK = 32, 4, 128
TOGETHER = [1, 2, 8]
WINDOW, SELECTED, FIRST = "window 2048", "selected, 8 random", "selected, 16 with the first block"

# What runs before and after the kernel (1.0 ms at 65,536 tokens, in steps of 2.5 us) is part of measured times.
AROUND = 400 / 65536

# Measured on one H200; mask blocks and full blocks in one list, but "two lists".
CASES = [(WINDOW, 16384), (WINDOW, 65536), (SELECTED, 16384), (SELECTED, 65536)]
MEASURED = {
    "left to right, walked upwards": [3.2, 6.8, 2.9, 2.5],
    "left to right, by rising lock value": [1.14, 1.04, 1.66, 1.38],
    "right to left, walked downwards": [3.0, 6.7, 1.7, 1.4],
    "right to left, by rising lock value": [1.11, 1.04, 1.31, 1.21],
    "left to right, walked upwards, two lists": [4.9, 11.0],
    "right to left, walked upwards, two lists": [22.0, 65.0],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, nargs="+", default=[16384, 65536])
    parser.add_argument("--json", type=Path, help="write every ratio")
    given = parser.parse_args()
    results = {"measured": [], "launches": []}
    for T in given.seqlen:
        for name in (WINDOW, SELECTED, FIRST):
            lists = backward_lists(name, T)
            if name != FIRST:
                results["measured"] += [(name, T, *row) for row in beside_measurements(lists, name, T)]
            results["launches"] += [(name, T, *row) for row in launches(lists, T)]
    print(tabulate(results["measured"], ["lists", "T", "launched, walked", "model", "measured"], floatfmt=".2f"))
    print()
    heads = ["lists", "T", "mode", "launched", "of equal locks", *(f"{n} heads together" for n in TOGETHER)]
    print(tabulate(results["launches"], heads, floatfmt=".2f"))
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")


def backward_lists(name: str, T: int) -> BlockSparseTensorsTorch:
    """For all query heads; those of a group share their lists, but in `SELECTED`, which was measured so."""
    N = T // BLOCK
    if name == WINDOW:
        lists = transpose_lists(lists_from_window(T, T, 2047, 0, (BLOCK, BLOCK)), N)
        return BlockSparseTensorsTorch(*(t.expand(1, H, *t.shape[2:]) for t in lists[:4]))
    torch.manual_seed(0)
    lists_drawn = H if name == SELECTED else H // GROUP
    score = torch.rand(lists_drawn, N, N)
    if name == FIRST:
        at = torch.arange(N)
        score[:, :, 0] = score[:, at, at] = score[:, at[1:], at[:-1]] = 2.0
    score.masked_fill_(torch.ones(N, N).triu(1).bool(), -1.0)
    chosen = score.topk(8 if name == SELECTED else 16).indices
    listed = torch.zeros_like(score, dtype=torch.bool).scatter_(-1, chosen, True) & (score >= 0)
    listed = listed.repeat_interleave(H // lists_drawn, dim=0)
    return transpose_lists(lists_from_blocks(listed[None], block_size=(BLOCK, BLOCK)), N)


def beside_measurements(lists: BlockSparseTensorsTorch, name: str, T: int) -> list[tuple]:
    """(way, model, measured) for launches as they were measured: sets of heads that fit the L2."""
    N, around, rows = T // BLOCK, AROUND * T, []
    default = simulate(merged_walk(lists), range(H * N)).time + around
    for way, ratios in MEASURED.items():
        measured = dict(zip(CASES, ratios, strict=False))
        if (name, T) not in measured:
            continue
        spt = way.startswith("right")
        order = range(N)[:: -1 if spt else 1]
        walk = deterministic_walk(lists, spt=spt)
        if "walked" in way:
            walk = walked(walk, downwards="downwards" in way, mask_first="two lists" in way)
        launch = launch_rows(order, 1, H, interleave=heads_in_l2(T, 128, 128))
        took = simulate(walk, launch, group=GROUP).time + around
        rows.append((way, took / default, measured[name, T]))
    return rows


def walked(walk: Walk, *, downwards: bool, mask_first: bool) -> Walk:
    """The same entries by query block."""
    key = walk.entries.long() // 2 * (-1 if downwards else 1) + (walk.entries % 2) * (1 << 30) * mask_first
    past = torch.arange(key.shape[3]) >= walk.cnt.unsqueeze(-1)
    places = key.masked_fill(past, 1 << 40).sort(dim=-1, stable=True).indices
    return Walk(walk.cnt, walk.entries.gather(-1, places), walk.locks.gather(-1, places))


def launches(lists: BlockSparseTensorsTorch, T: int) -> list[tuple]:
    """(mode, launched, first of equal lock values, model for each of TOGETHER): the kernel's time alone."""
    N, merged = T // BLOCK, merged_walk(lists)
    default = simulate(merged, range(H * N)).time
    counts = lists.mask_block_cnt + lists.full_block_cnt if lists.full_block_cnt is not None else lists.mask_block_cnt
    rows = [("default", "long rows first", "", simulate(merged, long_rows_first(counts)).time / default)]
    upwards = list(range(N))
    orders = {"left to right": (upwards, 0), "right to left": (upwards[::-1], 0)}
    orders["first block ahead, right to left"] = ([0, *upwards[:0:-1]], 1)
    for name, (order, ahead) in orders.items():
        for descending in (True, False):
            walk = deterministic_walk(lists, order=torch.tensor(order), descending=descending)
            ratios = []
            for together in TOGETHER:
                launch = launch_rows(order, 1, H, interleave=together, group=GROUP, ahead=ahead)
                ratios.append(simulate(walk, launch, group=GROUP).time / default)
            rows.append(("deterministic", name, "later" if descending else "earlier", *ratios))
    return rows


if __name__ == "__main__":
    main()
