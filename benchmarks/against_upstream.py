"""The cost of the patches to default calls: the same block-sparse and dense calls here and in unpatched upstream.

    python benchmarks/against_upstream.py --upstream FOLDER [--seqlen 8192 65536] [--repeats 9] [--json FILE]

FOLDER holds upstream's package as its wheel has it (`pip download --no-deps flash-attn-4==4.0.0b36`, unzipped). Each of
the two packages runs in a process of its own on the same GPU; they take turns at every timing, and one waits while the
other one measures. Shape: bf16, B 1, 32 query heads, 8 key/value heads, D 128; blocks of 128, one list for all heads,
no `mask_mod`, low-level functions in the default mode, backward in one pass. Lists have every block in one list ("mask"
or "full") or in both by turns ("both"). Medians of CUDA-event timings, the host's part hidden; largest differences of
results, at every 61st token, over the largest value. Exits with 1 if a result differs by more than 2 %, or a process
fails.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tqdm import tqdm

from nsa_tools.measure.timing import milliseconds
from nsa_tools.report.tables import markdown

BLOCK, HQ, HKV, D = 128, 32, 8, 128
EVERY = 61  # tokens, of which one is compared
MOST_DIFFERENCE = 0.02  # of the largest value: bf16 results of sums in another order
PACKAGES = ("patched", "upstream")
Call = Callable[[], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """Lists of a kind ("dense": none) at a length, and which lists have the blocks: "mask", "full" or "both"."""

    kind: str
    T: int
    where: str = "both"

    @property
    def options(self) -> dict[str, Any]:
        return dict(causal=True) if self.kind in ("dense", "causal") else {}

    def table(self, device: str) -> torch.Tensor:
        """bool [M, N]: the blocks that are listed."""
        M = self.T // BLOCK
        m, n = torch.arange(M, device=device).view(-1, 1), torch.arange(M, device=device)
        if self.kind == "causal":
            return n <= m
        score = torch.rand(M, M, device=device, generator=torch.Generator(device).manual_seed(self.T))
        return torch.zeros_like(score, dtype=torch.bool).scatter_(1, score.topk(min(8, M)).indices, True)

    def halves(self, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        """bool [M, N] twice: mask blocks and full blocks."""
        listed = self.table(device)
        if self.where != "both":
            nothing = torch.zeros_like(listed)
            return (listed, nothing) if self.where == "mask" else (nothing, listed)
        if self.kind == "causal":
            own = torch.eye(len(listed), dtype=torch.bool, device=device)
            return listed & own, listed & ~own
        odd = (torch.arange(len(listed), device=device).view(-1, 1) + torch.arange(len(listed), device=device)) % 2 == 1
        return listed & odd, listed & ~odd


def cases(lengths: list[int]) -> Iterator[Case]:
    for T in lengths:
        yield Case("dense", T)
        yield from (Case("random", T, where) for where in ("mask", "full", "both"))
        yield Case("causal", T)


def compact(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts, int32 [1, 1, rows], and indices, int32 [1, 1, rows, columns], the listed ones first."""
    order = table.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return table.sum(1).int()[None, None], order.int()[None, None].contiguous()


