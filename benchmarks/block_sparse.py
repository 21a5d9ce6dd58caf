"""Block-sparse attention: how much of the dense kernels' rate listed tiles run at, forward and backward.

    python benchmarks/block_sparse.py [--only sparsity kinds keys varlen others] [--json FILE] [--plot FILE]

Shape: bf16, B 1, 32 query heads, 8 key/value heads, D 128, lists for each key/value head unless said otherwise. TFLOP/s
count every listed tile whole (see tile_lists.py), the dense causal kernel's too, which is what they are compared with.
"backward" and "planned" are one pass, without a plan and by one; "two passes" have the plan for dk and dv, and dq
over the lists of forward; "deterministic" are two passes too, "deterministic, one pass" follows a plan with lock
values. Lists and plans are made ahead of time. Medians of
CUDA-event timings after a warm-up, the host's part hidden; inputs rotate past the L2; variants take turns.

First, every kernel's numbers are checked against fp32 on a small case, in processes of their own, which compile it into
the kernel cache by the way. FlexAttention takes part where torch.compile works, cuDNN's block-sparse attention where it
is installed (`pip install nvidia-cudnn-frontend`, 1.32 or newer).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path

import other_attention
import torch
from sparse_variants import BACKWARD, WAYS, check, check_packed, inputs, variants
from tile_lists import BLOCK, HQ, Case, D, drawn_lengths, selected_in_sequences, tflop, tiles

from nsa_layer.tables import markdown
from nsa_layer.timing import Call, interleaved, sets_past_l2

LENGTHS = [8192, 65536, 262144]
SPARSITIES = [0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995]
MOST_TFLOP = 60  # of a forward pass: what would take longer is left out
HELD = (16, 32768)  # sequences, and tokens of the longest
SECTIONS = ["sparsity", "kinds", "keys", "varlen", "others"]
Row = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--seqlen", type=int, nargs="+", default=LENGTHS, help="of sparsity and kinds")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, default=max(1, min(8, (os.cpu_count() or 2) // 2)))
    parser.add_argument("--no-check", action="store_true", help="leave the comparison with fp32 out")
    parser.add_argument("--json", type=Path, help="write every number")
    parser.add_argument("--plot", type=Path, help="write a PNG of the section sparsity")
    given = parser.parse_args()
    begin = time.perf_counter()
    cases = {name: section_cases(name, given.seqlen) for name in given.only}
    results: dict = {"errors": {} if given.no_check else errors(cases, given.workers)}
    results["dense"] = dense_rate(given.repeats)
    print(f"\ndense causal, TFLOP/s: {rates(results['dense'])}")
    for name in given.only:
        results[name] = section(name, cases[name], given.repeats, results)
        print(f"\n{name} ({time.perf_counter() - begin:.0f} s since the start)\n\n{results[name]['table']}", flush=True)
        if given.json:
            given.json.write_text(json.dumps(results, indent=1) + "\n")
    if given.plot and "sparsity" in results:
        plot(results, given.plot)


def section_cases(name: str, lengths: list[int]) -> list[Case]:
    if name == "sparsity":
        return list(dict.fromkeys(case for T in lengths for case in sparsity_cases(T)))
    if name == "kinds":
        some = [Case(kind, T, listed) for T in lengths for kind, listed in (("causal", 8), ("window", 16))]
        some += [Case("selected", T, 16) for T in lengths]
        by_query_head = [Case(kind, 65536, listed, HQ) for kind, listed in (("causal", 8), ("selected", 16))]
        return sorted(some, key=lambda case: case.T) + (by_query_head if 65536 in lengths else [])
    if name == "keys":
        sizes = ((16, 128), (32, 64))
        return [Case(kind, 65536, listed, block_k=k) for kind in ("random", "selected") for listed, k in sizes]
    if name == "others":
        return [Case("random", 65536, listed, HQ) for listed in (51, 10)]
    return []


def sparsity_cases(T: int) -> Iterator[Case]:
    for sparsity in SPARSITIES:
        listed = round(T // BLOCK * (1 - sparsity))
        if listed >= 1 and tflop(T // BLOCK * listed)["forward"] <= MOST_TFLOP:
            yield Case("random", T, listed)


def errors(cases: dict[str, list[Case]], workers: int) -> dict[str, dict[str, float | str]]:
    """The largest error of each kernel against fp32, over the largest value: by what a kernel is compiled for."""
    small = {c for some in cases.values() for case in some for c in [replace(case, T=1024, listed=min(case.listed, 6))]}
    small = sorted({(c.kind, c.heads, c.block_k): c for c in small}.values(), key=str)
    jobs: dict[str, tuple[Callable, tuple]] = {described(case): (check, (case,)) for case in small}
    if "varlen" in cases:
        jobs["packed selected"] = (check_packed, ())
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = {name: pool.submit(function, *arguments) for name, (function, arguments) in jobs.items()}
        found = {name: future.result() for name, future in futures.items()}
    rows = [[name, *(shown(found[name].get(way)) for way in WAYS)] for name in found]
    print(f"largest error over largest value, T 1024\n\n{markdown(['lists', *WAYS], rows)}", flush=True)
    for name, errors_ in found.items():
        for way, error in errors_.items():
            if isinstance(error, str):
                print(f"{name}, {way} is left out: {error}", file=sys.stderr)
    return found


def described(case: Case) -> str:
    heads = "query head" if case.heads == HQ else "key/value head"
    return f"{case.kind}, by {heads}, {case.block_k} keys"


def shown(error: float | str | None) -> str:
    return "-" if error is None else "failed" if isinstance(error, str) else f"{error:.1e}"


def section(name: str, cases: list[Case], repeats: int, results: dict) -> dict:
    """{"table", "rows"} of a section."""
    if name == "varlen":
        return varlen(repeats)
    if name == "others":
        return others(cases, repeats)
    rows, table = {}, []
    for case in cases:
        failed = [w for w, e in results["errors"].get(described(case), {}).items() if isinstance(e, str)]
        try:
            row = rows[str(case)] = measure(case, repeats, left_out=failed)
        except Exception as error:  # the other rows are still worth having
            print(f"{case} is left out: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        table.append(table_row(name, case, row, results["dense"]))
    return {"rows": rows, "table": markdown(HEADERS[name], table, left=2)}


RATES = list(WAYS)
HEADERS = {
    "sparsity": ["T", "sparsity", *RATES, "det. / planned", "det. / backward"],
    "kinds": ["T", "lists", *RATES, "det. / planned", "det. / backward", "plan, ms"],
    "keys": ["lists", "keys", *(f"{way}, ps a pair" for way in RATES)],
}


def table_row(name: str, case: Case, row: Row, dense: Row) -> list[str]:
    """Rates as TFLOP/s (of dense), and deterministic time over the others'."""
    if name == "keys":
        # A listed pair of tokens, of all query heads; whole tiles.
        pairs = row["tiles"] * HQ * BLOCK * case.block_k
        times = [f"{row[way] * 1e9 / pairs:.3f}" if way in row else "-" for way in RATES]
        return [case.kind, str(case.block_k), *times]
    cells = [f"{row[f'{w} TFLOP/s']:.0f} ({of_dense(row, dense, w):.2f})" if w in row else "-" for w in RATES]
    det = row.get("deterministic")
    ratios = [f"{det / row[way]:.2f}" if det and way in row else "-" for way in ("planned", "backward")]
    if name == "sparsity":
        return [f"{case.T:,}", f"{(1 - case.listed / (case.T // BLOCK)) * 100:.1f} %", *cells, *ratios]
    what = {"window": f"window {case.listed * BLOCK:,}"}.get(case.kind, f"{case.kind}, {case.listed}")
    what += ", by query head" if case.heads == HQ else ""
    return [f"{case.T:,}", what, *cells, *ratios, f"{row['plan']:.2f}"]


