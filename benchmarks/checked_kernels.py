"""Every kernel that the benchmark of block-sparse attention times, compiled and checked by processes of their own.

Processes put kernels into the cache on disk, which the benchmark then takes them from. A job is what one kernel, or a
few, are compiled for; forward's come first, since backward's need its output, and those last that find most of their
kernels compiled by others.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

from sparse_variants import Setup, check, check_packed, compile_dense
from tile_lists import HQ, Case, D

from nsa_tools.report.tables import markdown

SMALL, LISTED = 1024, 6  # tokens, and blocks in a row at most, of what is checked
NO_PLAN = ("backward", "deterministic")  # ways whose CTAs may walk groups of heads
ORDERED = ("deterministic, planned",)  # ways that are in one pass if a plan says so
Errors = dict[str, dict[str, float | str]]
Jobs = dict[tuple, list[Setup]]


def pool(workers: int) -> ProcessPoolExecutor:
    """A pool of so many processes, which start and import ahead of their first job."""
    executor = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_ready)
    for _ in range(workers):
        executor.submit(time.sleep, 0)
    return executor


def most_workers() -> int:
    return max(1, min(16, os.cpu_count() or 2))


def _ready() -> None:
    """Import and start everything slow."""
    import torch

    import flash_attn.cute.interface  # noqa: F401

    torch.zeros(1, device="cuda")


def described(case: Case) -> str:
    heads = "query head" if case.heads == HQ else "key/value head"
    size = "" if case.head_dim == D else f", D {case.head_dim}"
    return f"{case.name}, by {heads}, {case.block_k} keys{size}"


def jobs(wanted: Iterable[tuple[Setup, Iterable[str]]]) -> Jobs:
    """The setups to compile and check, by the options that kernels are compiled for.

    Args:
        wanted: cases as they are measured, and the ways they are measured in.
    """
    found: Jobs = {}
    for setup, ways in wanted:
        case = replace(setup.case, T=SMALL, listed=min(setup.case.listed, LISTED))
        masks = tuple(case.mask.items())
        for way in ways:
            groups = setup.groups and way in NO_PLAN
            for wide in {False, setup.wide and way in ("forward", "backward", "two passes", "deterministic")}:
                kernel = (masks, case.heads, case.block_k, way, wide, groups, case.head_dim)
                own, small = found.setdefault(kernel, []), Setup(case, wide, groups)
                if described(case) not in {described(each.case) for each in own}:
                    own.append(small)
    return found


def errors(workers: ProcessPoolExecutor, wanted: Jobs, *, packed: bool) -> Errors:
    """The largest error of each kernel against fp32, over the largest value, or what went wrong: by lists and way."""
    of_case = [(described(setup.case), key[3], [setup]) for key, setups in wanted.items() for setup in setups]
    found: Errors = {name: {} for name, *_ in of_case}
    first = {key: setups for key, setups in wanted.items() if key[3] == "forward"}
    for stage in (first, {key: setups for key, setups in wanted.items() if key[3] != "forward"}):
        others: dict[str, Future] = {}
        if stage is not first:
            others["dense"] = workers.submit(compile_dense)
            if packed:
                others["packed selected"] = workers.submit(check_packed)
        in_turn = sorted(stage, key=lambda key: key[3] in NO_PLAN)
        futures = {key: workers.submit(_check_all, stage[key], key[3]) for key in in_turn}
        for key, future in futures.items():
            for name, error in future.result():
                found[name][key[3]] = _worse(found[name].get(key[3]), error)
        found |= {name: result for name, future in others.items() if (result := future.result())}
    return found


def _check_all(setups: list[Setup], way: str) -> list[tuple[str, float | str]]:
    return [(described(setup.case), check(setup, way)) for setup in setups]


def _worse(one: float | str | None, other: float | str) -> float | str:
    return other if one is None else one if isinstance(one, str) else max(one, other, key=_rank)


def _rank(error: float | str) -> float:
    return float("inf") if isinstance(error, str) else error


def table(found: Errors) -> str:
    ways = list(dict.fromkeys(way for own in found.values() for way in own))
    rows = [[name, *(_shown(own.get(way)) for way in ways)] for name, own in found.items()]
    return f"largest error over largest value, T {SMALL:,}\n\n{markdown(['lists', *ways], rows)}"


def _shown(error: float | str | None) -> str:
    return "-" if error is None else "failed" if isinstance(error, str) else f"{error:.1e}"


def failed(found: Errors, case: Case) -> list[str]:
    """The ways of a case's lists that are not to be timed."""
    return [way for way, error in found.get(described(case), {}).items() if isinstance(error, str)]


def failures(found: Mapping[str, Mapping[str, float | str]]) -> Iterator[str]:
    for name, own in found.items():
        yield from (f"{name}, {way} is left out: {error}" for way, error in own.items() if isinstance(error, str))


def say_failures(found: Errors) -> None:
    for line in failures(found):
        print(line, file=sys.stderr)
