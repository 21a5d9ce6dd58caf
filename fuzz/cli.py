"""`python -m fuzz`: draw cases for a while, and check what has to hold for every one of them.

Exit codes: 0 every example passed; 1 a property failed (with --mutate: the planted fault was found); 2 no example ran,
or the arguments are wrong; 130 it was interrupted, once it has said what came out until then.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from fuzz.case import Attention
from fuzz.kinds import in_stock
from fuzz.mutations import Mutation, all_mutations, planted
from fuzz.pool import Job, Pool, Tally
from fuzz.prop import Property, on_this_machine, properties
from fuzz.run import Budget, check_one, parse_case, read_failure, write_failure
from nsa_tools.report.tables import markdown

PASSED, FAILED, NOTHING_RAN = 0, 1, 2
Suits = Callable[[Attention | None], bool]
MANY = 2000  # examples of a slice; its seconds end it before
SLICE = 1.0  # seconds with a property in search of a planted fault, from the first example on


@dataclass(frozen=True)
class Profile:
    """Length and depth of a run.

    Attributes:
        minutes: unless said otherwise. passes: over all properties, at most; None: until the time is over.
        slice: seconds that a worker stays with a property, and examples it draws there at most.
        random: cases differ from run to run, and failing ones are kept in a database.
        needs: what properties may need, besides nothing.
        patience: seconds that one example may take before it counts as a hang.
    """

    minutes: float
    passes: int | None
    slice: float
    random: bool
    needs: tuple[str, ...]
    patience: float


PROFILES = {
    "pr": Profile(minutes=1, passes=1, slice=10, random=False, needs=("gpu",), patience=60),
    "ci": Profile(minutes=3, passes=None, slice=3, random=True, needs=("gpu",), patience=120),
    "nightly": Profile(minutes=10, passes=None, slice=5, random=True, needs=("gpu", "sm_90", "sm_100"), patience=180),
}


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
    if options.replay is not None:
        return _replay(options)
    if options.mutate is not None:
        return _mutate(options)
    return _fuzz(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fuzz",
        description=__doc__,
        epilog="Commands of their own, each with --help: soak, training steps of changing shapes and the memory they "
        "take; sanitize, chosen kernels under compute-sanitizer; wrong-calls, calls that have to be refused.",
    )
    parser.add_argument("--minutes", type=float, help="how long; the profile says, unless given")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (all cores)")
    parser.add_argument("--profile", choices=PROFILES, default="ci")
    parser.add_argument("--only", metavar="TEXT", nargs="+", help="properties whose name holds this, or one of these")
    parser.add_argument("--stock", action="store_true", help="only what the unpatched flash_attn.cute has to satisfy")
    parser.add_argument("--folder", type=Path, default=Path(".fuzz"), help="of examples, failures and kernels (.fuzz)")
    parser.add_argument("--seed", type=int, help="of a run that can be repeated")
    parser.add_argument("--replay", metavar="FILE", type=Path, help="check the case of a failure file again")
    parser.add_argument(
        "--mutate", metavar="NAME", help="plant this fault and look for it; 'all' for one after another"
    )
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


def jobs(
    chosen: Sequence[Property], profile: Profile, folder: Path, seed: int, suits: Suits = lambda kind: True
) -> Iterator[Job]:
    """Slices of the properties in turn, in another order each time round; of those kinds of kernels that suit."""
    draw, database = random.Random(seed), str(folder / "examples") if profile.random else None
    units = [(prop, number) for prop in chosen for number, kind in enumerate(prop.kinds) if suits(kind)]
    turn = 0
    while profile.passes is None or turn < profile.passes:
        draw.shuffle(units)
        for prop, kind in units:
            own = draw.randrange(1 << 30) if profile.random else None
            examples = MANY if profile.random else prop.pr
            yield Job(prop, kind, Budget(examples=examples, seconds=profile.slice, seed=own, database=database))
        turn += 1


def by_need(
    chosen: Sequence[Property], profile: Profile, folder: Path, seed: int, suits: Suits
) -> dict[str, Iterator[Job]]:
    """Jobs of those that need the same process; GPU work and CPU work share one."""
    groups: dict[str, list[Property]] = {}
    for prop in chosen:
        if not prop.needs or prop.needs in profile.needs:
            groups.setdefault(prop.needs if prop.needs.startswith("sm") else "", []).append(prop)
    return {need: jobs(props, profile, folder, seed + i, suits) for i, (need, props) in enumerate(groups.items())}


def _fuzz(options: argparse.Namespace) -> int:
    profile = PROFILES[options.profile]
    only = options.only or [""]
    chosen = [p for p in on_this_machine(options.stock) if any(text in p.name for text in only)]
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 30)
    minutes = profile.minutes if options.minutes is None else options.minutes
    suits = in_stock if options.stock else lambda kind: True
    tally = _run(by_need(chosen, profile, options.folder, seed, suits), profile, minutes, options)
    print(_coverage(tally))
    for failure in tally.failures.values():
        path = write_failure(failure, options.folder / "failures")
        print(f"\n{failure.property} does not hold for\n    {failure.case}\n    {failure.error[:1500]}")
        if not failure.case or failure.error.startswith(("hang", "the worker")):
            print(failure.trace)  # what the worker printed
        print(f"    replay: python -m fuzz --replay {path}")
    total = sum(tally.examples.values())
    print(f"\n{total} examples of {len(tally.examples)} properties, {len(tally.failures)} failed, seed {seed}")
    if tally.interrupted:
        raise KeyboardInterrupt
    return NOTHING_RAN if total == 0 else FAILED if tally.failures else PASSED


def _run(groups: dict, profile: Profile, minutes: float, options: argparse.Namespace, **more: object) -> Tally:
    """Run with a progress line."""
    started, seconds = time.monotonic(), minutes * 60
    line = "{desc}: {elapsed} of " + f"{minutes:g} min" + "{postfix}"
    with tqdm(total=seconds, desc="fuzz", bar_format=line, file=sys.stderr, mininterval=1) as bar:

        def notice(tally: Tally) -> None:
            examples = sum(tally.examples.values())
            bar.set_postfix_str(f"{examples} examples, {len(tally.failures)} failed, {tally.hangs} hung", refresh=False)
            bar.update(time.monotonic() - started - bar.n)

        pool_options = dict(workers=options.workers, folder=options.folder, patience=profile.patience, notice=notice)
        tally = Pool(**pool_options | more).run(groups, started + seconds)
        bar.refresh()
        return tally


def _mutate(options: argparse.Namespace) -> int:
    known = all_mutations()
    runnable = {p.name for p in on_this_machine()}
    if options.mutate == "all":
        names = [n for n, m in known.items() if any(r.startswith(p) for r in runnable for p in m.properties)]
    elif options.mutate in known:
        names = [options.mutate]
    else:
        print(f"no mutation is called {options.mutate!r}; see --list-mutations", file=sys.stderr)
        return NOTHING_RAN
    rows, caught, ran, interrupted = [], 0, 0, False
    for name in names:
        if interrupted:
            break
        started = time.monotonic()
        tally = _hunt(known[name], options)
        took = time.monotonic() - started
        ran, interrupted = ran + sum(tally.examples.values()), tally.interrupted
        failure = min(tally.failures.values(), key=lambda f: len(f.case), default=None)
        if failure is not None and failure.case and check_one(properties()[failure.property], parse_case(failure.case)):
            print(f"{name}: {failure.property} fails without the fault too\n    {failure.case}")
            rows.append([name, "fails without it", "", f"{took:.1f}", failure.examples])
        elif failure is not None and failure.case:
            caught += 1
            path = write_failure(failure, options.folder / "planted", name)
            print(f"{name}: found in {took:.1f} s by {failure.property}\n    {failure.case}\n    {failure.error[:300]}")
            print(f"    replay: python -m fuzz --replay {path} --mutate {name!r}")
            rows.append([name, failure.property, f"{failure.found:.1f}", f"{took:.1f}", failure.examples])
        else:
            print(f"{name}: not found, {sum(tally.examples.values())} examples")
            rows.append([name, "not found", "", f"{took:.1f}", sum(tally.examples.values())])
    header = ["mutation", "found by", "drawing until then, s", "in all, s", "examples before"]
    print("\n" + markdown(header, rows, left=2) + f"\n\n{caught} of {len(names)} found, {ran} examples")
    if interrupted:
        raise KeyboardInterrupt
    return NOTHING_RAN if not ran else FAILED if caught == len(names) else PASSED


def _hunt(mutation: Mutation, options: argparse.Namespace) -> Tally:
    """Draw from the mutation's properties until one fails, or its time is over."""
    chosen = [p for p in on_this_machine() if p.name.startswith(mutation.properties)]
    profile = PROFILES["ci"]
    budget = dict(database=None, shrink=2.0, seconds=SLICE)  # what counts is whether it is found
    slices = jobs(chosen, profile, options.folder / "hunt", options.seed or 0, mutation.suits)
    slices = (replace(job, budget=replace(job.budget, **budget)) for job in slices)
    minutes = mutation.seconds / 60 if options.minutes is None else options.minutes
    hangs = 20.0 if mutation.name == "codec hangs" else profile.patience  # kernels have to be compiled in that time
    workers = options.workers if mutation.needs else min(options.workers, max(1, len(chosen)))
    more = dict(workers=workers, mutation=mutation.name, patience=hangs, stop=lambda tally: bool(tally.failures))
    return _run({"": slices} if chosen else {}, profile, minutes, options, **more)


def _coverage(tally: Tally) -> str:
    """Examples of each property, and how often the drawn cases had what."""
    rows = []
    for name in sorted(tally.examples):
        counts: Counter = tally.features.get(name, Counter())
        shown = ", ".join(f"{feature} {count}" for feature, count in counts.most_common())
        rows.append([name, tally.examples[name], f"{tally.seconds[name]:.1f}", shown])
    return markdown(["property", "examples", "s", "of which"], rows)
