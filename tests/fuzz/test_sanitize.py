"""The sanitizer is run, and a finding is an exit code; without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fuzz import sanitize
from fuzz.attention_lists import backward_lists
from fuzz.case import Attention


@pytest.mark.parametrize("case", [case for case in sanitize.CASES if isinstance(case, Attention)], ids=repr)
def test_stages_are_filled_anew(case: Attention) -> None:
    """Races are about the earlier content of a stage: a CTA of backward loops over more rows than two stages hold."""
    (rows, _), (block_q, block_k) = case.lengths[0], case.block or (128, 128)
    if case.lists:
        lists = backward_lists(case, device="cpu")
        counts = lists.mask_block_cnt + (0 if lists.full_block_cnt is None else lists.full_block_cnt)
        most = counts if lists.plan is None else lists.plan[:, 4] - lists.plan[:, 3]
        rows = block_q * int(most.max())
    elif case.mask == "window":
        assert case.window[1] is None or case.window[0] + block_k > 384
    assert rows > 2 * (64 if block_k == 64 else 128)


CACHE = ("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")


@pytest.mark.parametrize(
    ("compiles", "code", "says"),
    [(0, 1, "racecheck, case 3: exit 86"), (5, 2, "case 3 without the sanitizer: exit 5; nothing ran under it")],
)
def test_findings_are_exit_codes(
    compiles: int, code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A process that compiles, and then a sanitizer that finds something, as on a GPU."""
    binary = tmp_path / "compute-sanitizer"
    report = "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"
    binary.write_text(f"#!/bin/sh\necho {report!r}\nexit 86\n")
    binary.chmod(0o755)
    for name in CACHE:
        monkeypatch.setenv(name, "0")  # put back afterwards
    monkeypatch.setattr(sanitize, "find", lambda: str(binary))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sanitize, "_inside", lambda subject: ["sh", "-c", f"exit {compiles}"])
    assert sanitize.main(["--tool", "racecheck", "--case", "3", "--folder", str(tmp_path)]) == code
    assert says in (said := capsys.readouterr().out) and ("SUMMARY: 1 hazard" in said) == (code == 1)
