"""`python -m nsa_layer bench`: the layer and dense causal attention in the same run, forward, backward and both.

CUDA events (a host clock on a CPU) after a warm-up; inputs rotate past the L2; the variants take turns; the tables show
medians, and beside them the host's time for one call, peak memory, and the error of sampled rows.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from nsa_layer.cli import bench_table, results
from nsa_layer.cli.arguments import output_file, tokens
from nsa_layer.cli.bench_run import Bench, Options
from nsa_layer.cli.crossover import crossovers
from nsa_layer.cli.first_call import seconds
from nsa_layer.cli.shape import add_shape_options, backend_of, shapes
from nsa_layer.cli.variants import VARIANTS


def main(argv: list[str]) -> int:
    """Run the command; 1 where something failed or is wrong, 2 for bad arguments."""
    given = _parser().parse_args(argv)
    if given.read:
        return _shown_again(given)
    try:
        cases = shapes(given)
        backends = [backend_of(shape, given.backend) for shape in cases]
        for name in ("repeats", "dense_limit_seconds"):
            if getattr(given, name) <= 0:
                raise ValueError(f"--{name.replace('_', '-')} must be more than 0, got {getattr(given, name)}")
        if given.graph and not cases[0].device.startswith("cuda"):
            raise ValueError(f"--graph needs a GPU, got --device {cases[0].device}")
        if given.crossover and "dense" not in given.variants:
            raise ValueError(f"--crossover needs dense attention among --variants, got {' '.join(given.variants)}")
    except (ValueError, NotImplementedError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    options = Options(
        backends[0],
        variants=tuple(name for name in VARIANTS if name in given.variants),
        backward=given.mode == "both",
        graph=given.graph,
        repeats=given.repeats,
        dense_limit=given.dense_limit_seconds,
        error_rows=given.error_rows,
    )
    found = dict(
        command=results.command_line("bench", argv),
        backend=backends[0],
        environment=results.environment(cases[0].device),
        config=asdict(cases[0].config),
    )
    bench, crossing = Bench(options), []
    if given.first_call:
        try:
            first = seconds(cases[0], backends[0])
        except RuntimeError as error:
            print(f"bench: {error}", file=sys.stderr)
            return 1
        if given.json:
            results.write(given.json, results.document(**found, rows=[], first_call=first))
        shown = ", ".join(f"{taken:.2f}" for taken in first)
        print(f"first call of a process, {cases[0].describe()}: {shown} s in one process after the other")
        return 0
    for shape in () if given.crossover else cases:
        bench.run(shape)
        if given.json:
            results.write(given.json, results.document(**found, rows=bench.rows))
    if given.crossover:
        crossing = crossovers(cases[0], options, high=given.crossover)
        if given.json:
            results.write(given.json, results.document(**found, rows=bench.rows, crossovers=crossing))
    _show(bench.rows, crossing, found["environment"], given.chart, f"{backends[0]}, {cases[0].config}")
    bad = [row for row in bench.rows if row.status == results.FAILED or (row.detail or "").startswith("WRONG")]
    return 1 if bad else 0


def _show(rows: list, crossing: list, environment: dict, chart: Path | None, title: str) -> None:
    device = environment.get("gpu") or "CPU"
    tables = [bench_table.times(rows), bench_table.notes(rows)] if rows else []
    if any(row.status == results.FROM_SHORTER for row in rows):
        tables.insert(
            1, "(from T=...): not measured; the time at that length times the ratio of query-key pairs. *: against it."
        )
    tables.append(bench_table.crossovers(crossing))
    print("\n\n".join([f"{device}: {title}", *filter(None, tables)]))
    if chart and rows:
        from nsa_layer.cli.chart import draw

        print("\n" + "\n".join(str(path) for path in draw(rows, environment, chart)))


def _shown_again(given: argparse.Namespace) -> int:
    rows, crossing, documents = [], [], []
    try:
        for path in given.read:
            document, more, crossed = results.read(path)
            rows, crossing, documents = rows + more, crossing + crossed, [*documents, document]
    except (OSError, ValueError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    _show(rows, crossing, documents[0]["environment"], given.chart, "; ".join(d["command"] for d in documents))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m nsa_layer bench", description=__doc__, allow_abbrev=False)
    gpu = torch.cuda.is_available()
    add_shape_options(parser, seqlen=[8192, 65536, 262144] if gpu else [2048])
    parser.add_argument("--mode", choices=("forward", "both"), default="both", help="both: backward too (default)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="default: all")
    parser.add_argument("--graph", action="store_true", help="replay CUDA graphs instead of launching")
    parser.add_argument("--repeats", type=int, default=7, help="timings whose median is shown (default: 7)")
    parser.add_argument(
        "--dense-limit-seconds",
        type=float,
        default=120.0,
        help="where one timing of dense attention would take longer, a shorter length is measured, and its time, "
        "scaled and marked, is shown (default: %(default)s)",
    )
    parser.add_argument(
        "--error-rows", type=int, default=32, help="queries whose output is compared with fp64 (default: 32; 0: none)"
    )
    parser.add_argument(
        "--crossover",
        type=tokens,
        nargs="?",
        const=65536,
        metavar="T",
        help="find the length up to T tokens (default: 65536) from which on the layer is no slower than dense",
    )
    parser.add_argument(
        "--first-call", action="store_true", help="time the first call of a process, in processes of their own"
    )
    parser.add_argument("--json", type=output_file, help="also write everything to this file")
    parser.add_argument("--chart", type=output_file, help="also draw this file, as PNG and as SVG")
    parser.add_argument("--from", dest="read", type=Path, nargs="+", help="show these JSON files, measure nothing")
    return parser
