"""The `memory` command: predictions by component, the longest call that fits, and measured peaks beside them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import TINY

from nsa_layer import NSAConfig
from nsa_layer.cute.memory_plan import MemoryPolicy
from nsa_tools.commands import memory
from nsa_tools.measure import call_memory
from nsa_tools.measure.peak_memory import peak_bytes
from nsa_tools.shape import Shape

SHAPE = Shape(B=1, T=1 << 16, Hq=32, Hkv=8, D=128, Dv=128, dtype=torch.bfloat16, device="cpu", config=NSAConfig())


def test_table_is_written_in_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "memory.json"
    assert memory.main([*TINY, "--seqlen", "64", "100", "--json", str(file)]) == 0
    shown, document = capsys.readouterr().out.splitlines(), json.loads(file.read_text())
    assert len(shown) == 6 and shown[0].startswith("GiB; peaks are above the inputs") and shown[2].count("|") == 12
    assert [row["T"] for row in document["rows"]] == [64, 100] and document["environment"]["gpu"] is None
    for line, row in zip(shown[4:], document["rows"], strict=True):
        assert row["status"] == "measured" and row["peak"] > 0
        ratio = row["peak"] / row["predicted"]["peak"]
        assert line.split("|")[-2].strip() == f"{ratio:.2f}"
    assert document["command"].endswith("--seqlen 64 100") and document["gated"] and document["backward"]
    assert memory.main([*TINY, "--seqlen", "64", "--no-measure", "--mode=forward", "--packed=3"]) == 0
    assert capsys.readouterr().out.splitlines()[2].count("|") == 10
    options = ["--device=cpu", "--dtype=bf16", "--longest", "--no-measure", "--total=139", f"--json={file}"]
    assert memory.main(options) == 0
    found = json.loads(file.read_text())["longest"]
    assert f"predicted {found['predicted']:,} ({found['groups']} groups" in capsys.readouterr().out
    assert found["measured"] is None and str(tmp_path) not in file.read_text()


def test_less_memory_means_a_plan_that_takes_less() -> None:
    shape = SHAPE.at(1 << 20)
    plenty, short = (call_memory.planned(shape, total=total << 30) for total in (139, 60))
    least = [call_memory.predicted(shape, plan)["peak"] for plan in (plenty, short)]
    assert len(plenty.groups) == 1 < len(short.groups) and least[1] < least[0]


def test_the_longest_that_fits_grows_with_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """Forward is longer, and predictions without a GPU are of what kernels take: half precision."""

    def found(*options: str) -> int:
        assert memory.main(["--device=cpu", "--longest", "--no-measure", *options]) == 0
        return int(capsys.readouterr().out.split("predicted ")[1].split()[0].replace(",", ""))

    longest = found("--total=139")
    assert found("--total=80") < longest < found("--total=139", "--mode=forward")
    assert found("--total=139", "--dtype=bf16") == longest != found("--total=139", "--dtype=fp32")


@pytest.mark.parametrize("limit", [0, 63, 64, 1000, 4096, 99999])
@pytest.mark.parametrize("guess", [64, 640, 100000])
def test_the_longest_is_found_from_any_guess(limit: int, guess: int) -> None:
    asked = []

    def fits(T: int) -> bool:
        asked.append(T)
        return limit >= T

    assert call_memory.longest(fits, guess=guess, step=64) == limit // 64 * 64
    assert len(asked) < 30


def test_a_call_that_does_not_fit_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(call_memory, "nsa", full)
    assert memory.main([*TINY, "--seqlen", "64"]) == 0
    assert "out of memory" in capsys.readouterr().out


def test_a_policy_reaches_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def attend(q, k, v, **options):
        seen.append(options.get("memory"))
        return q

    monkeypatch.setattr(call_memory, "nsa", attend)
    policy = MemoryPolicy(budget=5 << 30)
    for given in (MemoryPolicy(), policy):
        shape = replace(SHAPE.at(128), policy=given, gate="none", backward=False)
        call_memory.repeated_call(shape, "cute")()
    assert seen == [None, policy]


def test_peak_bytes_counts_tensors_alive_at_once() -> None:
    size = 1 << 20

    def call() -> None:
        first = torch.ones(size, dtype=torch.uint8)
        second = torch.ones(2 * size, dtype=torch.uint8)
        del first, second
        torch.ones(size, dtype=torch.uint8)

    kept: list[torch.Tensor] = []
    assert 3 * size <= peak_bytes(call, "cpu") < 3 * size + 4096
    assert size <= peak_bytes(lambda: kept.append(torch.ones(size, dtype=torch.uint8)), "cpu") < size + 4096
    with pytest.raises(NotImplementedError, match="meta"):
        peak_bytes(call, "meta")


@pytest.mark.gpu
def test_on_a_gpu_the_peak_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert memory.main(["--seqlen=4096"]) == 0
    assert "measured peak" in capsys.readouterr().out
