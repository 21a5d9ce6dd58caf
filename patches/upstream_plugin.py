"""The pytest plugin of `python -m patches test-upstream`: picks the cases of one part and records their outcomes.

Upstream's tests are not changed. What to run comes in the variable UPSTREAM_TESTS, as JSON with the fields of
`upstream_tests.Part`; every worker of pytest-xdist collects the same cases from it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import time
from collections import Counter
from pathlib import Path

import pytest

from patches.gpu_memory import pytest_runtest_teardown  # noqa: F401, a hook
from patches.upstream_tests import PART_VARIABLE, outcomes

PART = json.loads(os.environ[PART_VARIABLE])
CHUNK = 32  # neighbours share compiled kernels, so a part takes chunks of them
OUT_OF_TIME = "the part's time is over"


def pytest_configure() -> None:
    """Refuse to test another build than the one that was asked for."""
    package = Path(importlib.util.find_spec("flash_attn.cute").origin).parent
    if (package / "build_info.py").is_file() == PART["stock"]:
        raise pytest.UsageError(f"{package} is {'the patched' if PART['stock'] else 'a stock'} flash_attn.cute")
    if "PYTEST_XDIST_WORKER" in os.environ:  # the process that starts the workers runs no test
        _compile_references_anew()


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc):
    """Keep a sample of what a test of a sampled file is parametrised with, before its items are made."""
    yield
    name = f"{metafunc.module.__name__}.{metafunc.function.__name__}"
    most = PART["sample"] if metafunc.module.__name__ in PART["sampled"] else None
    if most is not None and len(metafunc._calls) > most:
        kept = sorted(random.Random(f"{PART['seed']} {name}").sample(range(len(metafunc._calls)), most))
        metafunc._calls = [metafunc._calls[at] for at in kept]


def pytest_collection_modifyitems(config, items) -> None:
    """Keep the cases of this part that have no outcome yet, or exactly those that are named, unskipped."""
    if PART["unskipped"] is not None:
        done = set(outcomes(Path(PART["results"])))
        kept = [item for item in items if item.nodeid in set(PART["unskipped"]) - done]
        for item in kept:
            _unmark(item)
    else:
        if os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":
            of_files = Counter(item.nodeid.partition(".py::")[0] for item in items)
            Path(PART["collected"]).write_text(json.dumps(of_files), encoding="utf-8")
        number, count = PART["shard"]
        done = {name for name, (outcome, _) in outcomes(Path(PART["results"])).items() if outcome not in PART["again"]}
        kept = [item for at, item in enumerate(items) if at // CHUNK % count == number - 1 and item.nodeid not in done]
    dropped = set(items) - set(kept)
    config.hook.pytest_deselected(items=list(dropped))
    items[:] = kept
    if PART["unskipped"] is not None:
        skip = pytest.skip
        pytest.skip = lambda reason="", **options: None if _is_lifted(reason) else skip(reason, **options)


def pytest_runtest_setup(item) -> None:
    if time.time() > PART["deadline"]:
        pytest.skip(OUT_OF_TIME)


def pytest_runtest_logreport(report) -> None:
    """One line a case, written as soon as it is known, so that an interrupted part is continued."""
    if "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.passed):
        return
    reason = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else ""
    if OUT_OF_TIME in reason:
        with Path(PART["left"]).open("a", encoding="utf-8") as file:
            print(report.nodeid, file=file)
        return
    if report.failed:
        lines = [line for line in str(report.longrepr).splitlines() if line.strip()]
        reason = next((line for line in lines if "Error" in line), lines[-1] if lines else "")
    with Path(PART["results"]).open("a", encoding="utf-8") as file:
        print(json.dumps([report.nodeid, report.outcome, reason[:300]]), file=file)


def _compile_references_anew() -> None:
    """Reset Dynamo before an eager flex_attention whose score_mod has default arguments.

    PyTorch 2.11 ignores their values when it looks for a compiled function: upstream's packed reference, which passes
    a sequence's number so, gets the first sequence's. 2.13 is right.
    """
    try:
        import torch
        from torch.nn.attention import flex_attention as flex
    except ImportError:  # none of the tests compares with it
        return
    call = flex.flex_attention

    def flex_attention(*args, score_mod=None, **options):
        if getattr(score_mod, "__defaults__", None):
            torch._dynamo.reset()
        return call(*args, score_mod=score_mod, **options)

    flex.flex_attention = flex_attention


def _is_lifted(reason: str) -> bool:
    return any(re.search(pattern, reason) for pattern in PART["lifted"])


def _unmark(item) -> None:
    """Drop the skipif marks of features that the fork has on this GPU."""
    for node in item.listchain():
        node.own_markers[:] = [
            mark
            for mark in node.own_markers
            if not (mark.name == "skipif" and _is_lifted(str(mark.kwargs.get("reason", ""))))
        ]
