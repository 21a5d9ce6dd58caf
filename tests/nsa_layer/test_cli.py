"""The command line: help, exit statuses, and bad arguments, and what commands have in common."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nsa_layer import __main__
from nsa_layer.cli import bench, check, compile, demo, inspect, memory, profile
from nsa_layer.measure import peak_bytes
from nsa_layer.tables import markdown

REPOSITORY = Path(__file__).parents[2]
OPTIONS = "--device=cpu --heads=4 --kv-heads=2 --head-dim=8 --block-size=8 --block-counts=3 --q-tile=16 --window-size=8"
TINY = OPTIONS.split()


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m nsa_layer` as a user runs it, from a folder that is not the repository."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    arguments = (sys.executable, "-m", "nsa_layer", *arguments)
    return subprocess.run(arguments, env=environment, cwd="/", capture_output=True, text=True, timeout=120)


def test_without_a_command_every_command_is_listed_with_a_line() -> None:
    result = command()
    assert result.returncode == 0 and not result.stderr
    for name, text in __main__.COMMANDS.items():
        assert any(line.split(maxsplit=1) == [name, text] for line in result.stdout.splitlines()), name


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["train"]) == 2
    assert "unknown command 'train'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["demo", "bench", "check", "memory", "profile"])
def test_help_says_what_units_are(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        __main__.main([name, "--help"])
    assert exit.value.code == 0
    shown = capsys.readouterr().out
    assert f"python -m nsa_layer {name}" in shown and "in tokens" in shown


@pytest.mark.parametrize("name", ["demo", "bench", "check", "memory", "profile"])
def test_an_unknown_option_exits_with_2(name: str) -> None:
    with pytest.raises(SystemExit) as exit:
        __main__.main([name, "--no-such-option"])
    assert exit.value.code == 2


def test_an_interrupt_leaves_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(memory, "main", interrupted)
    assert __main__.main(["memory"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_what_nobody_reads_ends_a_command_without_a_traceback() -> None:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    arguments = [sys.executable, "-m", "nsa_layer", "inspect"]
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(arguments, env=environment, cwd="/", stdout=writer, stderr=subprocess.PIPE, timeout=120)
    os.close(writer)
    assert result.returncode == 141 and not result.stderr


def test_commands_are_found_by_their_module() -> None:
    for name in __main__.COMMANDS:
        path = REPOSITORY / "nsa_layer" / "cli" / f"{name}.py"
        assert _functions(path) >= {"main"}, name


def _functions(path: Path) -> set[str]:
    """The functions that a module defines or imports, read without importing it: the kernels need more than a CPU."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("run", [bench.main, check.main, memory.main, profile.main])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--kv-heads=3", "--kv-heads must divide --heads"),
        ("--seqlen=0", "T must be at least 1"),
        ("--block-size=5", "q_tile must be a multiple"),
        ("--backend=fast", "backend must be"),
        ("--backend=cute", "needs tensors on a GPU"),
    ],
)
def test_bad_arguments_are_named(
    run: Callable[[list[str]], int], change: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*TINY, change]) == 2
    shown = capsys.readouterr()
    assert message in shown.err and not shown.out


def test_peak_bytes_counts_what_is_alive_at_once() -> None:
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


def test_a_table_is_markdown_with_even_columns() -> None:
    lines = markdown(["name", "n"], [["a", 1], ["bcdef", "1,000"]]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["name", "n"] and cells[2:] == [["a", "1"], ["bcdef", "1,000"]]
    assert [set(cell) - {":"} for cell in cells[1]] == [{"-"}, {"-"}] and cells[1][1].endswith(":")
    assert len({len(line) for line in lines}) == 1
    assert lines[2].startswith("| a ") and lines[2].endswith(" 1 |")
    with pytest.raises(ValueError, match="2 cells"):
        markdown(["a", "b"], [["only one"]])


@pytest.mark.parametrize("run", [bench.main, check.main, memory.main, profile.main])
@pytest.mark.parametrize("device", ["cuda:99", "abacus"])
def test_a_device_that_is_not_there_is_named(
    run: Callable[[list[str]], int], device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*TINY, f"--device={device}"]) == 2
    assert f"device must be one that PyTorch can use here, got '{device}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("run", "option"),
    [
        (bench.main, "--json"),
        (bench.main, "--chart"),
        (check.main, "--json"),
        (compile.main, "--table"),
        (memory.main, "--json"),
        (profile.main, "--json"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(
    run: Callable[[list[str]], int], option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, reason in [(tmp_path / "missing" / "file", "there is no folder"), (tmp_path, "is a folder")]:
        with pytest.raises(SystemExit) as exit:
            run([option, str(path)])
        assert exit.value.code == 2
        assert reason in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_inspect_takes_a_shape_as_the_other_commands_do(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--heads=16", "--kv-heads=2", "--head-dim=64", "--head-dim-v=128", "--dtype=fp16", "--seqlen=64K"]
    assert inspect.main(shape) == 0
    assert "T=65536 Hq=16 Hkv=2 D=64 Dv=128 float16" in capsys.readouterr().out
    assert inspect.main(["--heads=3"]) == 0
    assert "3 query heads are no multiple of 8 key/value heads" in capsys.readouterr().out


def test_compile_says_what_no_case_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert compile.main(["--only", "branch=slc", "D=77"]) == 2
    assert "no case has branch=slc D=77" in capsys.readouterr().err
    assert compile.main(["--jobs=0"]) == 2
    assert "--jobs must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["lr", "warmup", "threads", "seed", "minutes"])
def test_help_of_the_demo_says_every_default(name: str) -> None:
    (option,) = [action for action in demo.build_parser()._actions if action.dest == name]
    assert "(default: " in option.help