def calls(case: Case) -> dict[str, Call]:
    """Forward and backward with whichever package is imported."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    torch.manual_seed(case.T)
    q, k, v, do = (torch.randn(1, case.T, H, D, device="cuda", dtype=torch.bfloat16) for H in (HQ, HKV, HKV, HQ))
    forward, backward = {}, {}
    if case.kind != "dense":
        mask, full = case.halves("cuda")
        size = dict(block_size=(BLOCK, BLOCK))
        forward = dict(block_sparse_tensors=BlockSparseTensorsTorch(*compact(mask), *compact(full), **size))
        backward = dict(block_sparse_tensors=BlockSparseTensorsTorch(*compact(mask.T), *compact(full.T), **size))
    o, lse, *_ = _flash_attn_fwd(q, k, v, return_lse=True, **forward, **case.options)
    return {
        "forward": lambda: _flash_attn_fwd(q, k, v, return_lse=True, **forward, **case.options)[:1],
        "backward": lambda: _flash_attn_bwd(q, k, v, o, do, lse, **backward, **case.options)[:3],
    }


def answer(make: Callable[[dict[str, Any]], dict[str, Call]]) -> None:
    """Make and time calls as lines of standard input ask, one line of JSON for each.

    make: calls of a case, which is given as its fields.
    """
    from flash_attn.cute import block_sparsity

    print(json.dumps({"patched": "passes" in block_sparsity.BlockSparseTensorsTorch._fields}), flush=True)
    ready: dict[str, Call] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        if "case" in asked:
            ready.clear()
            torch.cuda.empty_cache()
            ready = make(asked["case"])
            for way, call in ready.items():
                torch.save([x.flatten(0, -3)[::EVERY].float().cpu() for x in call()], f"{asked['folder']}/{way}.pt")
            torch.cuda.empty_cache()
            reply: object = list(ready)
        else:
            call = ready[asked["way"]]
            call()  # after the other process's turn
            reply = milliseconds(call, "cuda", hide_host=True)
        print(json.dumps(reply), flush=True)


class Worker:
    """A process with one of the packages in front, that runs ``script --answer``."""

    def __init__(self, paths: list[str], log: Path, script: str = __file__) -> None:
        path = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
        self.log = log
        self.process = subprocess.Popen(
            [sys.executable, script, "--answer"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=log.open("w"), text=True, env=os.environ | {"PYTHONPATH": path},
        )  # fmt: skip
        self.hello = self.line()

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


def measure(case: Case, workers: dict[str, Worker], folder: Path, repeats: int) -> list[dict[str, Any]]:
    """A row for each way: timings of both packages, and how much their results differ."""
    for name, worker in workers.items():  # both compile at once
        (folder / name).mkdir(exist_ok=True)
        worker.ask(case=asdict(case), folder=str(folder / name))
    ways = [worker.line() for worker in workers.values()][0]
    rows = []
    for way in ways:
        timings: dict[str, list[float]] = {name: [] for name in workers}
        for _ in range(repeats + 1):
            for name, worker in workers.items():
                timings[name].append(worker.told(way=way))
        results = [torch.load(folder / name / f"{way}.pt") for name in workers]
        differs = max(float((a - b).abs().max() / b.abs().max()) for x in results[1:] for a, b in zip(results[0], x))
        row = {"case": asdict(case), "way": way, "difference": differs}
        rows.append(row | {name: ms[1:] for name, ms in timings.items()})
    return rows


def table_row(row: dict[str, Any]) -> list[str]:
    case = Case(**row["case"])
    patched, upstream = (statistics.median(row[name]) for name in PACKAGES)
    lists = case.kind if case.kind == "dense" else f"{case.kind}, {case.where}"
    times = [f"{upstream:.3f}", f"{patched:.3f}", f"{patched / upstream:.2f}"]
    return [f"{case.T:,}", lists, row["way"], *times, f"{row['difference']:.0e}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstream", type=Path, help="folder that holds upstream's flash_attn")
    parser.add_argument("--seqlen", type=int, nargs="+", default=[8192, 65536])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write every number")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("against_upstream.py measures on a GPU, and PyTorch finds none")
    if given.answer:
        return answer(lambda case: calls(Case(**case)))
    if given.upstream is None or not (given.upstream / "flash_attn" / "cute" / "interface.py").is_file():
        sys.exit("--upstream has to name a folder that holds flash_attn/cute/interface.py")
    rows = compared(given)
    print(markdown_table(rows))
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(any(row["difference"] > MOST_DIFFERENCE for row in rows))


def compared(given: argparse.Namespace) -> list[dict[str, Any]]:
    with TemporaryDirectory() as name:
        folder = Path(name)
        workers = {
            "patched": Worker([], folder / "patched.log"),
            "upstream": Worker([str(given.upstream.resolve())], folder / "upstream.log"),
        }
        for package, worker in workers.items():
            if worker.hello["patched"] != (package == "patched"):
                sys.exit(f"the process of the {package} package found the other one")
        rows = []
        for case in tqdm(list(cases(given.seqlen)), leave=False):
            rows += measure(case, workers, folder, given.repeats)
        for worker in workers.values():
            worker.process.stdin.close()
            worker.process.wait()
    return rows


def markdown_table(rows: list[dict[str, Any]]) -> str:
    header = ["T", "lists", "way", "upstream, ms", "patched, ms", "ratio", "difference"]
    return markdown(header, [table_row(row) for row in rows], left=3)


if __name__ == "__main__":
    main()
