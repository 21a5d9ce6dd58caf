"""`python -m fuzz`: draw cases for a while, and check what has to hold for every one of them.

Exit codes: 0 every example passed; 1 a property failed (with --mutate: the planted fault was found); 2 no example ran,
or the arguments are wrong; 130 it was interrupted, once it has said what came out until then.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from tqdm import tqdm

from fuzz.mutations import all_mutations, planted
from fuzz.pool import Tally, run_jobs
from fuzz.prop import GPU, on_this_machine, properties
from fuzz.run import check_one, parse_case, read_failure, write_failure
from nsa_tools.report.tables import markdown

PASSED, FAILED, NOTHING_RAN = 0, 1, 2
MINUTES = 3.0


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    if options.list_mutations:
        rows = [[m.name, m.needs or "nothing", f"{m.seconds:.0f}", m.what] for m in all_mutations().values()]
        print(markdown(["mutation", "needs", "within, s", "what is wrong"], rows))
        return PASSED
    if options.list:
        rows = [[p.name, p.needs or "nothing", len(p.kinds)] for p in properties().values()]
        print(markdown(["property", "needs", "kinds of kernels"], rows))
        return PASSED
    if options.mutate and options.mutate not in all_mutations():
        print(f"no mutation is called {options.mutate!r}; see --list-mutations", file=sys.stderr)
        return NOTHING_RAN
    return _fuzz(options) if options.replay is None else _replay(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fuzz",
        description=__doc__,
        epilog="Commands of their own, each with --help: soak, training steps of changing shapes and the memory they "
        "take; sanitize, chosen kernels for compute-sanitizer to look at.",
    )
    parser.add_argument("--minutes", type=float, help=f"how long ({MINUTES:g}; of a mutation, what its table says)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (all cores)")
    parser.add_argument(
        "--only", metavar="TEXT", nargs="+",
        help="properties whose name holds this, or one of these; without it those of `compiling` are left out",
    )  # fmt: skip
    parser.add_argument("--folder", type=Path, default=Path(".fuzz"), help="of examples, failures and kernels (.fuzz)")
    parser.add_argument("--replay", metavar="FILE", type=Path, help="check the case of a failure file again")
    parser.add_argument("--mutate", metavar="NAME", help="plant this fault and look for it")
    parser.add_argument("--list-mutations", action="store_true")
    parser.add_argument("--list", action="store_true", help="print the properties")
    return parser


def _replay(options: argparse.Namespace) -> int:
    name, text = read_failure(options.replay)
    with planted(options.mutate) if options.mutate else nullcontext():
        failure = check_one(properties()[name], parse_case(text))
    if failure is None:
        print(f"{name} holds for {text}")
        return PASSED
    print(f"{failure.trace}\n{name} does not hold for\n{text}\n{failure.error}")
    return FAILED


def _fuzz(options: argparse.Namespace) -> int:
    fault = all_mutations()[options.mutate] if options.mutate else None
    if fault is None:
        only = options.only or [""]
        chosen = [p for p in on_this_machine() if any(text in p.name for text in only)]
        chosen = [p for p in chosen if options.only or p.needs in ("", GPU)]
        minutes = MINUTES
    else:
        chosen, minutes = [p for p in on_this_machine() if p.name.startswith(fault.properties)], fault.seconds / 60
    minutes = minutes if options.minutes is None else options.minutes
    started, seconds = time.monotonic(), minutes * 60
    line = "{desc}: {elapsed} of " + f"{minutes:g} min" + "{postfix}"
    with tqdm(total=seconds, desc="fuzz", bar_format=line, file=sys.stderr, mininterval=1) as bar:

        def notice(tally: Tally) -> None:
            bar.set_postfix_str(f"{tally.total} examples, {len(tally.failures)} failed", refresh=False)
            bar.update(time.monotonic() - started - bar.n)

        tally = run_jobs(chosen, options.workers, options.folder, started + seconds, fault=fault, notice=notice)
        bar.refresh()
    _report(tally, options)
    if tally.interrupted:
        raise KeyboardInterrupt
    return NOTHING_RAN if not tally.total else FAILED if tally.failures else PASSED


def _report(tally: Tally, options: argparse.Namespace) -> None:
    """Print the examples of each property, and the failures, which are written too."""
    rows = [[name, outcome.examples, f"{outcome.seconds:.1f}"] for name, outcome in sorted(tally.outcomes.items())]
    print(markdown(["property", "examples", "s"], rows))
    more = f" --mutate {options.mutate!r}" if options.mutate else ""
    for failure in tally.failures.values():
        path = write_failure(failure, options.folder / ("planted" if options.mutate else "failures"), more)
        print(f"\n{failure.property} does not hold for\n    {failure.case}\n    {failure.error[:1500]}")
        if not failure.case or failure.error.startswith(("hang", "the worker")):
            print(failure.trace)  # what the worker printed
        print(f"    replay: python -m fuzz --replay {path}{more}")
    print(f"\n{tally.total} examples of {len(tally.outcomes)} properties, {len(tally.failures)} failed")
