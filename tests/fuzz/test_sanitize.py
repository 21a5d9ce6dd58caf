"""Racecheck's reports are read right, and kernels are known to race or not; without a GPU."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fuzz import hazards, sanitize
from fuzz.attention import lists_for, make
from fuzz.case import Attention
from fuzz.hand_over import BARRIER, BULK, CONTROLS, LANES, SHUFFLE, STORES, SYNC, TENSOR
from nsa_layer.compile_ahead import ENVIRONMENT

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


def test_what_controls_say() -> None:
    reported = dict.fromkeys(CONTROLS, False) | {
        "stores, read too early": True, "bulk copy": True, "bulk copy, read too early": True,
    }  # fmt: skip
    stores, bulk, tensor = sanitize.judged(reported)
    assert stores == "stores: racecheck tells right from wrong"
    assert bulk.startswith("bulk copy: racecheck reports the right one as it does the wrong one")
    assert tensor.startswith("tensor copy: racecheck reports neither")


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


def test_controls_are_told_apart_by_name() -> None:
    tags = [control.tag for control in CONTROLS.values()]
    assert not any(one in other for one in tags for other in tags if one is not other)


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


@pytest.mark.parametrize(("named", "code"), [("stores, read too early", 0), ("bulk copy", 1)])
def test_controls_are_judged(named: str, code: int, stand_in: sanitize.Setup, capsys: pytest.CaptureFixture) -> None:
    """A checker that does not see a plain race says nothing."""
    kernel = f"kernel_cutlass_kernel_HandOver{CONTROLS[named].tag}0"
    (stand_in.folder / "report").write_text(ANALYSIS.replace("kernel_cutlass_a_0", kernel))
    assert sanitize.main(["--controls", "--folder", str(stand_in.folder)]) == code
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ") and "yes" in line]
    assert len(rows) == 1 and rows[0].startswith(f"| {named} ")


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


COMPILE = """
from fuzz.hand_over import CONTROLS, compiled
for control in CONTROLS.values():
    compiled(control)
"""
BRINGS = {STORES: "STS", BULK: "UBLKCP.S.G", TENSOR: "UTMALDG.1D"}


@pytest.fixture(scope="module")
def listing(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], str]:
    """The instructions of all controls, compiled for Hopper."""
    disassembler, folder = hazards.find_disassembler(), tmp_path_factory.mktemp("cubins")
    assert disassembler is not None, "triton's wheel holds nvdisasm"
    keep = {"CUTE_DSL_KEEP": "cubin", "CUTE_DSL_DUMP_DIR": str(folder)}
    paths = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])
    environment = os.environ | ENVIRONMENT[90] | keep | {"PYTHONPATH": paths}
    subprocess.run([sys.executable, "-c", COMPILE], env=environment, check=True, timeout=500)
    return hazards.instructions(folder, disassembler)


@pytest.mark.parametrize("name", CONTROLS)
def test_controls_are_what_they_say(name: str, listing: dict[tuple[str, int], str]) -> None:
    """The instruction that brings the data, and reads after the wait, or before it."""
    control = CONTROLS[name]
    (kernel,) = {kernel for kernel, _ in listing if control.tag in kernel}
    own = sorted((place, text) for (of, place), text in listing.items() if of == kernel)
    assert {word for word in BRINGS.values() if any(word in text for _, text in own)} == {BRINGS[control.copy]}
    reads = [place for place, text in own if "LDS" in text]
    waits = [place for place, text in own if "SYNCS.PHASECHK" in text and "TRYWAIT" in text]
    assert len(reads) == 2 and (max(reads) < waits[-1]) == (not control.right), "two numbers a step, early if wrong"
    barriers = sum("BAR.SYNC" in text for _, text in own)
    assert barriers == 1 + 2 * control.named + (control.freed == BARRIER)


@pytest.mark.parametrize("name", CONTROLS)
def test_who_frees_a_stage(name: str, listing: dict[tuple[str, int], str]) -> None:
    """Each reading lane, or one after what all do: a sync of its warp, of which a NOP is left, shuffles, a barrier."""
    control = CONTROLS[name]
    own = sorted((place, text) for (of, place), text in listing.items() if control.tag in of)
    read = max(place for place, text in own if "LDS" in text)
    freed = next(place for place, text in own if place > read and "SYNCS.ARRIVE" in text)
    between, of_warp = [text for place, text in own if read < place < freed], ("NOP", "SHFL.BFLY", "BAR.SYNC")
    words = [word for text in between for word in of_warp if word in text]
    wanted = {LANES: [], SYNC: ["NOP"], SHUFFLE: ["SHFL.BFLY"] * 5, BARRIER: ["BAR.SYNC"]}
    assert words == wanted[control.freed]
    assert dict(own)[freed].startswith("@") == (control.freed != LANES), "one lane of a warp"
