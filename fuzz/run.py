"""One property, drawn and checked for a while: how many examples, what they had, and the smallest one that failed."""

from __future__ import annotations

import contextlib
import io
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis
from hypothesis.database import DirectoryBasedExampleDatabase

from fuzz.features import features
from fuzz.prop import Property, Skip

SHRINK_SECONDS = 20.0


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
    shrink: float = SHRINK_SECONDS
    seed: int | None = None
    database: str | None = None


@dataclass
class Failure:
    """The smallest case found for which a property does not hold."""

    property: str
    case: str
    error: str
    trace: str = ""
    found: float = 0.0  # seconds
    examples: int = 0  # before it was found


@dataclass
class Outcome:
    """The outcome of one property's run."""

    examples: int = 0
    seconds: float = 0.0
    features: Counter = field(default_factory=Counter)
    failure: Failure | None = None


def run_property(
    prop: Property, budget: Budget, *, kind: int = 0, before: Callable[[object], None] = lambda case: None
) -> Outcome:
    """Draw cases and check them.

    Args:
        before: called with each case before it is checked.
    """
    outcome, started = Outcome(), time.monotonic()
    since_failure: list[float] = []
    since_first: list[float] = []

    def check(case: object) -> None:
        now = time.monotonic()
        if since_failure and now > since_failure[0] + budget.shrink:
            raise _Over
        if not since_failure and since_first and now > since_first[0] + budget.seconds:
            raise _Over
        before(case)
        try:
            prop.check(case)
        except Skip:
            return
        except Exception as error:
            outcome.examples += 1
            if not since_failure:
                since_failure.append(now)
            _keep(outcome, prop, case, error, since_failure[0] - started)
            raise
        if not since_failure:
            since_first.append(time.monotonic())
            outcome.examples += 1
            outcome.features.update(features(case))

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
                trace = traceback.format_exc()
                outcome.failure = Failure(prop.name, "", f"{type(error).__name__}: {error}", trace, examples=0)
    outcome.seconds = time.monotonic() - started
    return outcome


def _keep(outcome: Outcome, prop: Property, case: object, error: Exception, found: float) -> None:
    text = repr(case)
    kept = outcome.failure
    if kept is None or (len(text), text) <= (len(kept.case), kept.case):
        said = f"{type(error).__name__}: {error}"
        before = outcome.examples if kept is None else kept.examples
        outcome.failure = Failure(prop.name, text, said, traceback.format_exc(), found, before)


def check_one(prop: Property, case: object) -> Failure | None:
    """Check a single case."""
    started = time.monotonic()
    try:
        prop.check(case)
    except Skip:
        return None
    except Exception as error:
        took = time.monotonic() - started
        return Failure(prop.name, repr(case), f"{type(error).__name__}: {error}", traceback.format_exc(), took, 1)
    return None
