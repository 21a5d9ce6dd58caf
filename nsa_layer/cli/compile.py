"""`python -m nsa_layer compile`: compile the kernels that the layer asks for, without a GPU, and say which fail.

With --seqlen it compiles all that calls of one shape launch, into the kernel cache, where the calls find them.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, as_completed, wait
from dataclasses import dataclass, fields
from typing import TypeVar

from nsa_layer.cli import ahead
from nsa_layer.cli.arguments import output_file
from nsa_layer.cli.shape import add_shape_options, shapes
from nsa_layer.fork import fork_status
from nsa_layer.kernel_cases import ENVIRONMENT, KernelCase, all_cases, compile_case, covering_cases, grouped_by_arch
from nsa_layer.support import Request, missing_feature

Result = TypeVar("Result")
MULTIPROCESSORS = "FLASH_ATTENTION_NUM_SMS"


@dataclass(frozen=True)
class Outcome:
    """What came of one case: the seconds it took, or the error."""

    case: KernelCase
    seconds: float
    error: str | None


def main(argv: list[str]) -> int:
    """Exit code 0 if every case compiled, 1 if one failed, 2 for a bad argument or kernels that are not the fork's."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        _check(options, parser)
        calls = _calls(options)
    except (ValueError, NotImplementedError) as error:
        print(f"compile: {error}", file=sys.stderr)
        return 2
    status = fork_status()
    if status.kind != "patched":
        print(f"compile: {status.detail}; {status.remedy}", file=sys.stderr)
        return 2
    return _ahead(calls, options) if calls else _sweep(options)


def _sweep(options: argparse.Namespace) -> int:
    cases = [
        case
        for case in (all_cases() if options.all else covering_cases())
        if case.arch in options.arch and all(str(getattr(case, name)) == value for name, value in options.only)
    ]
    if not cases:
        asked = " ".join(f"{name}={value}" for name, value in options.only)
        among = "all cases" if options.all else "the covering set; --all looks among all cases"
        print(f"compile: no case has {asked} for {options.arch} in {among}", file=sys.stderr)
        return 2
    outcomes = sorted(_progress(run_cases(cases, jobs=options.jobs), len(cases)), key=lambda o: cases.index(o.case))
    failed = [outcome for outcome in outcomes if outcome.error]
    for outcome in failed:
        print(f"{outcome.case}\n    {outcome.error}", file=sys.stderr)
    text = summary(outcomes)
    print(text)
    if options.table:
        command = "make compile-all" if options.all else "python -m nsa_layer compile"
        options.table.write_text(
            f"# Kernels that compile\n\nMade by `{command}`; seconds are wall time, several at once.\n\n{text}\n"
        )
    return 1 if failed else 0


def run_cases(cases: list[KernelCase], *, jobs: int) -> Iterator[Outcome]:
    """Compile the cases in processes of their own, as many at once as `jobs`; yields them as they finish."""
    for arch, of_arch in grouped_by_arch(cases):
        with _workers(ENVIRONMENT[arch], min(jobs, len(of_arch))) as pool:
            yield from _finished([pool.submit(_attempt, case) for case in of_arch])


def _ahead(calls: list[ahead.Call], options: argparse.Namespace) -> int:
    """Compile all kernels of the calls for each architecture, as many at once as `--jobs`."""
    from nsa_layer.tables import markdown

    rows, failed = [], False
    for arch in options.arch:
        # The count of multiprocessors may be another part's; the rest is the architecture.
        target = ENVIRONMENT[arch] | {name: os.environ[name] for name in (MULTIPROCESSORS,) if name in os.environ}
        with _workers(target, options.jobs) as pool:
            try:
                named = {name: call for call in calls for name in pool.submit(ahead.kernels, call).result()}
            except (RuntimeError, ValueError, NotImplementedError) as error:
                print(f"compile: {error}", file=sys.stderr)
                return 2
            futures = [pool.submit(_attempt_one, call, name) for name, call in named.items()]
            outcomes = {name: said for name, said in _progress(_finished(futures), len(futures))}
        for name in named:
            taken, error = outcomes[name]
            said = f"failed: {error}" if error else "in the cache already" if taken is None else f"{taken:.1f}"
            rows.append([f"sm_{arch}a", name.split("/")[0], said])
            failed |= error is not None
    print("\n".join(call.shape.describe() for call in calls) + "\n")
    print(markdown(["target", "kernel", "seconds"], rows, left=2))
    return 1 if failed else 0