def of_dense(row: Row, dense: Row, way: str) -> float:
    return row[f"{way} TFLOP/s"] / dense["forward" if way == "forward" else "backward"]


def measure(case: Case, repeats: int, *, left_out: list[str]) -> Row:
    """Milliseconds and TFLOP/s of each way, the time to make a plan, and the tiles of a head."""
    lists = case.lists()
    number = tiles(lists[0])
    sets = [inputs(1, case.T) for _ in range(sets_past_l2(case.T * HQ * D * 2))]
    of_sets = [variants(case, lists, tensors) for tensors in sets]
    calls: dict[str, Call] = {
        way: _turns([of_set[way] for of_set in of_sets]) for way in of_sets[0] if way not in left_out
    }
    timings = interleaved(calls, repeats=repeats, device="cuda", label=f"{case.kind} T={case.T:,}", hide_host=True)
    row = {way: statistics.median(ms) for way, ms in timings.items()}
    work = tflop(number, case.block_k)
    for way in WAYS:
        if way in row:
            row[f"{way} TFLOP/s"] = work["forward" if way == "forward" else "backward"] / row[way] * 1e3
    del of_sets, calls, sets
    torch.cuda.empty_cache()
    return row | {"T": case.T, "listed": case.listed, "tiles": number}


def dense_rate(repeats: int, T: int = 32768) -> Row:
    """TFLOP/s of the dense causal kernels."""
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    q, k, v, do = inputs(1, T)
    o, lse, *_ = _flash_attn_fwd(q, k, v, causal=True, return_lse=True)
    calls: dict[str, Call] = {
        "forward": lambda: _flash_attn_fwd(q, k, v, causal=True, return_lse=True),
        "backward": lambda: _flash_attn_bwd(q, k, v, o, do, lse, causal=True),
    }
    timings = interleaved(calls, repeats=repeats, device="cuda", label="dense", hide_host=True)
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
        backward = dict(causal=True, block_sparse_tensors=lists[1], **options)
        o, lse, *_ = _flash_attn_fwd(q, k, v, return_lse=True, **forward)
        calls: dict[str, Call] = {
            "forward": _bind(_flash_attn_fwd, q, k, v, return_lse=True, **forward),
            "backward": _bind(_flash_attn_bwd, q, k, v, o, do, lse, **backward),
        }
        timings = interleaved(calls, repeats=repeats, device="cuda", label=name, hide_host=True)
        rows[name] = {way: statistics.median(ms) for way, ms in timings.items()}
        rows[name]["GiB"] = torch.cuda.max_memory_allocated() / 2**30
        del q, k, v, do, o, lse, lists, calls, forward, backward
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


