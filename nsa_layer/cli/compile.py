"""`python -m nsa_layer compile`: compile the kernels that the layer asks for, without a GPU, and say which fail."""

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

from nsa_layer.cli.arguments import output_file
from nsa_layer.fork import fork_status
from nsa_layer.kernel_cases import ENVIRONMENT, KernelCase, all_cases, compile_case, covering_cases, grouped_by_arch


@dataclass(frozen=True)
class Outcome:
    """What came of one case: the seconds it took, or the error."""

    case: KernelCase
    seconds: float
    error: str | None


def main(argv: list[str]) -> int:
    """Exit code 0 if every case compiled, 1 if one failed, 2 for a bad argument or kernels that are not the fork's."""
    options = _parser().parse_args(argv)
    if options.jobs < 1:
        print(f"compile: --jobs must be at least 1, got {options.jobs}", file=sys.stderr)
        return 2
    status = fork_status()
    if status.kind != "patched":
        print(f"compile: {status.detail}; {status.remedy}", file=sys.stderr)
        return 2
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
    context = multiprocessing.get_context("spawn")
    for arch, of_arch in grouped_by_arch(cases):
        with _environment(ENVIRONMENT[arch]), ProcessPoolExecutor(min(jobs, len(of_arch)), mp_context=context) as pool:
            futures: list[Future[Outcome]] = [pool.submit(_attempt, case) for case in of_arch]
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
        return Outcome(case, 0.0, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m nsa_layer compile", description=__doc__)
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
    return parser
