"""`python -m nsa_layer demo` at a tiny size: its files, stopping and continuing, refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from command_line import refused
from PIL import Image
from safetensors import safe_open

from nsa_layer import NSAConfig, module, nsa
from nsa_tools.commands.demo import main
from nsa_tools.demo import report, run, train, visibility
from nsa_tools.demo.data import training_batch
from nsa_tools.demo.demo_config import DemoConfig
from nsa_tools.demo.model import CHOSEN, build_models, with_blocks_chosen
from nsa_tools.demo.stop_request import StopRequest
from nsa_tools.report.files import read_metrics

REPOSITORY = Path(__file__).parents[2]
FILES = {
    "checkpoint.safetensors", "config.json", "loss.png", "metrics.jsonl", "sample.txt", "table.md", "visibility.png",
}  # fmt: skip
KINDS = ("train", "held_out")
SIZES = dict(
    seqlen=48, batch=2, steps=6, minutes=0, dim=16, layers=2, heads=2, kv_heads=1, block_size=8, block_counts=3,
    q_tile=16, window_size=8, eval_every=3, eval_windows=2, sample_bytes=5, warmup=2, index_steps=0,
)  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads cost more than they save at these sizes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files without a picture in them, which takes longer than such a run: `finished` has those that are looked at."""
    for file in (report, visibility):
        monkeypatch.setattr(file, "to_png", lambda figure: b"")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {i} of a text that repeats itself, {i % 7} times over\n" for i in range(60)))
    return path


def options(text: Path, **changes: object) -> list[str]:
    """The command line of a tiny run."""
    given = {name.replace("_", "-"): value for name, value in (SIZES | changes).items()}
    return ["--device", "cpu", "--text", str(text), *(f"--{name}={value}" for name, value in given.items())]


def config(text: Path, **changes: object) -> DemoConfig:
    return DemoConfig.for_device("cpu", **(SIZES | {"text": (str(text),)} | changes))


def losses(out: Path) -> list[tuple[object, ...]]:
    return [(r["step"], r["kind"], r["model"], r["loss"]) for r in read_metrics(out / "metrics.jsonl")]


def weights(out: Path) -> dict[str, torch.Tensor]:
    with safe_open(out / "checkpoint.safetensors", framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}


@pytest.fixture(scope="module")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that went through."""
    out = tmp_path_factory.mktemp("demo") / "out"
    assert main([*options(text, index_steps=2), "--out", str(out)]) == 0
    return out


def test_every_file_is_there_and_readable(finished: Path, text: Path) -> None:
    assert {path.name for path in finished.iterdir()} == FILES
    for name in ("loss.png", "visibility.png"):
        with Image.open(finished / name) as image:
            image.verify()
        with Image.open(finished / name) as image:
            assert image.format == "PNG" and min(image.size) > 300
    saved = json.loads((finished / "config.json").read_text())
    assert saved["demo"]["seqlen"] == 48 and saved["demo"]["text"] == [str(text)]
    assert NSAConfig.from_dict(saved["nsa"]) == config(text).nsa()
    table = (finished / "table.md").read_text()
    assert "sparse (NSA)" in table and "dense" in table and "nan" not in table
    assert all(f"dense, blocks by {rule}" in table for rule in ("the published rule", "an index", "a trained index"))
    sample = (finished / "sample.txt").read_text()
    for title in ("prompt", "written by nsa", "written by dense", "the text itself"):
        assert f"=== {title}" in sample
    records = read_metrics(finished / "metrics.jsonl")
    for model in ("nsa", "dense"):
        of_model = {kind: [r["step"] for r in records if r["model"] == model and r["kind"] == kind] for kind in KINDS}
        assert of_model == dict(train=[1, 2, 3, 4, 5, 6], held_out=[0, 3, 6])
    chosen = [(r["model"], r["step"], r["index_steps"]) for r in records if r["kind"] == "chosen"]
    assert chosen == [("by nsa", 7, 0), ("by index", 7, 0), ("by index", 8, 2)]
    assert all(r["tokens_per_second"] > 0 and r["seconds"] > 0 for r in records if r["kind"] == "train")


def test_loss_goes_down_for_both_which_see_the_same_text_and_never_the_same_twice(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bytes] = []

    def recorded(*args: object, **options: object) -> torch.Tensor:
        sequences = training_batch(*args, **options)
        seen.append(sequences.numpy().tobytes())
        return sequences

    monkeypatch.setattr(train, "training_batch", recorded)
    run.run_demo(config(text, steps=20, lr=2e-2, sample_bytes=0), tmp_path / "out")
    assert len(seen) == 40 and seen[0::2] == seen[1::2] and len(set(seen)) == 20
    for model in ("nsa", "dense"):
        curve = [loss for _, kind, name, loss in losses(tmp_path / "out") if (kind, name) == ("held_out", model)]
        assert curve[-1] < curve[0] - 0.7, (model, curve)


def test_both_models_start_from_the_same_parameters(text: Path) -> None:
    models = build_models(config(text))
    sparse, dense = (models[name].state_dict() for name in ("nsa", "dense"))
    assert dense.keys() < sparse.keys()
    assert all(torch.equal(sparse[name], dense[name]) for name in dense)
    assert {name.rsplit(".", 1)[1] for name in sparse.keys() - dense.keys()} == {
        "gate_weight", "compress_k_weight", "compress_v_weight",
    }  # fmt: skip


@pytest.mark.parametrize("kind", CHOSEN)
def test_attention_to_all_blocks_is_that_of_the_dense_model(kind: str, text: Path) -> None:
    """And an index starts as the model's keys."""
    for blocks in (6, 3):
        sizes = config(text, block_counts=blocks, q_tile=8)
        dense, tokens = build_models(sizes)["dense"], torch.randint(256, (2, 48))
        model = with_blocks_chosen(dense, sizes, kind)
        assert torch.allclose(model(tokens), dense(tokens), atol=1e-5) == (blocks == 6)
    if kind == "by index":
        attention = model.blocks[1].attention
        assert torch.equal(attention.k_index.weight, attention.k_proj.weight)


