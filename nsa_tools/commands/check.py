"""`python -m nsa_layer check`: sampled rows and gradients of one call of any length against an oracle in fp64."""

from __future__ import annotations

from dataclasses import asdict

import torch

from nsa_tools.commands.options import CommandParser, add_shape_options, add_ungated, backend_of, count, shapes
from nsa_tools.report.files import write_json
from nsa_tools.report.tables import gib, markdown
from nsa_tools.testing.sampled_check import Report, Samples, check


def main(argv: list[str]) -> int:
    """Run the command; 1 where something is wrong."""
    parser = CommandParser("check", __doc__)
    add_shape_options(parser, seqlen=[65536] if torch.cuda.is_available() else [512])
    add_ungated(parser)
    parser.add_argument("--rows", type=count, default=128, help="sampled queries of a sequence (default: 128)")
    parser.add_argument("--keys", type=count, default=64, help="sampled keys of a sequence (default: 64)")
    parser.add_argument("--tiles", type=count, default=32, help="tiles whose lists are checked (default: 32)")
    args = parser.parse_args(argv)
    with parser.checks():
        cases = shapes(args)
        backends = [backend_of(shape, args.backend) for shape in cases]
    reports = []
    for shape, backend in zip(cases, backends):
        reports.append(check(shape, backend, samples=Samples(args.rows, args.keys, args.tiles)))
        print(as_text(reports[-1]), flush=True)
        if args.json:
            write_json(args.json, [asdict(report) | {"ok": report.ok} for report in reports])
    return 0 if all(report.ok for report in reports) else 1


def as_text(report: Report) -> str:
    """A heading, a table, peaks, and the outcome."""
    rows = [
        [v.name, v.sampled, f"{v.error:.3g}", f"{v.eager_error:.3g}", f"{v.of_limit:.2f}", at, "" if v.ok else "WRONG"]
        for v in report.verdicts
        for at in [f"{v.at:,}" if v.at >= 0 else ""]
    ]
    header = ["tensor", "sampled", "max error", "eager's", "of its limit", "at token", ""]
    lines = [f"{report.backend}, {report.shape}", "", markdown(header, rows, left=2), ""]
    if report.peak_bytes is not None:
        lines.append(f"peak, inputs included: {gib(report.peak_bytes, '.2f')} GiB")
    lines += [f"{v.name}: {v.note}" for v in report.verdicts if v.note]
    return "\n".join([*lines, "passed" if report.ok else "FAILED", ""])
