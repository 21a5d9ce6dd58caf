"""`python -m nsa_layer memory`: peak memory of `nsa` above its inputs q, k and v, predicted and measured.

The prediction is that of the kernels' plan: groups of key/value heads one after the other, and outputs of branches kept
or computed again. What is measured has workspace besides, and another plan with --backend eager. GiB are 2**30 bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import torch

from nsa_tools.commands.options import CommandParser, add_shape_options, add_ungated, backend_of, shapes
from nsa_tools.measure.call_memory import STEP, RepeatedCall, components, find_longest, measurement
from nsa_tools.report.files import write_json
from nsa_tools.report.results import provenance, without_paths
from nsa_tools.report.tables import gib, markdown
from nsa_tools.shape import Shape

ALLOCATORS = ("expandable_segments:False", "expandable_segments:True")


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = _parser()
    given = parser.parse_args(argv)
    if given.no_measure and given.dtype is None:
        given.dtype = "bf16"  # predictions are of the kernels, which take no fp32
    with parser.checks():
        cases = shapes(given)
        backend = None if given.no_measure else backend_of(cases[0], given.backend)
        gpu = cases[0].device.startswith("cuda")
        for name in ("components", "allocators", "raw"):
            if getattr(given, name) and not gpu:
                raise ValueError(f"--{name} needs a GPU, got --device {cases[0].device}")
        if given.longest and not gpu and given.total is None:
            raise ValueError("--longest without a GPU needs --total, the GiB of one")
        if given.longest and not gpu and backend is not None:
            raise ValueError("--longest without a GPU needs --no-measure")
    if given.raw:
        RepeatedCall(cases[-1], backend).call()
        torch.cuda.synchronize()
        peaks = dict(allocated=torch.cuda.max_memory_allocated(), reserved=torch.cuda.max_memory_reserved())
        print(json.dumps(peaks))
        return 0
    total = int(given.total * 2**30) if given.total else torch.cuda.mem_get_info()[1] if gpu else None
    what = dict(gated=cases[0].gate != "none", backward=cases[0].backward, shape=cases[-1].describe())
    document = provenance("memory", argv, cases[0].device) | what
    document |= dict(rows=[], components=None, longest=None, allocators=None)
    for part, found, text in _parts(given, cases, backend, total, argv):
        document[part] = found
        print(text, flush=True)
        if given.json:
            write_json(given.json, document)
    return 0


def _parts(
    given: argparse.Namespace, cases: list[Shape], backend: str | None, total: int | None, argv: list[str]
) -> Iterator[tuple[str, object, str]]:
    """Name, finding and text of each part that was asked for, one after the other."""
    if given.longest:
        found = find_longest(cases[0], backend, total)
        yield "longest", found, longest_text(found)
        return
    if given.components:
        found = components(cases[-1], backend)
        yield "components", found, component_table(found) + "\n"
    found = [measurement(shape, backend, total) for shape in cases]
    yield "rows", found, table(found) + part_table(found)
    if given.allocators:
        torch.cuda.empty_cache()
        options = [argument for argument in without_paths(argv) if argument != "--allocators"]
        found = {setting: _peaks_with(setting, options) for setting in ALLOCATORS}
        yield "allocators", found, "\n" + allocator_table(found, cases[-1].T)


def table(found: list[dict]) -> str:
    """Each of `measurement` in GiB, below a line that says so."""
    parts = ("outputs", "gradients", "saved", "forward", "backward", "peak")
    measured, rows = any(one["status"] != "not measured" for one in found), []
    for one in found:
        groups = f"{one['groups']}" + ("" if one["kept"] is None else f", {one['kept']} of 3")
        expected = one["predicted"]
        row = [f"{one['T']:,}", groups, gib(one["inputs"]), *(gib(expected[name]) for name in parts)]
        if measured:
            peak = one["peak"]
            row += [one["status"], ""] if peak is None else [gib(peak), f"{peak / expected['peak']:.2f}"]
        rows.append(row)
    header = ["T", "groups, kept", "q, k, v", *parts[:-1], "predicted peak"]
    title = (
        "GiB; peaks are above q, k and v. Groups of key/value heads run in turn; branch outputs are kept for backward."
    )
    return f"{title}\n\n" + markdown(header + (["measured peak", "measured / predicted"] if measured else []), rows)


def part_table(found: list[dict]) -> str:
    """Predicted and measured components in GiB; nothing where none was measured."""
    names, rows = ("saved", "forward", "backward"), []
    for one in found:
        if measured := one["measured"]:
            cells = (gib(of[name]) if name in of else "" for name in names for of in (one["predicted"], measured))
            rows.append([f"{one['T']:,}", *cells])
    header = ["T", *(text for name in names for text in (f"{name}, predicted", "measured"))]
    return "\n\n" + markdown(header, rows) if rows else ""


def component_table(found: dict) -> str:
    """`components` in GiB, the largest first."""
    rows = [[name, gib(peak)] for name, peak in sorted(found["allocated"].items(), key=lambda item: -item[1])]
    rows += [["compiled kernels, outside the allocator", gib(found["kernels"])]]
    rows += [["context and libraries, outside the allocator", gib(found["context"])]]
    return markdown([f"T={found['T']:,}: while in", "allocated (GiB)"], rows)


def longest_text(found: dict) -> str:
    """`find_longest` in a line or two."""
    kept = "" if found["kept"] is None else f", {found['kept']} of 3 outputs kept"
    kind = "forward" if found["kept"] is None else "forward and backward"
    text = (
        f"longest {kind} in {found['total'] / 2**30:.1f} GiB, in steps of {STEP:,} tokens: "
        f"predicted {found['predicted']:,} ({found['groups']} groups of heads{kept})"
    )
    return text if found["measured"] is None else f"{text}\nmeasured: {found['measured']:,}"


def allocator_table(found: dict[str, dict], T: int) -> str:
    """Peaks by setting of the allocator."""
    rows = []
    for setting, one in found.items():
        cells = [one.get("error", ""), "", ""]
        if "error" not in one:
            lost = one["reserved"] / one["allocated"] - 1
            cells = [gib(one["allocated"]), gib(one["reserved"]), f"{lost:.1%}"]
        rows.append([setting, *cells])
    return markdown([f"PYTORCH_ALLOC_CONF, T={T:,}", "allocated (GiB)", "reserved (GiB)", "lost"], rows)


def _peaks_with(allocator: str, options: list[str]) -> dict:
    """The output of --raw with settings of the allocator, which PyTorch reads once a process."""
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": allocator, "PYTORCH_CUDA_ALLOC_CONF": allocator}
    command = [sys.executable, "-m", "nsa_layer", "memory", *options, "--raw"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode:
        return {"error": (result.stderr.strip().splitlines() or ["it failed"])[-1]}
    return json.loads(result.stdout.strip().splitlines()[-1])


def _parser() -> CommandParser:
    parser = CommandParser("memory", __doc__)
    add_shape_options(parser, seqlen=[8192, 65536] if torch.cuda.is_available() else [1024, 2048])
    add_ungated(parser)
    parser.add_argument("--no-measure", action="store_true", help="predict only, of bf16 unless --dtype says otherwise")
    parser.add_argument("--components", action="store_true", help="the peak inside each component, at the last length")
    parser.add_argument("--longest", action="store_true", help="find the longest call that fits")
    parser.add_argument("--total", type=float, metavar="GIB", help="memory to fit in (default: the GPU's)")
    parser.add_argument("--allocators", action="store_true", help="compare settings of PyTorch's allocator")
    parser.add_argument("--raw", action="store_true", help=argparse.SUPPRESS)
    return parser
