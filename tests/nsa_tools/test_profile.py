"""The `profile` command: time goes to the component that spent it, and has a floor beside it."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import TINY

from nsa_layer import NSAConfig, reference
from nsa_layer.profiler_ranges import component, observed
from nsa_tools.commands import profile
from nsa_tools.measure import kernel_trace, roofline
from nsa_tools.measure.component_times import HostClock
from nsa_tools.shape import Shape


def launch(number: int, ts: float, tid: int = 1) -> dict:
    return {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "tid": tid, "ts": ts, "args": {"correlation": number}}


def kernel(number: int, ts: float, dur: float, name: str = "k", cat: str = "kernel") -> dict:
    return {"cat": cat, "name": name, "tid": 7, "ts": ts, "dur": dur, "args": {"correlation": number}}


def annotation(name: str, ts: float, dur: float, tid: int = 1) -> dict:
    return {"cat": "user_annotation", "name": name, "tid": tid, "ts": ts, "dur": dur, "args": {}}


def test_a_kernel_belongs_to_the_innermost_range_of_the_thread_that_launched_it() -> None:
    events = [
        {"ph": "M", "name": "process_name"},
        annotation("nsa-phase::forward 0", 0, 100),
        annotation("nsa-phase::backward 0", 200, 100),
        annotation("nsa::slc", 10, 50),
        annotation("nsa::convert", 20, 10),
        annotation("nsa::gate", 210, 50, tid=2),
        annotation("nsa::nothing", 215, 50, tid=2),  # no component
        annotation("other", 220, 50, tid=2),
        launch(1, 15), kernel(1, 500, 4000),
        launch(2, 25), kernel(2, 5000, 1000, name="sum"),
        launch(3, 40), kernel(3, 6000, 2000, cat="gpu_memset"),
        launch(4, 70), kernel(4, 9000, 500),
        launch(5, 230, tid=2), kernel(5, 9500, 100),
        launch(6, 230, tid=1), kernel(6, 9700, 100),
        {"cat": "gpu_user_annotation", "name": "nsa::cmp", "ts": 500, "dur": 10000, "tid": 7},
        {"cat": "gpu_user_annotation", "name": "nsa-phase::forward 1", "ts": 500, "dur": 10000, "tid": 7},
        kernel(7, 9900, 200),  # whose launch the trace does not have
    ]  # fmt: skip
    found = [(k.component, k.phase, k.ms) for k in kernel_trace.kernels(events)]
    assert found == [
        ("slc", "forward 0", 4.0),
        ("convert", "forward 0", 1.0),
        ("slc", "forward 0", 2.0),
        ("other", "forward 0", 0.5),
        ("gate", "backward 0", 0.1),
        ("other", "backward 0", 0.1),
        ("cmp", "forward 1", 0.2),
    ]


def test_the_host_clock_leaves_out_components_inside_a_component() -> None:
    clock = HostClock()
    with observed(clock):
        with component("slc"):
            time.sleep(0.02)
            with component("convert"):
                time.sleep(0.06)
        with component("slc"):
            time.sleep(0.01)
    assert 30 <= clock.ms["slc"] < 60 <= clock.ms["convert"] < 90


@pytest.mark.parametrize("T", [1, 7, 8, 100, 129])
@pytest.mark.parametrize(("stride", "q_tile"), [(8, 16), (4, 16), (8, 4), (4, 1)])
def test_pairs_are_those_that_the_masks_show(T: int, stride: int, q_tile: int) -> None:
    config = NSAConfig(block_size=8, compress_stride=stride, block_counts=6, q_tile=q_tile, window_size=11)
    shape = Shape(B=1, T=T, Hq=1, Hkv=1, D=8, Dv=8, dtype=torch.float32, device="cpu", config=config)
    q, k = torch.randn(2, T, 1, 8).unbind()
    static = dict(config=config, causal=True)
    scores = reference.selection_scores(q, reference.compress(k, None, config=config), **static, softmax_scale=1.0)
    lists = reference.select_blocks(scores, config=config, width=config.list_width(T))
    found = roofline.visible_pairs(shape)
    Tc = config.compressed_length(T)
    assert found["cmp"] == int(reference.compressed_mask(T, Tc, **static, device="cpu").sum())
    assert found["swa"] == int(reference.window_mask(T, **static, device="cpu").sum())
    assert found["slc"] == int(reference.selected_mask(lists, T, **static).sum())


def test_a_floor_is_the_longer_of_bytes_and_arithmetic() -> None:
    at = roofline.Ceilings(1e12, 1e15, 5e14)
    assert roofline.Work(1e9, 1e11).floor_ms(at, "forward") == pytest.approx(1)
    assert roofline.Work(1e9, 2e12).floor_ms(at, "forward") == pytest.approx(2)
    assert roofline.Work(1e9, 2e12).floor_ms(at, "backward") == pytest.approx(4)


def test_floors_of_the_documented_shape_are_those_that_were_worked_out_by_hand() -> None:
    sizes = dict(B=1, T=1 << 20, Hq=32, Hkv=8, D=128, Dv=128, dtype=torch.bfloat16, device="cpu")
    shape = Shape(**sizes, config=NSAConfig(q_tile=128))
    at = roofline.Ceilings(**roofline.H200)
    ms = {key: work.floor_ms(at, key[1]) for key, work in roofline.work(replace(shape, gate="none")).items()}
    for name, floor, rel in (("cmp", 213, 0.01), ("swa", 13.3, 0.01), ("slc", 25, 0.02)):
        assert ms[name, "forward"] == pytest.approx(floor, rel=rel)
    attention = sum(ms[name, "backward"] for name in ("cmp", "slc", "swa"))
    assert attention == pytest.approx(680, rel=0.01)
    assert ms["compress", "forward"] == pytest.approx(4.3e9 * (1 + 1 / 64 + 1 / 64) / 4.2e9, rel=0.01)


def test_by_token_the_kernels_passes_have_floors_of_their_own() -> None:
    """64/4 heads, 65,536 tokens, 16 blocks of 64: about 2.2 TFLOP forward, of two products; then four and three."""
    config = NSAConfig(q_tile=1)
    sizes = dict(B=1, T=1 << 16, Hq=64, Hkv=4, D=128, Dv=128, dtype=torch.bfloat16, device="cpu", config=config)
    shape = Shape(**sizes)
    found, at = roofline.work(shape), roofline.Ceilings(**roofline.H200)
    forward = found["slc", "forward"].flops
    assert forward == pytest.approx(2.2e12, rel=0.05) and ("slc", "backward") not in found
    assert found["slc_dkdv", "backward"].flops == 2 * forward and found["slc_dq", "backward"].flops == 1.5 * forward
    assert found["choose", "forward"].floor_ms(at, "forward") == pytest.approx(0.83, rel=0.02)
    lists = (1 << 16) * 4 * 16 * 4
    assert found["pairs", "backward"].bytes == 2 * lists
    assert found["lists", "forward"].bytes == lists * (1 + 2 / 8)  # 8 tokens a tile, an entry and its word
    assert "slc_dq" not in {name for name, _ in roofline.work(shape, "eager")}


def test_components_are_written_as_they_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "profile.json"
    options = ["--seqlen=64", "--repeats=1", "--rows=3"]
    assert profile.main([*TINY, *options, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    lines = [[c.strip() for c in line.split("|")[1:-1]] for line in printed.splitlines()]
    shown = {(line[0], line[1]): line for line in lines if len(line) == 9}
    both = {(branch, way) for branch in ("cmp", "slc", "swa") for way in ("forward", "backward")}
    assert both | {("choose", "forward"), ("gate", "forward")} <= shown.keys()
    document = json.loads(file.read_text())
    assert f"floors: {document['ceilings']['bytes_a_second'] / 1e12:.3g} TB/s" in printed
    assert str(tmp_path) not in file.read_text()
    (call,) = document["calls"]
    assert set(call["whole_ms"]) == {"forward", "backward"}
    measured = {(row["component"], row["direction"]): row for row in call["rows"] if row["ms"] is not None}
    assert ("slc", "backward") in measured and measured.keys() <= shown.keys()
    for key, row in measured.items():
        assert shown[key][2] == f"{row['ms']:.3f}"
        assert row["floor_ms"] is None or shown[key][7] == f"{row['floor_ms']:.3f}"
    assert profile.main([*TINY, *options, "--mode=forward", "--ungated", "--packed=3"]) == 0
    assert "backward |" not in capsys.readouterr().out


@pytest.mark.gpu
def test_on_a_gpu_every_kernel_is_attributed(capsys: pytest.CaptureFixture[str]) -> None:
    def call() -> None:
        with component("choose"):
            torch.randn(1000, device="cuda").sort()
        torch.randn(1000, 1000, device="cuda").sum()

    call()
    found = kernel_trace.record({"forward 0": call, "forward 1": call})
    assert {k.component for k in found} == {"choose", "other"} and {k.phase for k in found} == {
        "forward 0",
        "forward 1",
    }
    assert all(k.ms > 0 for k in found)
