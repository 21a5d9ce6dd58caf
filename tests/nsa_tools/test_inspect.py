"""The `inspect` command: the table of supported features, and the backend of a shape."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nsa_layer import NSAConfig, support
from nsa_tools.commands import inspect
from nsa_tools.shape import Shape


def test_it_takes_a_shape_as_the_other_commands_do(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--heads=16", "--kv-heads=2", "--head-dim=64", "--head-dim-v=128", "--dtype=fp16", "--seqlen=64K"]
    assert inspect.main(shape) == 0
    assert "T=65536 Hq=16 Hkv=2 D=64 Dv=128 float16" in capsys.readouterr().out
    assert inspect.main(["--heads=3"]) == 0
    assert "3 query heads are no multiple of 8 key/value heads" in capsys.readouterr().out


def test_a_section_fails_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> int:
        raise ValueError("FLASH_ATTENTION_ARCH must look like sm_90, got 'hopper'")

    monkeypatch.setattr(support, "device_arch", fails)
    assert inspect.main([]) == 0
    shown = capsys.readouterr().out
    assert "ValueError: FLASH_ATTENTION_ARCH must look like sm_90" in shown and "q_tile 2 to 64" in shown


def test_support_table_is_that_of_the_features() -> None:
    found = inspect.support_table()
    assert found["header"] == ["feature", "cute sm_90", "cute sm_100"]
    assert [row[0] for row in found["rows"]] == [*support.SUPPORTED, *support.LACKING]
    by_name = {row[0]: row[1:] for row in found["rows"]}
    assert by_name["q_tile 1"] == ["runs", "compiles"] and by_name["rule='seed'"] == ["no", "no"]


def test_explain_backend() -> None:
    shape = Shape(B=1, T=100, Hq=32, Hkv=8, D=128, Dv=128, dtype=torch.bfloat16, config=NSAConfig())
    assert inspect.explain_backend(shape, 90) == ("cute", "kernels for sm_90")
    assert inspect.explain_backend(shape, 0) == ("eager", "no GPU")
    assert inspect.explain_backend(shape, 80)[0] == "eager"
    padded = "kernels for sm_90, with rows that are copied to D 96, Dv 96"
    assert inspect.explain_backend(replace(shape, D=88, Dv=80), 90) == ("cute", padded)
    backend, reason = inspect.explain_backend(replace(shape, D=264), 100)
    assert backend == "none" and "head dimensions other than multiples of 8 from 16 to 256, Dv <= D" in reason
    assert inspect.explain_backend(replace(shape, Hq=30), 90)[0] == "none"
