"""`python -m nsa_layer bench`: the layer and dense causal attention in the same run, forward, backward and both, or
with --decode a step on caches.

CUDA events (a host clock on a CPU) after a warm-up; inputs rotate past the L2; variants are interleaved; tables show
medians, and beside them the host's time for one call, peak memory, and the error of sampled rows.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

import torch

from nsa_tools.commands.options import CommandParser, add_shape_options, backend_of, count, output_file, shapes
from nsa_tools.measure import decode_steps
from nsa_tools.measure.bench_run import Bench, Options
from nsa_tools.measure.timed_calls import VARIANTS
from nsa_tools.report import bench_tables
from nsa_tools.report.results import CHART_SUFFIXES, FAILED, provenance, read_bench, write_bench

# By option, those that are not read where it is given. Steps of decoding have no gradient, and on a GPU are in graphs.
OF_ROWS = ("--chart", "--variants", "--graph", "--dense-limit-seconds", "--error-rows")
UNREAD = {"--decode": (*OF_ROWS, "--packed", "--data", "--budget", "--recompute")}


def main(argv: list[str]) -> int:
    """Run the command; 1 where something failed or is wrong."""
    parser = _parser()
    args = parser.parse_args(argv)
    others = {flag for action in parser._actions for flag in action.option_strings} - {"--from", "--chart"}
    parser.refuse_unread(argv, UNREAD | {"--from": tuple(others)})
    if args.cache_dtype and not args.decode:
        parser.error("--cache-dtype is for --decode")
    if args.decode and args.mode == "both" and any(word.startswith("--mode") for word in argv):
        parser.error("--decode has no backward, got --mode both")
    if args.chart:
        from nsa_tools.report import bench_chart  # noqa: F401  an extra that is not there should not end a long run
    if args.read:
        return _show_again(parser, args)
    with parser.checks():
        cases = shapes(args)
        backend = [backend_of(shape, args.backend) for shape in cases][0]
        if args.dense_limit_seconds <= 0:
            raise ValueError(f"--dense-limit-seconds must be more than 0, got {args.dense_limit_seconds}")
        if args.graph and not cases[0].device.startswith("cuda"):
            raise ValueError(f"--graph needs a GPU, got --device {cases[0].device}")
    options = Options(
        backend,
        variants=tuple(name for name in VARIANTS if name in args.variants and (name != "gated" or args.rule == "nsa")),
        graph=args.graph,
        repeats=args.repeats,
        dense_limit=args.dense_limit_seconds,
        error_rows=args.error_rows,
    )
    document = provenance("bench", argv, cases[0].device) | dict(backend=backend, config=asdict(cases[0].config))

    def write(rows: list, **more: list) -> None:
        if args.json:
            write_bench(args.json, document, rows, **more)

    if args.decode:
        steps = []
        for shape in cases:
            fp8 = args.cache_dtype == "fp8"
            steps.append(decode_steps.measure(shape, args.backend, repeats=args.repeats, fp8=fp8))
            write([], decode=steps)
        gpu = document["environment"].get("gpu") or "CPU"
        dims = f"D {cases[0].D}, Dv {cases[0].Dv}"
        print(f"{gpu}: one token for each sequence, {cases[0].dtype_name()}, {dims}, {cases[0].config}\n")
        print(bench_tables.decode_steps(steps))
        return 1 if any(step.failed for step in steps) else 0
    bench = Bench(options)
    for shape in cases:
        bench.run(shape)
        write(bench.rows)
    _show(bench.rows, document["environment"], args.chart, f"{backend}, {cases[0].config}")
    bad = [row for row in bench.rows if row.status == FAILED or (row.detail or "").startswith("WRONG")]
    return 1 if bad else 0


def _show(rows: list, environment: dict, chart: Path | None, title: str) -> None:
    """Print the tables and draw the chart."""
    tables = [bench_tables.times(rows) if rows else "", bench_tables.notes(rows)]
    print("\n\n".join([f"{environment.get('gpu') or 'CPU'}: {title}", *filter(None, tables)]))
    if chart and rows:
        from nsa_tools.report.bench_chart import draw

        print("\n" + "\n".join(str(path) for path in draw(rows, environment, chart)))


def _show_again(parser: CommandParser, args: argparse.Namespace) -> int:
    try:
        files = [read_bench(path) for path in args.read]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    rows = [row for _, of_file in files for row in of_file]
    title = "; ".join(document["command"] for document, _ in files)
    _show(rows, files[0][0]["environment"], args.chart, title)
    return 0


def _chart_file(text: str) -> Path:
    """A path of which both files of the chart can be written."""
    path = output_file(text)
    for suffix in CHART_SUFFIXES:
        output_file(str(path.with_suffix(suffix)))
    return path


def _parser() -> CommandParser:
    parser = CommandParser("bench", __doc__)
    add_shape_options(parser, seqlen=[8192, 65536, 262144] if torch.cuda.is_available() else [2048])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="default: all")
    parser.add_argument("--graph", action="store_true", help="replay CUDA graphs instead of launching")
    parser.add_argument("--repeats", type=count, default=7, help="timings whose median is shown (default: 7)")
    parser.add_argument(
        "--dense-limit-seconds",
        type=float,
        default=120.0,
        help="dense attention is skipped where one timing of it would take longer (default: %(default)s)",
    )
    parser.add_argument(
        "--error-rows", type=int, default=32, help="queries whose output is compared with fp64 (default: 32; 0: none)"
    )
    parser.add_argument(
        "--decode",
        action="store_true",
        help="time one more token for each of --batch sequences of --seqlen tokens in caches; on a GPU replayed from "
        "CUDA graphs, beside the fork's FlashAttention and PyTorch's scaled_dot_product_attention",
    )
    parser.add_argument("--cache-dtype", choices=("fp8",), help="with --decode: also with caches in float8_e4m3fn")
    parser.add_argument("--chart", type=_chart_file, help="also draw this file, as PNG and as SVG")
    parser.add_argument("--from", dest="read", type=Path, nargs="+", help="show these JSON files, measure nothing")
    return parser
