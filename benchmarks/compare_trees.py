"""Interleaved times of the same calls in several trees on one GPU: before and after a change, or upstream.

    python benchmarks/compare_trees.py --tree before=FOLDER [NAME=FOLDER ...] [--seqlen 8192 65536] [--json FILE]
    python benchmarks/compare_trees.py --tree before=FOLDER --seqlen 65536 --sequences 4 64
    python benchmarks/compare_trees.py --tree before=FOLDER --only operator --seqlen 4096 65536
    python benchmarks/compare_trees.py --tree before=FOLDER --only decoding --seqlen 65536
    python benchmarks/compare_trees.py --tree before=FOLDER --only operator --seqlen 1024 --host
    python benchmarks/compare_trees.py --tree upstream=FOLDER --only lists

A folder holds a tree's packages as files: `cp -rL .tree/flash_attn .tree/nsa_layer FOLDER`, from its checkout, or
upstream's (`pip download --no-deps flash-attn-4==4.0.0b36`, unzipped). The tree that Python finds without one is "now".
Each runs in a process of its own, one timing at a time, the others waiting. Shape: bf16, B 1, 32 query heads, 8
key/value heads unless named; the calls are those of tree_calls.py. Medians of CUDA-event timings, the host's
part hidden, or with --host of the host's time; ratios are over the first folder; the largest difference of results, at
every 61st token, is over the largest value. All trees hold their inputs at once, and free what a call needs besides
before another tree's call. Exits with 1 if a result is off by more than 2 %, or a process fails.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tqdm import tqdm
from tree_calls import GROUPS, Call, Case, calls

from nsa_tools.measure.timing import host_microseconds, milliseconds
from nsa_tools.report.tables import markdown

EVERY = 61  # tokens, of which one is compared
MOST_DIFFERENCE = 0.02  # of the largest value: bf16 results of sums in another order
HOST_CALLS = 20  # of a timing of the host's part


def answer() -> None:
    """Make and time calls as lines of standard input ask, one line of JSON for each."""
    import flash_attn.cute

    print(json.dumps(flash_attn.cute.__file__), flush=True)
    ready: dict[str, Call] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        if "case" in asked:
            ready.clear()
            torch.cuda.empty_cache()
            ready = calls(Case(**asked["case"]))
            for way, call in ready.items():
                torch.save([x.flatten(0, -3)[::EVERY].float().cpu() for x in call()], f"{asked['folder']}/{way}.pt")
            torch.cuda.empty_cache()
            reply: object = list(ready)
        else:
            call = ready[asked["way"]]
            call()  # another process ran before
            if asked["host"]:
                reply = statistics.median(host_microseconds(call, "cuda") for _ in range(HOST_CALLS)) / 1e3
            else:
                reply = milliseconds(call, "cuda", hide_host=True)
            torch.cuda.empty_cache()
        print(json.dumps(reply), flush=True)


class Worker:
    """A process that runs this script with ``--answer``, a tree's folder in front of its path."""

    def __init__(self, folder: Path | None, log: Path) -> None:
        path = os.pathsep.join([*([str(folder)] if folder else []), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.log = log
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--answer"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=log.open("w"), text=True, env=os.environ | {"PYTHONPATH": path},
        )  # fmt: skip
        found = self.line()
        if folder and not Path(found).is_relative_to(folder):
            sys.exit(f"the process of {folder} imports {found}")

    def ask(self, **asked: object) -> None:
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()

    def line(self) -> Any:
        if not (line := self.process.stdout.readline()):
            sys.exit(f"a process ended: {self.log.read_text()[-2000:]}")
        return json.loads(line)

    def told(self, **asked: object) -> Any:
        self.ask(**asked)
        return self.line()


def measure(case: Case, workers: dict[str, Worker], folder: Path, repeats: int, host: bool) -> list[dict[str, Any]]:
    """A row for each way: timings of all trees, and how much their results differ."""
    for name, worker in workers.items():  # all compile at once
        (folder / name).mkdir(exist_ok=True)
        worker.ask(case=asdict(case), folder=str(folder / name))
    ways = [worker.line() for worker in workers.values()][0]
    rows = []
    for way in ways:
        timings: dict[str, list[float]] = {name: [] for name in workers}
        for _ in range(repeats + 1):
            for name, worker in workers.items():
                timings[name].append(worker.told(way=way, host=host))
        results = [torch.load(folder / name / f"{way}.pt") for name in workers]
        differs = max(float((a - b).abs().max() / b.abs().max()) for x in results[1:] for a, b in zip(results[0], x))
        row = {"case": asdict(case), "way": way, "difference": differs}
        rows.append(row | {name: ms[1:] for name, ms in timings.items()})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", nargs="+", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--only", choices=GROUPS, default="layer")
    parser.add_argument("--seqlen", type=int, nargs="+", default=[8192, 65536])
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1], help="packed ones, if more than 1")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--host", action="store_true", help="time what the host does for a call")
    parser.add_argument("--json", type=Path, help="write every number")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.answer:
        return answer()
    if not torch.cuda.is_available():
        sys.exit("compare_trees.py measures on a GPU, and PyTorch finds none")
    folders = {name: Path(folder).resolve() for name, _, folder in (each.partition("=") for each in args.tree)}
    if not folders or not all(
        (folder / "flash_attn" / "cute" / "interface.py").is_file() for folder in folders.values()
    ):
        sys.exit("--tree has to name folders that hold flash_attn/cute/interface.py")
    cases = [Case(kind, T, n, args.head_dim) for T in args.seqlen for kind in GROUPS[args.only] for n in args.sequences]
    rows = []
    with TemporaryDirectory() as name:
        trees = {**folders, "now": None}
        workers = {tree: Worker(folder, Path(name) / f"{tree}.log") for tree, folder in trees.items()}
        for case in tqdm(cases, leave=False):
            rows += measure(case, workers, Path(name), args.repeats, args.host)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows, *trees))
    sys.exit(any(row["difference"] > MOST_DIFFERENCE for row in rows))


def table(rows: list[dict[str, Any]], first: str, *others: str) -> str:
    header = ["T", "call", "sequences", "way", f"{first}, ms", *(f"{tree} / {first}" for tree in others), "difference"]
    return markdown(header, [table_row(row, first, *others) for row in rows], left=4)


def table_row(row: dict[str, Any], first: str, *others: str) -> list[str]:
    case, median = Case(**row["case"]), {tree: statistics.median(row[tree]) for tree in (first, *others)}
    ratios = [f"{median[tree] / median[first]:.4f}" for tree in others]
    times = [f"{median[first]:.3f}", *ratios, f"{row['difference']:.0e}"]
    return [f"{case.T:,}", case.kind, str(case.sequences), row["way"], *times]


if __name__ == "__main__":
    main()
