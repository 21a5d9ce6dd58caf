"""Time of the layer in several trees, which take turns on one GPU: before and after a change, or variants of it.

    python benchmarks/compare_trees.py --tree before=FOLDER [NAME=FOLDER ...] [--seqlen 8192 65536] [--json FILE]

A folder holds a tree's packages as files: `cp -rL .tree/flash_attn .tree/nsa_layer FOLDER`, from its checkout. The tree
that Python finds without one is "now". Each runs in a process of its own, one timing at a time, as in
`against_upstream.py`. Shape: bf16, B 1, 32 query heads, 8 key/value heads, D 128, the default `NSAConfig`, gated; with
``--sequences`` packed. Medians of CUDA-event timings, the host's part hidden; ratios are over the first folder. All
trees hold their tensors at once: about 20 GiB each at 262,144 tokens. Exits with 1 if a result is off by more than 2 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from against_upstream import HKV, HQ, MOST_DIFFERENCE, Call, D, Worker, answer, measure
from tqdm import tqdm

from nsa_tools.report.tables import markdown


@dataclass(frozen=True)
class Case:
    """Tokens of a call, in so many sequences of one length: packed if there are more than one."""

    T: int
    sequences: int = 1


def calls(case: Case) -> dict[str, Call]:
    """A training step's forward and backward, and forward alone."""
    from nsa_layer import nsa

    torch.manual_seed(case.T)
    new = dict(device="cuda", dtype=torch.bfloat16)
    lead = (1, case.T) if case.sequences == 1 else (case.T,)
    q, k, v, do = (torch.randn(*lead, H, D, **new) for H in (HQ, HKV, HKV, HQ))
    inputs = [q, k, v, torch.randn(HQ, 3, D, **new) * 0.1]
    leaves = [x.requires_grad_() for x in inputs]
    starts = None
    if case.sequences > 1:
        starts = torch.arange(case.sequences + 1, dtype=torch.int32) * (case.T // case.sequences)

    def attend() -> torch.Tensor:
        return nsa(*leaves[:3], gate_weight=leaves[3], cu_seqlens=starts)

    def forward() -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return (attend(),)

    return {"forward": forward, "forward+backward": lambda: torch.autograd.grad(attend(), leaves[:3], do)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", nargs="+", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--seqlen", type=int, nargs="+", default=[8192, 65536])
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write every number")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("compare_trees.py measures on a GPU, and PyTorch finds none")
    if given.answer:
        return answer(lambda case: calls(Case(**case)))
    folders = dict(each.partition("=")[::2] for each in given.tree)
    if not folders or not all((Path(f) / "flash_attn" / "cute" / "interface.py").is_file() for f in folders.values()):
        sys.exit("--tree has to name folders that hold flash_attn/cute/interface.py")
    rows = []
    with TemporaryDirectory() as name:
        paths = {tree: [str(Path(folder).resolve())] for tree, folder in folders.items()} | {"now": []}
        workers = {tree: Worker(path, Path(name) / f"{tree}.log", __file__) for tree, path in paths.items()}
        for T in tqdm(given.seqlen, leave=False):
            rows += measure(Case(T, given.sequences), workers, Path(name), given.repeats)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
    first, *others = paths
    header = ["T", "way", f"{first}, ms", *(f"{tree} / {first}" for tree in others), "difference"]
    print(markdown(header, [table_row(row, first, others) for row in rows], left=2))
    sys.exit(any(row["difference"] > MOST_DIFFERENCE for row in rows))


def table_row(row: dict[str, Any], first: str, others: list[str]) -> list[str]:
    median = {tree: statistics.median(row[tree]) for tree in (first, *others)}
    ratios = [f"{median[tree] / median[first]:.4f}" for tree in others]
    return [f"{row['case']['T']:,}", row["way"], f"{median[first]:.3f}", *ratios, f"{row['difference']:.0e}"]


if __name__ == "__main__":
    main()