def test_dense_model_is_the_sparse_one_with_a_wide_window_alone(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def only_window(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rest: object):
        gates = q.new_tensor([0.0, 0.0, 1.0]).expand(*q.shape[:-1], 3)
        return nsa(q, k, v, **rest | dict(gates=gates, gate_weight=None))

    monkeypatch.setattr(module, "nsa", only_window)
    models = build_models(config(text, window_size=48))
    tokens = torch.randint(256, (2, 48))
    with torch.no_grad():
        torch.testing.assert_close(models["nsa"](tokens), models["dense"](tokens), rtol=1e-4, atol=1e-4)


def test_a_continued_run_gives_the_losses_of_an_uninterrupted_one(finished: Path, text: Path, tmp_path: Path) -> None:
    """Metrics that were written after the checkpoint are dropped."""
    out = tmp_path / "out"
    # Two steps: a checkpoint between two evaluations, and Adam's state is not trivial any more.
    assert main([*options(text, steps=2, index_steps=2), "--out", str(out)]) == 0
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "model": "nsa", "step": 3, "loss": 99.0, "seconds": 1}\n{"kind": "tra')
    assert main([*options(text, index_steps=2), "--out", str(out), "--resume"]) == 0
    expected = losses(finished)
    # The first run ends with an evaluation of its own.
    assert [entry for entry in losses(out) if entry[:2] != (2, "held_out")] == expected
    mine, theirs = weights(out), weights(finished)
    assert mine.keys() == theirs.keys()
    for key in theirs:
        assert torch.equal(mine[key], theirs[key]), key
    assert (out / "sample.txt").read_text() == (finished / "sample.txt").read_text()


def test_a_signal_leaves_readable_files_and_a_checkpoint(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "nsa_layer", "demo", *options(text, steps=100_000, eval_every=100_000)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen([*command, "--out", str(out)], env=environment, stderr=subprocess.PIPE, text=True) as process:
        metrics = out / "metrics.jsonl"
        limit = time.monotonic() + 60
        while not (metrics.exists() and metrics.read_text().count("\n") > 12) and time.monotonic() < limit:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        errors = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert "--resume" in errors and "Traceback" not in errors
    assert {path.name for path in out.iterdir()} == FILES - {"sample.txt", "table.md", "visibility.png"}
    steps = {model: [e[0] for e in losses(out) if e[1:3] == ("train", model)] for model in ("nsa", "dense")}
    reached = len(steps["nsa"])
    assert steps["nsa"] == steps["dense"] == list(range(1, reached + 1))
    assert weights(out)["nsa.optimizer.0.step"].item() == reached
    # Training goes on from there, one step further.
    changes = dict(steps=reached + 1, eval_every=100_000)
    assert main([*options(text, **changes), "--out", str(out), "--resume"]) == 0
    assert max(entry[0] for entry in losses(out)) == reached + 1


def test_a_second_signal_ends_it_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)  # not Python's own where a shell runs this in its background
    with pytest.raises(KeyboardInterrupt), StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        while stop.signal is None:  # Python runs handlers between two of its instructions
            time.sleep(0.01)
        assert stop.signal == signal.SIGINT
        signal.raise_signal(signal.SIGINT)
        time.sleep(60)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_time_budget_ends_training_alone(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main([*options(text, steps=1_000_000, minutes=0.01), "--out", str(out)]) == 0
    assert "time budget" in capsys.readouterr().err
    assert {path.name for path in out.iterdir()} == FILES
    reached = max(entry[0] for entry in losses(out))
    assert [e[2] for e in losses(out) if e[:2] == (reached, "held_out")] == ["nsa", "dense"]


def test_a_run_of_the_same_configuration_is_kept(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = [*options(text, steps=1, sample_bytes=0), "--out", str(out)]
    assert main(arguments) == 0
    before = (out / "metrics.jsonl").read_text()
    assert main(arguments) == 0 and main(arguments) == 0
    assert (tmp_path / "out.1" / "metrics.jsonl").read_text() == before
    assert (tmp_path / "out.2" / "config.json").exists()


def test_another_configuration_is_refused(finished: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name: path.read_bytes() for path in finished.iterdir()}
    for more in ([], ["--resume"]):
        message = refused(main, [*options(text, dim=32), "--out", str(finished), *more], capsys)
        assert "another configuration" in message and "dim: 16 -> 32" in message
    assert {path.name: path.read_bytes() for path in finished.iterdir()} == before


def test_bad_folders_and_texts_are_refused(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content in (("file", "mine"), ("empty", ""), ("foreign/config.json", "[1]")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    before = sorted(tmp_path.rglob("*"))
    for given, out, said in (
        ([], "file", "must be a folder"),
        ([], "file/below", "cannot be made"),
        ([], "", "holds files"),
        (["--resume"], "new", "there is none"),
        ([], "foreign", "not of a demo run"),
        ([f"--text={tmp_path / 'none'}"], "new", "cannot be read"),
        ([f"--text={tmp_path / 'empty'}"], "new", "must be longer"),
        (["--seqlen=2000"], "new", "held-out text must be longer"),
        (["--steps=0"], "new", "steps must be at least 1"),
        (["--heads=3"], "new", "dim / heads"),
        (["--kv-heads=3"], "new", "kv_heads must divide"),
        (["--minutes=nan"], "new", "minutes must be finite"),
        (["--block-size=5"], "new", "q_tile must be a multiple"),
        (["--dtype=int8"], "new", "dtype must be one of"),
        (["--device=cuda:99"], "new", "device must be one that PyTorch can use here, got 'cuda:99'"),
    ):
        assert said in refused(main, [*options(text), "--out", str(tmp_path / out), *given], capsys)
    assert sorted(tmp_path.rglob("*")) == before


def test_changed_files_are_refused(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, other = tmp_path / "out", tmp_path / "other.txt"
    other.write_bytes(text.read_bytes())
    assert main([*options(other, steps=1, sample_bytes=0), "--out", str(out)]) == 0
    resume, metrics = [*options(other), "--out", str(out), "--resume"], (out / "metrics.jsonl").read_text()
    other.write_bytes(text.read_bytes() + b"more")
    assert "text has changed" in refused(main, resume, capsys)
    other.write_bytes(text.read_bytes())
    checkpoint = out / "checkpoint.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    assert "checkpoint" in refused(main, resume, capsys)
    assert (out / "metrics.jsonl").read_text() == metrics
    checkpoint.unlink()
    assert "does not exist" in refused(main, resume, capsys)


def test_a_loss_that_is_not_finite_ends_the_run(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "learning_rate", lambda config, step: float("inf") if step == 3 else 1e-3)
    assert main([*options(text), "--out", str(tmp_path / "out")]) == 1
    assert "training loss of nsa is nan" in capsys.readouterr().err
    assert weights(tmp_path / "out")["nsa.optimizer.0.step"].item() == 3
    json.dumps(read_metrics(tmp_path / "out" / "metrics.jsonl"), allow_nan=False)
