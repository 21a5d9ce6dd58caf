"""`python -m nsa_layer memory`: peak memory of `nsa` above its inputs, predicted and measured.

The prediction is that of the kernels' plan: groups of key/value heads one after the other, and outputs of branches kept
or computed again. What is measured has workspace besides, and another plan with --backend eager. GiB are 2**30 bytes.
"""

from __future__ import annotations

import torch

from nsa_tools.commands.options import CommandParser, add_shape_options, add_ungated, backend_of, shapes
from nsa_tools.measure.call_memory import STEP, find_longest, measurement
from nsa_tools.report.files import write_json
from nsa_tools.report.results import provenance
from nsa_tools.report.tables import gib, markdown


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.no_measure and args.dtype is None:
        args.dtype = "bf16"  # predictions are of the kernels, which take no fp32
    with parser.checks():
        cases = shapes(args)
        backend = None if args.no_measure else backend_of(cases[0], args.backend)
        gpu = cases[0].device.startswith("cuda")
        if args.longest and not gpu and args.total is None:
            raise ValueError("--longest without a GPU needs --total, the GiB of one")
        if args.longest and not gpu and backend is not None:
            raise ValueError("--longest without a GPU needs --no-measure")
    total = int(args.total * 2**30) if args.total else torch.cuda.mem_get_info()[1] if gpu else None
    what = dict(gated=cases[0].gate != "none", backward=cases[0].backward, shape=cases[-1].describe())
    document = provenance("memory", argv, cases[0].device) | what
    if args.longest:
        result = document["longest"] = find_longest(cases[0], backend, total)
        print(longest_text(result))
    else:
        result = document["rows"] = [measurement(shape, backend, total) for shape in cases]
        print(table(result))
    if args.json:
        write_json(args.json, document)
    return 0


def table(result: list[dict]) -> str:
    """Each of `measurement` in GiB, below a line that says so."""
    parts = ("outputs", "gradients", "saved", "forward", "backward", "peak")
    measured, rows = any(one["status"] != "not measured" for one in result), []
    for one in result:
        groups = f"{one['groups']}" + ("" if one["kept"] is None else f", {one['kept']} kept")
        expected = one["predicted"]
        row = [f"{one['T']:,}", groups, gib(one["inputs"]), *(gib(expected[name]) for name in parts)]
        if measured:
            peak = one["peak"]
            row += [one["status"], ""] if peak is None else [gib(peak), f"{peak / expected['peak']:.2f}"]
        rows.append(row)
    header = ["T", "groups, kept", "inputs", *parts[:-1], "predicted peak"]
    title = "GiB; peaks are above the inputs. Groups of heads run in turn; branch outputs are kept for backward."
    return f"{title}\n\n" + markdown(header + (["measured peak", "measured / predicted"] if measured else []), rows)


def longest_text(result: dict) -> str:
    """`find_longest` in a line or two."""
    kept = "" if result["kept"] is None else f", {result['kept']} outputs kept"
    kind = "forward" if result["kept"] is None else "forward and backward"
    text = f"longest {kind} in {result['total'] / 2**30:.1f} GiB, in steps of {STEP:,} tokens: "
    text += f"predicted {result['predicted']:,} ({result['groups']} groups of heads{kept})"
    return text if result["measured"] is None else f"{text}\nmeasured: {result['measured']:,}"


def _parser() -> CommandParser:
    parser = CommandParser("memory", __doc__)
    add_shape_options(parser, seqlen=[8192, 65536] if torch.cuda.is_available() else [1024, 2048])
    add_ungated(parser)
    parser.add_argument("--no-measure", action="store_true", help="predict only, of bf16 unless --dtype says otherwise")
    parser.add_argument("--longest", action="store_true", help="find the longest call that fits")
    parser.add_argument("--total", type=float, metavar="GIB", help="memory to fit in (default: the GPU's)")
    return parser
