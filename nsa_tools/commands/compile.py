"""`python -m nsa_layer compile`: compile kernels into the kernel cache without a GPU, and say which fail.

With --seqlen all kernels that calls of one shape launch, which then find them there; without it kernels of calls that
cover the options of the layer.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator

from tqdm import tqdm

from nsa_layer.fork import fork_status
from nsa_layer.support import missing_feature
from nsa_layer.warm_up.api import compile_calls
from nsa_layer.warm_up.jobs import ENVIRONMENT, Kernel
from nsa_tools.commands.options import CommandParser, add_shape_options, add_ungated, count, shapes
from nsa_tools.report.tables import markdown
from nsa_tools.shape import Shape
from nsa_tools.testing.covering_calls import all_calls, covering_calls

MULTIPROCESSORS = "FLASH_ATTENTION_NUM_SMS"


def main(argv: list[str]) -> int:
    """Compile, and return 0 if everything compiled, 1 if a kernel failed."""
    parser = _parser()
    options = parser.parse_args(argv)
    with parser.checks():
        _check(options, parser)
        calls = {arch: _calls(arch, options) for arch in options.arch}
    status = fork_status()
    if status.kind != "patched":
        parser.error(f"{status.detail}; {status.remedy}")
    try:
        begin = time.perf_counter()
        kernels = {arch: list(compile_for(arch, calls[arch], jobs=options.jobs)) for arch in calls}
    except (RuntimeError, ValueError, NotImplementedError) as error:
        parser.error(str(error))
    failed = [kernel for of_arch in kernels.values() for kernel in of_arch if kernel.error]
    for kernel in failed:
        print(f"{kernel.name} of {kernel.call}\n    {kernel.error}", file=sys.stderr)
    text = f"{summary(kernels)}\n\n{time.perf_counter() - begin:.1f} s, {options.jobs} at once"
    if options.seqlen is not None:
        print("\n".join(call.describe() for call in calls[options.arch[0]]) + "\n")
    print(text)
    return 1 if failed else 0


def compile_for(arch: int, calls: list[Shape], *, jobs: int) -> Iterator[Kernel]:
    """Compile each kernel of the calls once, in so many processes; yields kernels as they are done."""
    # Parts of an architecture differ in their number of multiprocessors.
    target = ENVIRONMENT[arch] | {name: os.environ[name] for name in (MULTIPROCESSORS,) if name in os.environ}
    said = compile_calls([call.signature() for call in calls], target=target, jobs=jobs)
    yield from tqdm(said, total=next(said), unit="kernel", desc=f"sm_{arch}a")


def summary(kernels: dict[int, list[Kernel]]) -> str:
    """A table by architecture and kernel: how many variants compiled, were in the cache, and failed; the slowest."""
    groups: dict[tuple[str, str], list[Kernel]] = {}
    for arch, of_arch in kernels.items():
        for kernel in of_arch:
            groups.setdefault((f"sm_{arch}a", kernel.name.split("/")[0]), []).append(kernel)
    rows = []
    for key, group in sorted(groups.items()):
        failed = sum(kernel.error is not None for kernel in group)
        seconds = [kernel.seconds for kernel in group if kernel.seconds is not None]
        slowest = f"{max(seconds):.1f}" if seconds else ""
        rows.append([*key, len(seconds), len(group) - len(seconds) - failed, failed, slowest])
    return markdown(["target", "kernel", "compiled", "in the cache already", "failed", "slowest (s)"], rows, left=2)


def _check(options: argparse.Namespace, parser: CommandParser) -> None:
    """Raise ValueError for options that do not go together."""
    changed = {name for name, value in vars(options).items() if value != parser.get_default(name)}
    if options.seqlen is not None and options.all:
        raise ValueError("--all is for calls that cover the options, --seqlen for calls of one shape")
    if options.seqlen is None and (of_calls := sorted(changed - {"all", "arch", "jobs", "seqlen"})):
        raise ValueError(f"--{of_calls[0].replace('_', '-')} needs --seqlen: the length of the calls")


def _calls(arch: int, options: argparse.Namespace) -> list[Shape]:
    """The calls that were asked for.

    Raises:
        ValueError, NotImplementedError: a size does not fit, or the kernels lack something.
    """
    if options.seqlen is None:
        return all_calls() if options.all else covering_calls()
    calls = shapes(options)
    missing = missing_feature(calls[0].call(), arch)
    if missing is not None:
        raise NotImplementedError(f"sm_{arch}: the kernels do not support {missing}; --arch names others")
    return calls


def _parser() -> CommandParser:
    parser = CommandParser("compile", __doc__)
    parser.add_argument(
        "--all", action="store_true", help="calls with all combinations of options; default: with every pair"
    )
    archs = sorted(ENVIRONMENT)
    parser.add_argument("--arch", type=int, nargs="+", choices=archs, default=archs, help="default: both")
    parser.add_argument("--jobs", type=count, default=os.cpu_count() or 1, help="processes (default: one a core)")
    calls = parser.add_argument_group("kernels of calls of one shape instead; --seqlen asks for them")
    add_shape_options(calls, seqlen=None, runs=False)
    add_ungated(calls)
    calls.add_argument("--compress-weights", action="store_true", help="with compress_k_weight and compress_v_weight")
    return parser
