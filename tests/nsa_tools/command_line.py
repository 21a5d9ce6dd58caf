"""Arguments of a call that runs at once on a CPU, and the check of a command that refuses its arguments."""

from __future__ import annotations

from collections.abc import Callable

import pytest

OPTIONS = "--device=cpu --heads=4 --kv-heads=2 --head-dim=8 --block-size=8 --block-counts=3 --q-tile=16 --window-size=8"
TINY = OPTIONS.split()

Run = Callable[[list[str]], int]


def refused(run: Run, argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which a command exits with status 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit:
        run(argv)
    shown = capsys.readouterr()
    assert exit.value.code == 2 and not shown.out and shown.err.count("\n") == 1
    return shown.err
