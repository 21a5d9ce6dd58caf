"""One property, drawn and checked for a while; what the examples had, and the smallest failure, as a file too."""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import re
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import torch
from hypothesis.database import DirectoryBasedExampleDatabase

from fuzz import case as cases
from fuzz.prop import Property, Skip
from nsa_layer import NSAConfig
from nsa_tools.testing.cases import Case

NAMES = {name: value for name, value in vars(cases).items() if isinstance(value, type)}
NAMES |= {"Case": Case, "NSAConfig": NSAConfig, "torch": torch, "nan": float("nan"), "inf": float("inf")}


class _Over(BaseException):
    """Enough: neither the property's failure nor anything that hypothesis may catch."""


@dataclass(frozen=True)
class Budget:
    """The amount to draw.

    Attributes:
        examples, seconds: whichever ends first, counted from the end of the first example, which may have to compile.
        shrink: seconds for making a failure smaller.
        seed: of the drawing; None: always the same cases.
        database: a folder in which failing examples are kept and tried first; None: none.
    """

    examples: int = 100
    seconds: float = 60.0
    shrink: float = 20.0
    seed: int | None = None
    database: str | None = None


@dataclass
class Failure:
    """The smallest case found for which a property does not hold."""

    property: str
    case: str
    error: str
    trace: str = ""

    @classmethod
    def of(cls, prop: Property, case: str, error: Exception) -> Failure:
        return cls(prop.name, case, f"{type(error).__name__}: {error}", traceback.format_exc())


@dataclass
class Outcome:
    """The outcome of one property's run."""

    examples: int = 0
    seconds: float = 0.0
    failure: Failure | None = None


def run_property(
    prop: Property, budget: Budget, *, kind: int = 0, before: Callable[[object], None] = lambda case: None
) -> Outcome:
    """Draw cases and check them.

    Args:
        before: called with each case before it is checked.
    """
    outcome, started, end = Outcome(), time.monotonic(), math.inf

    def check(case: object) -> None:
        nonlocal end
        if time.monotonic() > end:
            raise _Over
        before(case)
        try:
            prop.check(case)
        except Skip:
            return
        except Exception as error:
            outcome.examples += 1
            text, kept = repr(case), outcome.failure
            if kept is None:
                end = time.monotonic() + budget.shrink
            if kept is None or (len(text), text) <= (len(kept.case), kept.case):
                outcome.failure = Failure.of(prop, text, error)
            raise
        if outcome.failure is None:
            end = min(end, time.monotonic() + budget.seconds)
            outcome.examples += 1

    test = hypothesis.given(prop.strategy(kind))(check)
    if budget.seed is not None:
        test = hypothesis.seed(budget.seed)(test)
    database = None if budget.database is None else Path(budget.database) / f"{prop.name}-{kind}".replace(" ", "-")
    test = hypothesis.settings(
        max_examples=budget.examples,
        deadline=None,
        derandomize=budget.seed is None,
        database=None if database is None else DirectoryBasedExampleDatabase(database),
        suppress_health_check=list(hypothesis.HealthCheck),
        print_blob=False,
        report_multiple_bugs=False,
    )(test)
    with contextlib.suppress(_Over), contextlib.redirect_stdout(io.StringIO()):
        try:
            test()
        except Exception as error:
            if outcome.failure is None:  # the strategy's own fault, or hypothesis's
                outcome.failure = Failure.of(prop, "", error)
    outcome.seconds = time.monotonic() - started
    return outcome


def check_one(prop: Property, case: object) -> Failure | None:
    """Check a single case."""
    try:
        prop.check(case)
    except Skip:
        return None
    except Exception as error:
        return Failure.of(prop, repr(case), error)
    return None


def parse_case(text: str) -> object:
    """The case that a repr stands for."""
    return eval(text, {"__builtins__": {}}, dict(NAMES))  # a file of one's own, which a replay runs anyway


def write_failure(failure: Failure, folder: Path, options: str = "") -> Path:
    """Write it, named by the property and the case alone. options: of the command that replays it."""
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(f"{failure.property}{failure.case}".encode()).hexdigest()[:10]
    slug = "".join(c if c.isalnum() else "-" for c in failure.property)
    path = folder / f"{slug}-{digest}.txt"
    path.write_text(
        f"property: {failure.property}\n"
        f"case: {failure.case}\n"
        f"replay: python -m fuzz --replay {path}{options}\n\n"
        f"{failure.error}\n\n{failure.trace}",
        encoding="utf-8",
    )
    return path


def read_failure(path: Path) -> tuple[str, str]:
    """The property's name and the case's text."""
    found = re.match("property: (.*)\ncase: (.*)\n", path.read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f"{path} is no failure file: expected lines 'property: ...' and 'case: ...'")
    return found[1], found[2]
