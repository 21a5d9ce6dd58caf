"""The command line: help, exit statuses, bad arguments, and what commands have in common."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from command_line import TINY, Run, refused

from nsa_layer import NSAConfig
from nsa_tools import commands
from nsa_tools.commands import bench, check, compile, demo, memory, options, profile
from nsa_tools.report.tables import markdown

REPOSITORY = Path(__file__).parents[2]


def command(*arguments: str, before: str = "pass") -> subprocess.CompletedProcess[str]:
    """`python -m nsa_layer` as a user runs it, from a folder that is not the repository."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    program = f"import runpy, sys; {before}; runpy.run_module('nsa_layer', run_name='__main__', alter_sys=True)"
    arguments = (sys.executable, "-c", program, *arguments)
    return subprocess.run(arguments, env=environment, cwd="/", capture_output=True, text=True, timeout=120)


def test_every_command_is_listed_with_a_line() -> None:
    result = command()
    assert result.returncode == 0 and not result.stderr
    for name, text in commands.COMMANDS.items():
        assert any(line.split(maxsplit=1) == [name, text] for line in result.stdout.splitlines()), name


def test_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["train"]) == 2
    assert "unknown command 'train'" in capsys.readouterr().err


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_help_names_the_command_and_units(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        commands.main([name, "--help"])
    assert exit.value.code == 0
    shown = capsys.readouterr().out
    assert f"python -m nsa_layer {name}" in shown and "tokens" in shown


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_unknown_option_exits_with_2(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = import_module(f"nsa_tools.commands.{name}").main
    assert refused(run, ["--no-such-option"], capsys).startswith(f"{name}: unrecognized arguments")


@pytest.mark.parametrize("name", sorted(commands.COMMANDS.keys() - {"demo"}))  # demo: `DemoConfig`
def test_every_option_is_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parsers = []

    def parse(parser: options.CommandParser, argv: list[str]) -> None:
        parsers.append(parser)
        raise KeyboardInterrupt

    monkeypatch.setattr(options.CommandParser, "parse_args", parse)
    assert commands.main([name]) == 130
    modules = options, import_module(f"nsa_tools.commands.{name}")
    source = "".join(Path(module.__file__).read_text() for module in modules)
    names = {action.dest for parser in parsers for action in parser._actions} - {"help"}
    assert names and not {name for name in names if not re.search(rf'(args|options)\.{name}\b|"{name}"', source)}


def test_interrupt_leaves_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(memory, "main", interrupted)
    assert commands.main(["memory"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_closed_pipe_ends_a_command_without_a_traceback() -> None:
    arguments = [sys.executable, "-m", "nsa_layer", "inspect"]
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(arguments, cwd="/", stdout=writer, stderr=subprocess.PIPE, timeout=120)
    os.close(writer)
    assert result.returncode == 141 and not result.stderr


@pytest.mark.parametrize(
    ("name", "missing", "given"),
    [
        ("bench", "tabulate", TINY),
        ("bench", "tqdm", TINY),
        ("bench", "matplotlib", [*TINY, "--chart=a.png"]),
        ("check", "tabulate", TINY),
        ("demo", "safetensors", ["--device=cpu"]),
        ("demo", "matplotlib", ["--device=cpu"]),
        ("inspect", " ".join(commands.TOOLS_EXTRA), []),
    ],
)
def test_missing_extra_is_one_line_that_names_it(
    name: str, missing: str, given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything runs; and `inspect` needs none."""
    for module in [m for m in sys.modules if m.startswith("nsa_tools.") and m != "nsa_tools.commands"]:
        monkeypatch.delitem(sys.modules, module)
    for module in {*missing.split(), *(m for m in sys.modules if m.partition(".")[0] in missing.split())}:
        monkeypatch.setitem(sys.modules, module, None)
    status, said = commands.main([name, *given]), capsys.readouterr()
    if name == "inspect":
        assert status == 0 and not said.err
    else:
        assert status == 2 and not said.out
        assert said.err == f"{name} needs the tools extra: pip install 'flash-attn-4[tools]'\n"


def test_other_missing_modules_are_not_called_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(argv: list[str]) -> int:
        raise ModuleNotFoundError("No module named 'quack'", name="quack")

    monkeypatch.setattr(memory, "main", broken)
    with pytest.raises(ModuleNotFoundError, match="quack"):
        commands.main(["memory"])


def test_extra_is_that_of_the_distribution() -> None:
    (listed,) = re.findall(r"^tools = \[(.*)\]$", (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
    assert tuple(re.findall(r'"(\w+)[^"]*"', listed)) == commands.TOOLS_EXTRA


@pytest.mark.parametrize("run", [bench.main, check.main, memory.main, profile.main])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--kv-heads=3", "--kv-heads must divide --heads"),
        ("--seqlen=0", "argument --seqlen: must be at least 1, got 0"),
        ("--block-size=5", "q_tile must be a multiple"),
        ("--backend=fast", "backend must be"),
        ("--backend=cute", "needs tensors on a GPU"),
        ("--device=cuda:99", "device must be one that PyTorch can use here, got 'cuda:99'"),
        ("--device=abacus", "device must be one that PyTorch can use here, got 'abacus'"),
    ],
)
def test_bad_arguments_are_named(run: Run, change: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(run, [*TINY, change], capsys)


@pytest.mark.parametrize("run", [bench.main, check.main, memory.main, profile.main])
def test_an_index_is_taken_by_every_command(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    more = dict.fromkeys([bench.main, profile.main], ["--repeats=1"]) | {check.main: ["--dtype=bf16"]}
    assert run([*TINY, "--rule=index", "--one-key", "--index-dim=8", "--index-loss", *more.get(run, [])]) == 0
    assert "WRONG" not in capsys.readouterr().out


def test_a_shape_is_a_model_of_which_options_change_a_part() -> None:
    def of(*more: str) -> tuple:
        (shape,) = options.shapes(bench._parser().parse_args(["--seqlen=64", "--device=cpu", "--shape=paper", *more]))
        return shape.Hq, shape.Hkv, shape.D, shape.Dv, shape.config

    assert of() == (64, 4, 192, 128, NSAConfig.paper())
    assert of("--kv-heads=8", "--head-dim=64") == (64, 8, 64, 64, NSAConfig.paper())
    assert of("--head-dim-v=64", "--compress-stride=8")[2:] == (192, 64, NSAConfig.paper(compress_stride=8))


UNFIT = {
    bench.main: {
        "--one-key": "--one-key and --index-loss are for --rule index",
        "--graph": "--graph needs a GPU",
        "--repeats=0": "argument --repeats: must be at least 1",
        "--packed=2 --batch=2": "--packed is for sequences without a batch",
        "--packed=5000": "packed sequences must be",
        "--from a.json --seqlen 64": "--from does not read --device",
    },
    compile.main: {
        "--jobs=0": "argument --jobs: must be at least 1",
        "--shape=B": "--shape needs --seqlen",
        "--seqlen=1K --all": "--all is for calls that cover the options",
        "--seqlen=1K --head-dim=100": "the kernels do not support head dimensions other than multiples of 8 from 16",
        "--seqlen=1K --q-tile=128 --block-counts=65": "the kernels do not support block_counts above 64",
        "--seqlen=1K --kv-heads=3": "--kv-heads must divide --heads",
    },
    memory.main: {"--longest": "--longest without a GPU", "--budget=-1": "budget must be at least 0"},
}


@pytest.mark.parametrize(("run", "options"), [(run, options) for run, of in UNFIT.items() for options in of])
def test_options_that_do_not_fit_are_refused(run: Run, options: str, capsys: pytest.CaptureFixture[str]) -> None:
    call = [] if run is compile.main else TINY
    assert UNFIT[run][options] in refused(run, [*call, *options.split()], capsys)


@pytest.mark.parametrize(
    ("run", "option"),
    [
        (bench.main, "--json"),
        (bench.main, "--chart"),
        (check.main, "--json"),
        (memory.main, "--json"),
        (profile.main, "--json"),
    ],
)
def test_unwritable_file_is_refused_before_anything_runs(
    run: Run, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, reason in [(tmp_path / "missing" / "file", "there is no folder"), (tmp_path, "is a folder")]:
        assert reason in refused(run, [option, str(path)], capsys)
    assert "File name too long" in refused(run, [option, str(tmp_path / (300 * "a"))], capsys)
    assert not any(tmp_path.iterdir())
    (kept := tmp_path / "file").write_text("as it was")
    refused(run, [option, str(kept), "--seqlen=0"], capsys)
    assert kept.read_text() == "as it was"


@pytest.mark.parametrize("name", ["lr", "warmup", "threads", "seed", "minutes"])
def test_help_of_the_demo_says_every_default(name: str) -> None:
    (option,) = [action for action in demo.build_parser()._actions if action.dest == name]
    assert "(default: " in option.help


def test_table_is_markdown_with_even_columns() -> None:
    lines = markdown(["name", "n"], [["a", 1], ["bcdef", "1,000"]]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["name", "n"] and cells[2:] == [["a", "1"], ["bcdef", "1,000"]]
    assert [set(cell) - {":"} for cell in cells[1]] == [{"-"}, {"-"}] and cells[1][1].endswith(":")
    assert len({len(line) for line in lines}) == 1
    assert lines[2].startswith("| a ") and lines[2].endswith(" 1 |")
    with pytest.raises(ValueError, match="2 cells"):
        markdown(["a", "b"], [["only one"]])