def others(cases: list[Case], repeats: int) -> dict:
    """FlexAttention and cuDNN beside the kernels here on the same lists: TFLOP/s, and how far apart results are."""
    rows: dict[str, Row] = {}
    names: list[str] = []
    for case in cases:
        lists = case.lists()
        tensors = inputs(1, case.T)
        ours = variants(case, lists, tensors)
        calls: dict[str, Call] = {f"here, {way}": ours[way] for way in ("forward", "backward", "planned", "two passes")}
        expected = {"forward": ours["forward"]()[0], "backward": ours["backward"]()[0]}
        row: Row = {}
        for name, theirs in other_attention.offered(case, lists[0], tensors):
            for way, call in theirs.items():
                got = call()[0]
                apart = (got.float() - expected[way].float()).abs().max() / expected[way].float().abs().max()
                row[f"{name}, {way} apart"] = apart.item()
                calls[f"{name}, {way}"] = call
        timings = interleaved(calls, repeats=repeats, device="cuda", label=f"others {case.listed}", hide_host=True)
        work = tflop(tiles(lists[0]))
        for name, ms in timings.items():
            way = "forward" if name.endswith("forward") else "backward"
            row[f"{name} TFLOP/s"] = work[way] / statistics.median(ms) * 1e3
        rows[f"{(1 - case.listed / (case.T // BLOCK)) * 100:.0f} %"] = row
        names += [name for name in timings if name not in names]
        del calls, ours, expected, tensors
        torch.cuda.empty_cache()
    table = []
    for name in names:
        cells = [
            f"{row[f'{name} TFLOP/s']:.0f}" + (f" ({row[f'{name} apart']:.1e})" if f"{name} apart" in row else "")
            for row in rows.values()
        ]
        table.append([name, *cells])
    header = ["random, by query head, T 65,536", *(f"{sparsity}, TFLOP/s (apart)" for sparsity in rows)]
    return {"rows": rows, "table": markdown(header, table)}


def _bind(function: Callable, *args: object, **options: object) -> Call:
    return lambda: function(*args, **options)


def _turns(calls: list[Call]) -> Call:
    turns = cycle(calls)
    return lambda: next(turns)()


def plot(results: dict, path: Path) -> None:
    """Share of the dense rate by the number of blocks listed, forward and backward beside one another."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, constrained_layout=True)
    for ax, ways in zip(axes, (["forward"], list(BACKWARD)), strict=True):
        for T in dict.fromkeys(row["T"] for row in results["sparsity"]["rows"].values()):
            for way, style in zip(ways, ("-", "--", ":", "-.", (0, (1, 4))), strict=False):
                rows = [r for r in results["sparsity"]["rows"].values() if r["T"] == T and way in r]
                points = [(row["listed"], of_dense(row, results["dense"], way)) for row in rows]
                if points:
                    ax.plot(*zip(*points, strict=True), style, marker="o", label=f"{way}, T {T:,}")
        ax.set(xlabel="key blocks listed per query block", xscale="log", ylim=(0, None))
        ax.grid(alpha=0.3)
        ax.legend(fontsize=7)
    axes[0].set_ylabel("share of the dense causal kernel's TFLOP/s")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    main()
