"""Racecheck's reports are read right, and the sanitizer is run right; without a GPU."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch

from fuzz import hazards, sanitize
from fuzz.attention import lists_for, make
from fuzz.case import Attention

ROOT = Path(__file__).resolve().parents[2]
COMPILE_SUBJECT = sanitize._compile  # which the stand-in leaves out
LOADER, READER = (
    hazards.Access("Write", "kernel_cutlass_a_0", 0x390),
    hazards.Access("Read", "kernel_cutlass_a_0", 0x600),
)
ANALYSIS = """
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at kernel_cutlass_a_0+0x390
=========     and Read access at kernel_cutlass_a_0+0x600 [128 hazards]
=========     and Read access at kernel_cutlass_a_0(float *, int)+0x610 in /some/file.py:7 [64 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
SINGLE = """
========= Error: Potential RAW hazard detected at __shared__ 0x404 in block (0,0,0) :
=========     Write Thread (0,0,0) at kernel_cutlass_a_0+0x390
=========     Read Thread (33,0,0) at kernel_cutlass_a_0+0x600
=========     Current Value : 66
=========
========= Error: Potential RAW hazard detected at __shared__ 0x400 in block (0,0,0) :
=========     Write Thread (0,0,0) at kernel_cutlass_a_0+0x390
=========     Read Thread (32,0,0) at kernel_cutlass_a_0+0x600
"""
LISTING = """
.text.kernel_cutlass_a_0:
        /*0380*/                   UMOV UR4, 0x1 ;
        /*0390*/                   UBLKCP.S.G [UR10], [UR6], UR15 ;
        /*0600*/              @!P0 LDS R8, [R7+UR8+-0x80] ;
.text.kernel_cutlass_b_0:
        /*0390*/                   STS [R13], R10 ;
"""


def test_accesses_of_a_report() -> None:
    assert hazards.accesses(ANALYSIS) == {
        LOADER: 0,
        READER: 128,
        hazards.Access("Read", "kernel_cutlass_a_0", 0x610): 64,
    }
    older = "=========     and Write access at 0x20 in kernel_cutlass_b_0 [2 hazards]"
    assert hazards.accesses(older) == {hazards.Access("Write", "kernel_cutlass_b_0", 0x20): 2}
    assert not hazards.accesses("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)")


def test_addresses_of_single_hazards() -> None:
    assert hazards.shared_ranges(SINGLE) == {("RAW", LOADER, READER): (0x400, 0x404, 2)}
    assert not hazards.shared_ranges(ANALYSIS)


def test_a_report_with_its_instructions() -> None:
    known = dict(hazards.parse_instructions(LISTING))
    assert known["kernel_cutlass_b_0", 0x390] == "STS [R13], R10"
    said = "\n".join(hazards.explained(ANALYSIS + SINGLE, known))
    assert "Write at +0x390: UBLKCP.S.G" in said and "@!P0 LDS R8" in said
    assert "Read at +0x610: instruction not known, of kernel_cutlass_a_0, 64 hazards" in said
    assert "RAW at shared 0x400 .. 0x404, 2 times" in said


@pytest.mark.parametrize("case", [case for case in sanitize.CASES if isinstance(case, Attention)], ids=repr)
def test_stages_are_filled_anew(case: Attention) -> None:
    """Races are about the earlier content of a stage: a CTA of backward walks more rows than two stages hold."""
    kind, (rows, _) = case.kind, case.lengths[0]
    if kind.lists:
        lists = lists_for(make(case, "cpu"), True)
        counts = lists.mask_block_cnt + (0 if lists.full_block_cnt is None else lists.full_block_cnt)
        most = counts if lists.plan is None else lists.plan[:, 4] - lists.plan[:, 3]
        rows = kind.block_q * int(most.max())
    elif kind.mask == "window":
        assert case.window[1] is None or case.window[0] + kind.block_k > 384
    assert rows > 2 * (64 if kind.block_k == 64 else 128)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> sanitize.Setup:
    """A sanitizer that prints a report and finds something, on a machine that seems to have a GPU."""
    binary, report = tmp_path / "compute-sanitizer", tmp_path / "report"
    binary.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\ncat {report}\nexit 86\n')
    binary.chmod(binary.stat().st_mode | stat.S_IXUSR)
    report.write_text(ANALYSIS + SINGLE)
    monkeypatch.setattr(sanitize, "find", lambda: str(binary))
    monkeypatch.setattr(sanitize, "_compile", lambda subject, setup: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(hazards, "find_disassembler", lambda binary: "nvdisasm")
    monkeypatch.setattr(hazards, "instructions", lambda *given: dict(hazards.parse_instructions(LISTING)))
    return sanitize.Setup(str(binary), tmp_path, 60.0)


def test_hazards_are_explained(stand_in: sanitize.Setup, capsys: pytest.CaptureFixture) -> None:
    given = ["--tool", "racecheck", "--case", "3", "--folder", str(stand_in.folder)]
    assert sanitize.main(given) == 1
    said = capsys.readouterr().out
    assert "racecheck, case 3: exit 86" in said and "Write at +0x390: UBLKCP.S.G" in said
    assert sanitize.main([*given, "--addresses"]) == 1
    calls = (stand_in.folder / "calls").read_text().splitlines()
    assert len(calls) == 3 and "--racecheck-report hazard" in calls[2] and "--inside 3" in calls[2]


@pytest.mark.parametrize(
    ("ways", "code", "says"),
    [
        (["ABRT", "0"], 1, "racecheck, case 3: exit 86"),
        (["ABRT", "ABRT"], 2, "case 3 without the sanitizer: ended by SIGABRT, twice; nothing ran under it"),
        (["5"], 2, "case 3 without the sanitizer: exit 5; nothing ran under it"),
        (["ABRT", "5"], 2, "case 3 without the sanitizer: exit 5; nothing ran under it"),
    ],
    ids=["a signal", "two signals", "an error", "a signal and an error"],
)
def test_a_process_that_a_signal_ends_gets_another_try(
    ways: list[str], code: int, says: str, stand_in: sanitize.Setup,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    """One way to end for each process that compiles; there are no more of them."""
    ends = [f"kill -s {way} $$" if way.isalpha() else f"exit {way}" for way in ways]
    inside = sanitize._inside
    monkeypatch.setattr(sanitize, "_inside", lambda subject: ["sh", "-c", ends.pop(0)] if ends else inside(subject))
    monkeypatch.setattr(sanitize, "_compile", COMPILE_SUBJECT)
    assert sanitize.main(["--tool", "racecheck", "--case", "3", "--folder", str(stand_in.folder)]) == code
    assert says in capsys.readouterr().out
    assert not ends and (stand_in.folder / "calls").exists() == (code == 1)
