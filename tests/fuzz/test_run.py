"""The report of a run: counts, the smallest failure and its file, exit codes, hangs; and canaries, and growth."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import time
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st

from fuzz import pool, soak
from fuzz.__main__ import main
from fuzz.canary import Guarded, untouched
from fuzz.case import Attention, Blocks, Edge
from fuzz.mutations import all_mutations
from fuzz.pool import run_jobs
from fuzz.prop import SM90, SM100, Property, Skip, properties
from fuzz.run import Budget, Failure, parse_case, read_failure, run_property, write_failure
from nsa_layer import NSAConfig
from nsa_tools.testing.cases import Case


def too_large(case: Edge) -> None:
    assert case.seqlen_q < 7, "too large"


def skipped(case: Edge) -> None:
    raise Skip


CASES = st.builds(Edge, seqlen_q=st.integers(0, 1000))


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers begin as copies of this process: properties without a GPU need no imports of their own."""
    monkeypatch.setattr(pool, "SPAWN", multiprocessing.get_context("fork"))


def test_the_smallest_case_is_reported() -> None:
    outcome = run_property(Property("made up", lambda: CASES, too_large), Budget(examples=50))
    assert outcome.failure.case == "Edge(seqlen_q=7)" and outcome.failure.error.startswith("AssertionError: too large")
    assert "too_large" in outcome.failure.trace


def test_failing_examples_are_tried_first(tmp_path: Path) -> None:
    """A run with another seed begins with what failed in the one before."""
    prop, database = Property("made up", lambda: CASES, too_large), str(tmp_path)
    first, again = (run_property(prop, Budget(examples=50, seed=seed, database=database)) for seed in (1, 2))
    assert first.failure is not None and any(path.is_file() for path in tmp_path.rglob("*"))
    assert again.failure.case == first.failure.case and again.examples < first.examples


