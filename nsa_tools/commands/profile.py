"""`python -m nsa_layer profile`: the time of each component of a call, beside its floor.

On a GPU, time is that of the kernels which a component launches, by the GPU's clock; on a CPU, that of the host inside
the component. "cmp", "slc" and "swa" are the compressed, the selected and the sliding-window branch. A floor is the
time that the bytes or the arithmetic that the component cannot do without take.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

import torch

from nsa_tools.commands.options import CommandParser, add_shape_options, add_ungated, backend_of, count, shapes
from nsa_tools.measure.component_times import DIRECTIONS, Part, Profile, profile
from nsa_tools.measure.kernel_trace import Kernel
from nsa_tools.measure.roofline import Ceilings, Work, ceilings, work
from nsa_tools.report.files import write_json
from nsa_tools.report.results import provenance
from nsa_tools.report.tables import markdown

Floors = dict[tuple[str, str], Work]  # by component and direction


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = _parser()
    args = parser.parse_args(argv)
    with parser.checks():
        cases = shapes(args)
        backends = [backend_of(shape, args.backend) for shape in cases]
    at = ceilings(cases[0].device, cases[0].dtype)
    rates = (rate / 1e12 for rate in asdict(at).values())
    print("floors: {:.3g} TB/s, {:.3g} and {:.3g} TFLOP/s forward and backward\n".format(*rates))
    document = provenance("profile", argv, cases[0].device) | dict(ceilings=asdict(at), calls=[])
    for shape, backend in zip(cases, backends):
        measured, floors = profile(shape, backend, repeats=args.repeats), work(shape, backend)
        gated = "ungated" if args.ungated else "gated"
        title = f"{backend} on {shape.device}, {shape.describe()}, {gated}, {shape.data} data"
        tables = [component_table(measured, floors, at)]
        tables += [kernel_table(measured.kernels, rows=args.rows)] if measured.kernels else []
        print("\n\n".join((title, *tables)) + "\n", flush=True)
        document["calls"].append(dict(title=title, whole_ms=measured.whole_ms, rows=as_data(measured, floors, at)))
        if args.json:
            write_json(args.json, document)
    return 0


def component_table(measured: Profile, floors: Floors, at: Ceilings) -> str:
    """A row a component and direction; then each direction as a whole, by a clock without the profiler."""
    total = sum(part.ms for part in measured.parts.values())
    table = []
    for way in DIRECTIONS:
        own = {name: part for (name, direction), part in measured.parts.items() if direction == way}
        if not own:
            continue
        for name, part in own.items():
            table.append([name, way, *_time(part, total), *_work(part, floors.get((name, way)), at, way)])
        # Work of components that did not run on their own (folded into another) still has to be done by somebody.
        least = sum(work.floor_ms(at, way) for (_, direction), work in floors.items() if direction == way)
        busy = Part(sum(part.ms for part in own.values()), sum(part.launches for part in own.values()))
        table.append(["all components", way, *_time(busy, total), "", "", *_floor(busy.ms, least)])
        if way in measured.whole_ms:
            ms = measured.whole_ms[way]
            table.append(["whole call, by the clock", way, f"{ms:.3f}", "", "", "", "", *_floor(ms, least)])
    header = ["component", "direction", "ms", "share", "launches", "work", "reached", "floor (ms)", "over floor"]
    return markdown(header, table, left=2)


def _time(part: Part, total: float) -> list[str]:
    return [f"{part.ms:.3f}", f"{part.ms / total:.1%}" if total else "", str(part.launches or "")]


def _work(part: Part, least: Work | None, at: Ceilings, way: str) -> list[str]:
    if least is None:
        return ["", "", "", ""]
    tera, unit = (least.flops / 1e12, "TFLOP") if least.is_compute_bound(at, way) else (least.bytes / 1e12, "TB")
    amount = f"{tera:.3g} {unit}" if unit == "TFLOP" else f"{tera * 1e3:.3g} GB"
    reached = f"{tera / part.ms * 1e3:.3g} {unit}/s" if part.ms else ""
    return [amount, reached, *_floor(part.ms, least.floor_ms(at, way))]


def _floor(ms: float, floor: float) -> list[str]:
    return [f"{floor:.3f}", f"{ms / floor:.2f}x" if floor else ""]


def kernel_table(kernels: list[Kernel], *, rows: int) -> str:
    """The kernels of one call, the longest first."""
    ms, count = Counter(), Counter()
    for kernel in kernels:
        name = kernel.name.replace("|", "/")
        key = kernel.component, kernel.phase, name if len(name) <= 70 else name[:67] + "..."
        ms[key] += kernel.ms
        count[key] += 1
    table = [[*key, count[key], f"{spent:.3f}"] for key, spent in ms.most_common(rows)]
    return markdown(["component", "direction", "kernel", "launches", "ms"], table, left=3)


def as_data(measured: Profile, floors: Floors, at: Ceilings) -> list[dict]:
    """A row a component and direction; what has no floor has None."""
    rows = []
    for name, way in dict.fromkeys((*measured.parts, *floors)):
        part, least = measured.parts.get((name, way)), floors.get((name, way))
        row = dict(component=name, direction=way, ms=None, launches=None, bytes=None, flops=None, floor_ms=None)
        if part is not None:
            row |= dict(ms=part.ms, launches=part.launches)
        if least is not None:
            row |= dict(bytes=least.bytes, flops=least.flops, floor_ms=least.floor_ms(at, way))
        rows.append(row)
    return rows


def _parser() -> CommandParser:
    parser = CommandParser("profile", __doc__)
    add_shape_options(parser, seqlen=[8192 if torch.cuda.is_available() else 1024])
    add_ungated(parser)
    parser.add_argument("--repeats", type=count, default=5, help="calls whose median is shown (default: 5)")
    parser.add_argument("--rows", type=int, default=15, help="kernels shown, on a GPU (default: 15)")
    return parser
