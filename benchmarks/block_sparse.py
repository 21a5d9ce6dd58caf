"""Block-sparse attention: how much of the dense kernels' rate listed tiles run at, forward and backward.

    python benchmarks/block_sparse.py [--only sparsity kinds keys varlen] [--json FILE] [--plot FILE]

Shape: bf16, B 1, 32 query heads, 8 key/value heads, D 128 ("keys" at 64 too), lists for each key/value head unless said
otherwise. TFLOP/s count every listed tile whole (see tile_lists.py), the dense causal kernel's too, which is what they
are compared with. "backward" and "deterministic" are calls as a user makes them with lists of both directions: one pass
or two, by the rule of `flash_attn.cute.bwd_sm90.two_pass`; "planned" the same with a plan. "two passes" follow the
plan, "deterministic, one pass" one with semaphore values. Lists and plans are made ahead of time. Medians of CUDA-event
timings after a warm-up, the host's part hidden; inputs rotate past the L2; variants are interleaved.
The tests compare the numbers of these kernels with fp32.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import torch
from sparse_variants import WAYS, dense_calls, inputs, variants
from tile_lists import BLOCK, HQ, Case, D, drawn_lengths, selected_in_sequences, tflop, tiles

from nsa_tools.measure.timing import Call, interleaved, rotating, sets_past_l2
from nsa_tools.report.tables import markdown

LENGTHS = [8192, 65536, 262144]
SPARSITIES = [0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995]
MOST_TFLOP = 60  # of a forward pass: what would take longer is left out
HELD = (16, 32768)  # sequences, and tokens of the longest
LONG_TFLOP = 300  # of a round of timings
SECTIONS = ["sparsity", "kinds", "keys", "varlen"]
Row = dict[str, float]


def main() -> None:
    given = parsed()
    if not torch.cuda.is_available():
        sys.exit("block_sparse.py measures on a GPU, and PyTorch finds none")
    begin = time.perf_counter()
    results: dict = {"dense": dense_rate(given.repeats)}
    print(f"\ndense causal, TFLOP/s: {rates(results['dense'])}")
    for name in given.only:
        results[name] = section(name, section_cases(name, given.seqlen), given.repeats, results["dense"])
        print(f"\n{name} ({seconds_since(begin)})\n\n{results[name]['table']}", flush=True)
        if given.json:
            given.json.write_text(json.dumps(results, indent=1) + "\n")
    if given.plot and "sparsity" in results:
        plot(results, given.plot)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--seqlen", type=int, nargs="+", default=LENGTHS, help="of sparsity and kinds")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write every number")
    parser.add_argument("--plot", type=Path, help="write a PNG of the section sparsity")
    return parser.parse_args()


def seconds_since(begin: float) -> str:
    return f"{time.perf_counter() - begin:.0f} s since the start"


def section_cases(name: str, lengths: list[int]) -> list[Case]:
    if name == "sparsity":
        return list(dict.fromkeys(case for T in lengths for case in sparsity_cases(T)))
    if name == "kinds":
        some = [Case(kind, T, listed) for T in lengths for kind, listed in (("causal", 8), ("window", 16))]
        some += [Case("selected", T, 16) for T in lengths]
        by_query_head = [Case(kind, 65536, listed, HQ) for kind, listed in (("causal", 8), ("selected", 16))]
        return sorted(some, key=lambda case: case.T) + (by_query_head if 65536 in lengths else [])
    if name == "keys":
        lists = (("random", D), ("selected", D), ("random", 64))
        sizes = ((16, 128), (32, 64))
        return [Case(kind, 65536, n, block_k=k, head_dim=size) for kind, size in lists for n, k in sizes]
    return []


def sparsity_cases(T: int) -> Iterator[Case]:
    for sparsity in SPARSITIES:
        listed = round(T // BLOCK * (1 - sparsity))
        if listed >= 1 and tflop(T // BLOCK * listed)["forward"] <= MOST_TFLOP:
            yield Case("random", T, listed)


def section(name: str, cases: list[Case], repeats: int, dense: Row) -> dict:
    """{"table", "rows"} of a section."""
    if name == "varlen":
        return varlen(repeats)
    rows, table = {}, []
    for case in cases:
        try:
            row = rows[str(case)] = measure(case, ways_of(name, case), repeats)
        except Exception as error:  # the other rows are still worth having
            print(f"{case} is left out: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        table.append(table_row(name, case, row, dense))
    return {"rows": rows, "table": markdown(HEADERS[name], table, left=2) + worst(rows)}


ONE_PASS_AT = 65536  # tokens, where the deterministic way in one pass is timed too: it takes longest
BY_RULE = ("forward", "backward", "planned", "two passes", "deterministic")
WAYS_OF = {
    "sparsity": (*BY_RULE, "deterministic, one pass"),
    "kinds": WAYS,
    "keys": ("forward", "backward", "two passes", "deterministic"),
}
RATIOS = {  # deterministic time over the default's of the same lists
    "det. / backward": ("deterministic", "backward"),
    "det., planned / planned": ("deterministic, planned", "planned"),
}
HEADERS = {
    "sparsity": ["T", "sparsity", *WAYS_OF["sparsity"], "det. / backward"],
    "kinds": ["T", "lists", *WAYS_OF["kinds"], *RATIOS, "plan, ms"],
    "keys": ["lists", "D", "keys", *(f"{way}, ps a pair" for way in WAYS_OF["keys"]), "det. / backward"],
}


def ways_of(name: str, case: Case) -> tuple[str, ...]:
    """The ways of a case that a section times."""
    return tuple(way for way in WAYS_OF[name] if way != "deterministic, one pass" or case.T == ONE_PASS_AT)


def table_row(name: str, case: Case, row: Row, dense: Row) -> list[str]:
    """Rates as TFLOP/s (of dense), and deterministic time over the others'."""
    ratios = [f"{row[d] / row[b]:.2f}" if {d, b} <= row.keys() else "-" for d, b in RATIOS.values()]
    if name == "keys":
        # A listed pair of tokens, of all query heads; whole tiles.
        pairs = row["tiles"] * HQ * BLOCK * case.block_k
        times = [f"{row[way] * 1e9 / pairs:.3f}" if way in row else "-" for way in WAYS_OF[name]]
        return [case.kind, str(case.head_dim), str(case.block_k), *times, ratios[0]]
    ways = WAYS_OF[name]
    cells = [f"{row[f'{w} TFLOP/s']:.0f} ({of_dense(row, dense, w):.2f})" if w in row else "-" for w in ways]
    if name == "sparsity":
        return [f"{case.T:,}", f"{(1 - case.listed / (case.T // BLOCK)) * 100:.1f} %", *cells, ratios[0]]
    what = {"window": f"window {case.listed * BLOCK:,}"}.get(case.kind, f"{case.kind}, {case.listed}")
    what += ", by query head" if case.heads == HQ else ""
    return [f"{case.T:,}", what, *cells, *ratios, f"{row['plan']:.2f}"]