def test_workers_take_turns_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert [pool._one_gpu(i)["CUDA_VISIBLE_DEVICES"] for i in range(3)] == ["2", "5", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert pool._one_gpu(1) == {}


def test_skipped_cases_do_not_count() -> None:
    outcome = run_property(Property("made up", lambda: CASES, skipped), Budget(examples=50))
    assert outcome.examples == 0 and outcome.failure is None


def test_time_ends_a_run() -> None:
    started = time.monotonic()
    slow = Property("made up", lambda: CASES, lambda case: time.sleep(0.05))
    outcome = run_property(slow, Budget(examples=10_000, seconds=0.5))
    assert 0 < outcome.examples < 50 and time.monotonic() - started < 5


@pytest.mark.parametrize(
    "case",
    [
        Blocks(M=3, full=None, fault="listed twice"),
        Edge(offset=-5),
        Attention(D=128, packed=((0, 1), (3, 4)), window=(None, 3)),
        Case(dtype=torch.float64, config=NSAConfig(block_size=4, q_tile=8), lengths=(1, 0)),
    ],
    ids=lambda case: type(case).__name__,
)
def test_cases_can_be_pasted(case: object, tmp_path: Path) -> None:
    assert parse_case(repr(case)) == case
    path = write_failure(Failure("lists.made", repr(case), "said\nmore"), tmp_path)
    assert read_failure(path) == ("lists.made", repr(case))
    assert f"--replay {path}" in path.read_text()


def test_exit_codes(forked: None, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = ("--folder", str(tmp_path), "--workers", "1")
    assert main(["--minutes", "0.03", "--only", "options", *folder]) == 0
    said = capsys.readouterr()
    assert "examples of 1 properties, 0 failed" in said.out
    assert "examples, 0 failed" in said.err, "a progress line"
    assert main(["--list-mutations"]) == main(["--list"]) == 0
    said = capsys.readouterr().out
    assert "leaking selection" in said and "attention.is its definition" in said
    assert main(["--only", "no such property", *folder]) == 2
    assert main(["--mutate", "no such fault"]) == 2
    assert main(["--mutate", "zero taken", *folder]) == 1
    (path,) = (tmp_path / "planted").iterdir()
    assert f"--replay {path} --mutate 'zero taken'" in capsys.readouterr().out
    assert main(["--replay", str(path), "--mutate", "zero taken"]) == 1
    assert main(["--replay", str(path)]) == 0


def test_a_hang_becomes_a_report(forked: None, tmp_path: Path) -> None:
    prop, fault = properties()["patches.text comes back"], all_mutations()["codec hangs"]
    tally = run_jobs([prop], 1, tmp_path, time.monotonic() + 60, patience=2, fault=fault)
    failure = tally.failures[prop.name, 0]
    assert failure.error == "hang" and failure.case.startswith("Texts(") and "_hang" in failure.trace


def test_a_worker_that_dies_is_replaced(forked: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dies = Property("dies", lambda: CASES, lambda case: os._exit(3))
    lives = Property("lives", lambda: CASES, lambda case: None)
    monkeypatch.setattr(pool, "properties", lambda: {"dies": dies, "lives": lives})
    for seconds in (2, 8, 30):  # on a busy machine a worker starts late
        tally = run_jobs([dies, lives], 1, tmp_path, time.monotonic() + seconds)
        if tally.failures and tally.outcomes["lives"].examples > 1:
            break
    (failure,) = tally.failures.values()
    assert failure.error == "the worker ended with code 3" and failure.case.startswith("Edge(")
    assert tally.outcomes["dies"].examples == 1 and tally.outcomes["lives"].examples > 1


def test_an_interrupted_run_says_what_came_out(
    forked: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    class Interrupted(pool.Tally):
        def add(self, *new: object) -> None:
            super().add(*new)
            raise KeyboardInterrupt

    monkeypatch.setattr(pool, "Tally", Interrupted)
    assert main(["--minutes", "3", "--only", "options", "--workers", "1", "--folder", str(tmp_path)]) == 130
    said = capsys.readouterr().out
    assert "| options.good or named |" in said and "examples of 1 properties, 0 failed" in said


def test_canaries_and_nan() -> None:
    with Guarded("cpu") as guard:
        x, y, z = torch.empty(3, 5), torch.zeros(4, dtype=torch.bfloat16), torch.empty(2, dtype=torch.int32)
        like = torch.empty_like(x.mT)
    assert x.isnan().all() and not y.any() and (z != 0).all() and like.stride() == (1, 5)
    x.fill_(1)
    guard.check()
    with pytest.raises(AssertionError, match="4 bytes written after allocation 1"), Guarded("cpu"):
        x = torch.empty(3, 5)
        x.as_strided((16,), (1,), x.storage_offset())[15] = 1
    tensors = {"x": torch.tensor([0.0, float("nan")]), "none": None}
    check = untouched(tensors)
    check()
    tensors["x"][0] = -0.0
    with pytest.raises(AssertionError, match="x was changed"):
        check()


def test_growth() -> None:
    steady = soak.Sample(0, 100, 5, 8)
    samples = [steady._replace(at=10.0 * i, host=100 + 0.5 * i, live=5 + 50 * (i == 4)) for i in range(20)]
    assert soak.growth(samples, "host") == pytest.approx(3.0) and soak.growth(samples, "live") == 0


def test_a_soak_has_steps_of_every_kind_first() -> None:
    """All layers, packed or not, at lengths of every order: what is compiled once is compiled early."""
    steps = list(itertools.islice(soak.shapes(3, 200, random.Random(0)), 72))
    longest = {(layer, batch) for layer, T, batch in steps if T == 200}
    assert longest == set(itertools.product(range(3), range(3)))
    assert {T.bit_length() for _, T, _ in steps} == set(range(1, 9))
    assert all(loss > 0 for loss in itertools.islice(soak.train("cpu"), 72))


@pytest.mark.parametrize(("grown", "code"), [(0, 0), (0.1, 1)])
def test_a_soak_says(grown: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    samples = [soak.Sample(float(at), 100 + grown * at, 5, 8) for at in range(0, 100, 5)]
    monkeypatch.setattr(soak, "soak", lambda *given: samples)
    assert soak.main(["--minutes", str(100 / 60), "--device", "cpu"]) == code
    assert f"host {60 * grown:+.2f}, live +0.00, reserved +0.00" in capsys.readouterr().out


def test_a_short_soak_says_so(capsys: pytest.CaptureFixture) -> None:
    assert soak.main(["--minutes", "0.03", "--device", "cpu"]) == 2
    assert "too few" in capsys.readouterr().out


@pytest.mark.parametrize("kinds", [[SM90], pytest.param([SM90, SM100], marks=pytest.mark.sweep)], ids=str)
def test_drawn_configurations_are_traced(kinds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For Hopper, and for datacenter Blackwell, in a worker for each; `--only compiling` compiles many."""
    monkeypatch.setenv("CUTE_DSL_DRYRUN", "1")
    props = [properties()[f"compiling.{need}"] for need in kinds]
    monkeypatch.setattr(pool, "SLICE", Budget(examples=1, seconds=200, shrink=1))

    def enough(tally: pool.Tally) -> None:
        if {prop.name for prop in props} <= {*tally.outcomes}:
            raise KeyboardInterrupt

    tally = run_jobs(props, len(kinds), tmp_path, time.monotonic() + 400, patience=250, notice=enough)
    assert not tally.failures, [f"{failure.case}\n{failure.error}" for failure in tally.failures.values()]
    assert all(tally.outcomes[prop.name].examples for prop in props), tally.outcomes