@contextlib.contextmanager
def _workers(target: dict[str, str], count: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that compile for a target: they are told so when they start."""
    context = multiprocessing.get_context("spawn")
    with _environment(target), ProcessPoolExecutor(count, mp_context=context) as pool:
        yield pool


def _finished(futures: list[Future[Result]]) -> Iterator[Result]:
    """Results as they come; what has not begun when nobody asks for more is given up."""
    try:
        yield from (future.result() for future in as_completed(futures))
    finally:
        for future in futures:
            future.cancel()
        wait(futures, return_when=FIRST_EXCEPTION)


def summary(outcomes: Iterable[Outcome]) -> str:
    """A table of branch, direction and architecture: how many compiled, how many did not, the slowest."""
    from nsa_layer.tables import markdown

    groups: dict[tuple, list[Outcome]] = {}
    for outcome in outcomes:
        case = outcome.case
        key = (f"sm_{case.arch}a", case.branch, "backward" if case.backward else "forward", case.D, case.dtype)
        groups.setdefault(key, []).append(outcome)
    rows = []
    for key, group in sorted(groups.items()):
        count = Counter(outcome.error is None for outcome in group)
        rows.append([*key, count[True], count[False], f"{max(outcome.seconds for outcome in group):.1f}"])
    header = ["target", "branch", "direction", "D", "dtype", "compiled", "failed", "slowest, s"]
    return markdown(header, rows, left=5)


def _attempt(case: KernelCase) -> Outcome:
    """One case in a worker: whatever goes wrong in the compiler is this case's result, not the sweep's end."""
    warnings.simplefilter("ignore")
    try:
        return Outcome(case, compile_case(case), None)
    except Exception as error:  # the compiler raises many kinds
        return Outcome(case, 0.0, _first_line(error))


def _attempt_one(call: ahead.Call, name: str) -> tuple[str, tuple[float | None, str | None]]:
    """One kernel of a call in a worker: its name, and the seconds or the error."""
    warnings.simplefilter("ignore")
    try:
        return name, (ahead.compile_kernel(call, name), None)
    except Exception as error:  # the compiler raises many kinds
        return name, (None, _first_line(error))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Workers inherit what is set here."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def _progress(outcomes: Iterator[Outcome], total: int) -> Iterator[Outcome]:
    from tqdm import tqdm

    with tqdm(total=total, unit="kernel") as bar:
        for outcome in outcomes:
            bar.update()
            yield outcome


def _field(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or name not in {field.name for field in fields(KernelCase)}:
        raise argparse.ArgumentTypeError(f"{text!r} is not FIELD=VALUE with a field of KernelCase")
    return name, value


def _check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Raise ValueError for options that do not go together."""
    if options.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {options.jobs}")
    alone = ("arch", "jobs", "seqlen")
    changed = {name for name, value in vars(options).items() if value != parser.get_default(name)} - {*alone}
    sweep = sorted(changed & {"all", "only", "table"})
    if options.seqlen is not None and sweep:
        raise ValueError(f"--{sweep[0]} is for the sweep over cases, --seqlen for calls of one shape")
    of_calls = sorted(changed - {*sweep})
    if options.seqlen is None and of_calls:
        raise ValueError(f"--{of_calls[0].replace('_', '-')} needs --seqlen: the length of the calls")


def _calls(options: argparse.Namespace) -> list[ahead.Call]:
    """The calls that were asked for, which the kernels can do on each architecture; none for the sweep.

    Raises:
        ValueError, NotImplementedError: a size does not fit, or the kernels lack something.
    """
    if options.seqlen is None:
        return []
    backward = options.mode == "both"
    what = dict(gated=not options.ungated, projected=options.compress_weights, backward=backward)
    calls = [ahead.Call(shape, **what) for shape in shapes(options)]
    one = calls[0].shape
    for arch in options.arch:
        missing = missing_feature(Request(arch, one.dtype, one.D, one.Dv, one.config, backward))
        if missing is not None:
            raise NotImplementedError(f"sm_{arch}: the kernels do not support {missing}; --arch names others")
    return calls


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m nsa_layer compile", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--all", action="store_true", help="every case; default: a small set that covers all pairs of options"
    )
    parser.add_argument("--arch", type=int, nargs="+", choices=sorted(ENVIRONMENT), default=sorted(ENVIRONMENT))
    parser.add_argument(
        "--only",
        type=_field,
        nargs="+",
        default=[],
        metavar="FIELD=VALUE",
        help="such as branch=slc T=100",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once (default: one a core)")
    parser.add_argument("--table", type=output_file, help="also write the summary to this Markdown file")
    calls = parser.add_argument_group("the kernels of calls of one shape, instead of the set; --seqlen asks for them")
    add_shape_options(calls, seqlen=None, runs=False)
    calls.add_argument("--mode", choices=("forward", "both"), default="both", help="both: backward too (default)")
    calls.add_argument("--ungated", action="store_true", help="without gate_weight: 1/3 of each branch")
    calls.add_argument("--compress-weights", action="store_true", help="with compress_k_weight and compress_v_weight")
    return parser