def worst(rows: dict[str, Row]) -> str:
    """The largest ratio of a section."""
    found = {}
    for case, row in rows.items():
        for name, (slow, fast) in RATIOS.items():
            if {slow, fast} <= row.keys():
                found[f"{name} of {case}"] = row[slow] / row[fast]
    most = max(found, key=found.__getitem__, default=None)
    return "" if most is None else f"\n\nworst: {most}: {found[most]:.2f}"


def of_dense(row: Row, dense: Row, way: str) -> float:
    return row[f"{way} TFLOP/s"] / dense["forward" if way == "forward" else "backward"]


def measure(case: Case, ways: Iterable[str], repeats: int) -> Row:
    """Milliseconds and TFLOP/s of each way, the time to make a plan, and the tiles of a head."""
    lists = case.lists()
    number = tiles(lists[0])
    size = case.head_dim
    sets = [inputs(1, case.T, head_dim=size) for _ in range(sets_past_l2(case.T * HQ * size * 2))]
    of_sets = [variants(case, lists, tensors, ways) for tensors in sets]
    calls: dict[str, Call] = {way: rotating([of_set[way] for of_set in of_sets]) for way in of_sets[0]}
    work = tflop(number, case.block_k, size)
    # A second of work is timed half as often.
    repeats = repeats if len(ways) * work["backward"] < LONG_TFLOP else max(3, repeats // 2)
    options = dict(device="cuda", label=f"{case.name} T={case.T:,}", hide_host=True, warm_ups=1)
    timings = interleaved(calls, repeats=repeats, **options)
    row = {way: statistics.median(ms) for way, ms in timings.items()}
    for way in ways:
        row[f"{way} TFLOP/s"] = work["forward" if way == "forward" else "backward"] / row[way] * 1e3
    del of_sets, calls, sets
    torch.cuda.empty_cache()
    return row | {"T": case.T, "listed": case.listed, "tiles": number}


def dense_rate(repeats: int, T: int = 32768) -> Row:
    """TFLOP/s of the dense causal kernels."""
    timings = interleaved(dense_calls(T), repeats=repeats, device="cuda", label="dense", hide_host=True)
    work = tflop((T // BLOCK) * (T // BLOCK + 1) / 2)
    return {way: work[way] / statistics.median(ms) * 1e3 for way, ms in timings.items()}


def rates(row: Row) -> str:
    return ", ".join(f"{way} {rate:.0f}" for way, rate in row.items())


def varlen(repeats: int) -> dict:
    """Packed lists against a padded batch, of the same sequences."""
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    lengths = drawn_lengths(*HELD)
    total, longest = sum(lengths), max(lengths)
    cu = torch.nn.functional.pad(torch.tensor(lengths, device="cuda").cumsum(0, dtype=torch.int32), (1, 0))
    ways = {
        "packed": ((total,), dict(packed=True), dict(cu_seqlens_q=cu, cu_seqlens_k=cu)),
        "padded, lists end with the sequence": ((len(lengths), longest), dict(packed=False), {}),
        "padded, lists of the longest": ((len(lengths), longest), dict(packed=False, cut=False), {}),
    }
    rows: dict[str, Row] = {}
    for name, (lead, how, options) in ways.items():
        if options:
            options |= dict(max_seqlen_q=longest, max_seqlen_k=longest)
        lists = selected_in_sequences(lengths, 16, **how)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        q, k, v, do = inputs(*lead)
        forward = dict(causal=True, block_sparse_tensors=lists[0], **options)
        both = dict(block_sparse_tensors=lists[1], block_sparse_tensors_fwd=lists[0])
        backward = dict(causal=True, **both, **options)
        o, lse, *_ = _flash_attn_fwd(q, k, v, return_lse=True, **forward)
        calls: dict[str, Call] = {
            "forward": partial(_flash_attn_fwd, q, k, v, return_lse=True, **forward),
            "backward": partial(_flash_attn_bwd, q, k, v, o, do, lse, **backward),
        }
        timings = interleaved(calls, repeats=repeats, device="cuda", label=name, hide_host=True)
        rows[name] = {way: statistics.median(ms) for way, ms in timings.items()}
        rows[name]["GiB"] = torch.cuda.max_memory_allocated() / 2**30
        del q, k, v, do, o, lse, lists, calls, forward, both, backward
    print(
        f"\n{len(lengths)} sequences of {min(lengths)} to {longest:,} tokens, {total:,} together, "
        f"{len(lengths) * longest:,} padded"
    )
    best = rows["packed"]
    table = [
        [name, *(f"{row[w]:.2f} ({row[w] / best[w]:.2f})" for w in ("forward", "backward")), f"{row['GiB']:.1f}"]
        for name, row in rows.items()
    ]
    header = ["selected, 16", "forward, ms (of packed)", "backward, ms (of packed)", "peak, GiB"]
    return {"rows": rows, "lengths": lengths, "table": markdown(header, table)}


def plot(results: dict, path: Path) -> None:
    """Share of the dense rate by the number of blocks listed: a panel a length, a line a way."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    every = list(results["sparsity"]["rows"].values())
    lengths = list(dict.fromkeys(row["T"] for row in every))
    figure, axes = plt.subplots(1, len(lengths), figsize=(13, 4.2), sharey=True, constrained_layout=True)
    for ax, T in zip(axes, lengths, strict=True):
        for way, marker in zip(WAYS_OF["sparsity"], "os^vDX", strict=False):
            rows = [row for row in every if row["T"] == T and way in row]
            shares = [of_dense(row, results["dense"], way) for row in rows]
            ax.plot([row["listed"] for row in rows], shares, marker=marker, label=way if rows else None)
        ax.set(title=f"T {T:,}", xlabel="key blocks listed per query block", xscale="log", ylim=(0, 1.15))
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("share of the dense causal kernel's TFLOP/s")
    labelled = max((ax.get_legend_handles_labels() for ax in axes), key=lambda found: len(found[0]))
    figure.legend(*labelled, loc="outside right")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    main()
