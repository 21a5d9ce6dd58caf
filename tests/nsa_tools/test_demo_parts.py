"""The parts of the demo on their own: text, sampling, pictures, files, options."""

from __future__ import annotations

import io
import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from nsa_layer import NSAConfig
from nsa_tools.demo import report
from nsa_tools.demo.data import held_out_windows, load_text, standard_library, training_batch
from nsa_tools.demo.demo_config import DemoConfig
from nsa_tools.demo.model import build_models
from nsa_tools.demo.sample import continue_text
from nsa_tools.demo.train import side_by_side
from nsa_tools.demo.visibility import compressed_visible, selected_visible, window_visible
from nsa_tools.report.files import MetricsLog, write_atomic

TINY = DemoConfig.for_device(
    "cpu", seqlen=48, dim=16, layers=2, heads=2, kv_heads=1, block_size=8, block_counts=3, q_tile=16, window_size=8
)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i} of a text\n" for i in range(100)))
    return path


def test_data_depends_on_seed_and_step_only(text: Path) -> None:
    loaded = load_text([text], seqlen=48)
    draw = lambda seed, step: training_batch(loaded, seed=seed, step=step, batch=4, seqlen=48)  # noqa: E731
    assert torch.equal(draw(1, 5), draw(1, 5))
    assert not torch.equal(draw(1, 5), draw(1, 6)) and not torch.equal(draw(1, 5), draw(2, 5))
    content = text.read_bytes()
    cut = len(content) - len(content) // 10
    assert bytes(loaded.train.tolist()) == content[:cut] and bytes(loaded.held_out.tolist()) == content[cut:]
    windows = held_out_windows(loaded, windows=3, seqlen=48)
    assert bytes(windows[0].tolist()) == content[cut : cut + 49] and bytes(windows[2].tolist()) == content[-49:]


def test_every_tenth_of_many_files_is_held_out(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i:02}" for i in range(25)]
    for i, path in enumerate(paths):
        path.write_bytes(bytes([i]) * 10)
    loaded = load_text(paths, seqlen=5)
    assert set(loaded.held_out.tolist()) == {9, 19}
    assert set(loaded.train.tolist()) == set(range(25)) - {9, 19}


def test_standard_library_is_sorted_and_holds_no_installed_package() -> None:
    found = standard_library()
    names = [path.name for path in found]
    assert "argparse.py" in names and len(found) > 100
    assert not any({"site-packages", "test"} & set(path.parts[-4:]) for path in found)
    assert found == standard_library()


@pytest.mark.parametrize("kind, q_tile", [("nsa", 1), ("nsa", 16), ("dense", 16)])
def test_sampling_ignores_what_stands_behind(kind: str, q_tile: int) -> None:
    model = build_models(replace(TINY, q_tile=q_tile))[kind]
    prompt = torch.randint(256, (20,))
    short, long = (continue_text(model, prompt, count, seed=3) for count in (4, 9))
    assert torch.equal(long[:4], short)
    assert len(continue_text(model, prompt, 9, seed=3, seconds=0)) == 0


@pytest.mark.parametrize("q_tile", [1, 8])
def test_samples_come_through_caches_where_tokens_choose(q_tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_models(replace(TINY, q_tile=q_tile))["nsa"]
    prompt = torch.randint(256, (20,))
    shapes = []
    hook = model.embedding.register_forward_hook(lambda _, given, __: shapes.append(tuple(given[0].shape)))
    written = continue_text(model, prompt, 5, seed=3)
    assert shapes == ([(1, 20), *[(1, 1)] * 4] if q_tile == 1 else [(1, 25)] * 5)
    hook.remove()
    monkeypatch.setattr(model, "new_caches", lambda *sizes: None)
    assert torch.equal(continue_text(model, prompt, 5, seed=3), written)


def test_pictures_show_the_definition() -> None:
    settings = NSAConfig(block_size=4, compress_stride=2, block_counts=2, q_tile=8, window_size=3)
    T, queries = 19, torch.arange(19)
    lists = torch.tensor([[0, -1], [0, 1], [2, 4]])
    compressed, selected = torch.zeros(T, T, dtype=torch.bool), torch.zeros(T, T, dtype=torch.bool)
    for t in range(T):
        for j in range(settings.compressed_length(T)):
            if j * 2 + 3 <= t:
                compressed[t, j * 2 : j * 2 + 4] = True
        for block in lists[t // 8].tolist():
            selected[t, block * 4 : block * 4 + 4] |= block >= 0
        selected[t, t + 1 :] = False
    assert torch.equal(compressed_visible(queries, T, config=settings), compressed)
    assert torch.equal(selected_visible(queries, T, lists, config=settings), selected)
    window = torch.ones(T, T).tril().triu(-2).bool()
    assert torch.equal(window_visible(queries, T, config=settings), window)


def test_on_a_cpu_both_models_work_at_the_same_time() -> None:
    meeting = threading.Barrier(2, timeout=60)
    before = torch.get_num_threads()
    with side_by_side("cpu", models=2, threads=before + 1) as each:
        assert each(lambda name: (meeting.wait() >= 0, torch.get_num_threads()), "ab") == [(True, before + 1)] * 2
    assert torch.get_num_threads() == before
    with side_by_side("cuda", models=2, threads=1) as each:
        assert each(lambda name: threading.current_thread(), "ab") == [threading.main_thread()] * 2


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old")

    def fails(source: object, target: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, "new")
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_metrics_are_on_disk_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, up_to_step=0)
    log.write(kind="train", model="nsa", step=1, loss=0.5)
    assert [json.loads(line) for line in path.read_text().splitlines()] == log.records
    log.close()


def test_a_loss_curve_can_be_drawn_from_nothing(tmp_path: Path) -> None:
    report.write_loss(tmp_path, MetricsLog(tmp_path / "metrics.jsonl", up_to_step=0), TINY)
    Image.open(io.BytesIO((tmp_path / "loss.png").read_bytes())).verify()


def test_resume_may_change_only_the_length_of_a_run() -> None:
    saved = json.loads(json.dumps(vars(TINY)))
    assert replace(TINY, steps=99, minutes=1.0, sample_bytes=3).differences(saved) == []
    assert replace(TINY, seed=4).differences(saved) == ["seed: 0 -> 4"]
