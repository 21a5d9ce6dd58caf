"""The `bench` command: a row for every variant whatever happens to others, its file, and its chart."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import torch
from command_line import TINY, refused
from matplotlib.backends.backend_agg import FigureCanvasAgg

from nsa_layer import NSAConfig
from nsa_tools.commands import bench
from nsa_tools.measure import bench_run, decode_steps
from nsa_tools.measure.bench_run import Bench, Options, union
from nsa_tools.measure.peak_memory import is_out_of_memory
from nsa_tools.measure.timed_calls import Step
from nsa_tools.report import bench_chart, bench_tables
from nsa_tools.report.figures import new_figure
from nsa_tools.report.results import Row, read_bench
from nsa_tools.shape import Shape

CONFIG = NSAConfig(block_size=8, block_counts=3, q_tile=16, window_size=8)
SHAPE = Shape(B=1, T=64, Hq=4, Hkv=2, D=8, Dv=8, dtype=torch.float32, device="cpu", config=CONFIG)
OPTIONS = Options("eager", repeats=2, error_rows=0)


def fake(**attend) -> object:
    """In place of `variants`: functions by name."""

    def make(shape: Shape, backend: str, *, sets: int) -> dict[str, Step]:
        q = torch.ones(1, shape.T, 1, 1, requires_grad=True)
        return {name: Step(call, [{"q": q}] * sets, torch.ones_like(q)) for name, call in attend.items()}

    return make


def fine(q: torch.Tensor) -> torch.Tensor:
    return 2 * q


def rows(file: Path) -> list[dict]:
    return json.loads(file.read_text())["rows"]


@pytest.mark.parametrize("extra", [["--packed", "4"], ["--mode", "forward"]])
def test_every_variant_and_direction_is_a_row_with_every_key(
    extra: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_run, "HOST_CALLS", (2, 2))
    file, picture = tmp_path / "found.json", tmp_path / "found.png"
    paths = ["--json", str(file), f"--chart={picture}"]
    assert bench.main([*TINY, "--seqlen", "64", "100", "--repeats=2", *extra, *paths]) == 0
    shown = capsys.readouterr().out
    directions = 1 if "forward" in extra else 3
    assert len(rows(file)) == 2 * 3 * directions
    for row in rows(file):
        assert list(row) == [field.name for field in fields(Row)]
        assert row["status"] == "measured" and len(row["timings_ms"]) == 2 and row["ms"] > 0
        assert (row["over_dense"] is None) == (row["variant"] == "dense")
        timed_alone = row["direction"] == "forward"
        assert (row["host_us"] is not None) == (row["direction"] != "backward")
        assert (row["error"] is not None) == (timed_alone and row["variant"] != "dense")
        assert row["sequences"] == (4 if extra[:1] == ["--packed"] else None)
    document = json.loads(file.read_text())
    names = "schema command environment backend config rows"
    assert list(document) == names.split()
    assert str(tmp_path) not in file.read_text() and "--repeats=2" in document["command"]
    assert picture.read_bytes().startswith(b"\x89PNG") and "<svg" in picture.with_suffix(".svg").read_text()
    # The file alone gives the same tables again, and the same picture.
    before = picture.with_suffix(".svg").read_bytes()
    assert bench.main(["--from", str(file), "--chart", str(picture)]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == shown.splitlines()[2:]
    assert picture.with_suffix(".svg").read_bytes() == before


def test_the_footer_says_where_and_when() -> None:
    row = Row.of(SHAPE, variant="nsa", direction="forward", graph=False, status="measured", ms=1.0)
    where = {"gpu": "A GPU", "torch": "2.99", "flash_attn.cute": "4.0", "patches": 3, "date": "2030-01-02"}
    shown = bench_chart.footer([row], where)
    assert all(text in shown for text in ("A GPU", "Hq 4, Hkv 2", "2.99", "4.0 with 3 patches", "2030-01-02"))


def times_of(T: int, heads: tuple[int, int], factor: float) -> list[Row]:
    """Rows of dense attention and of a layer that is so much faster, gated a little less."""
    shape = replace(SHAPE, T=T, Hq=heads[0], Hkv=heads[1])
    static = dict(direction="forward", graph=False, status="measured")
    variants = ("dense", None), ("nsa", factor), ("gated", 0.99 * factor)
    ms = {name: T * heads[0] / (over or 1) for name, over in variants}
    return [Row.of(shape, variant=name, ms=ms[name], over_dense=over, **static) for name, over in variants]


def test_chart_has_a_line_for_each_shape_and_labels_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = []
    monkeypatch.setattr(bench_chart, "new_figure", lambda *size: figures.append(new_figure(*size)) or figures[0])
    rows = [row for T, factor in ((4096, 0.8), (65536, 9.6), (1 << 20, 47)) for row in times_of(T, (32, 8), factor)]
    rows += times_of(65536, (64, 4), 9.7)
    bench_chart.draw(rows, {}, tmp_path / "chart.png")
    (figure,) = figures
    times, factors = figure.axes
    lines = [list(line.get_xdata()) for line in times.lines if line.get_linestyle() != "None"]
    assert sorted(map(len, lines)) == [1, 1, 1, 3, 3, 3] and all(line == sorted(set(line)) for line in lines)
    labels = [text.get_text() for text in times.get_legend().get_texts()]
    assert len(set(labels)) == 6 and sum("64/4 heads" in label for label in labels) == 3
    FigureCanvasAgg(figure).draw()
    boxes = [label.get_window_extent() for label in factors.texts]
    assert len(boxes) == 8
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


class FullInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q):
        return 2 * q

    @staticmethod
    def backward(ctx, do):
        raise RuntimeError("CUDA error: out of memory")


def full_in_backward(q: torch.Tensor) -> torch.Tensor:
    return FullInBackward.apply(q)  # which takes no names in PyTorch 2.11


def failing(error: Exception):
    def attend(*args: object, **options: object) -> object:
        raise error

    return attend


@pytest.mark.parametrize(
    ("attend", "forward", "backward", "detail"),
    [
        (failing(torch.OutOfMemoryError("CUDA out of memory")), "out of memory", "out of memory", None),
        (full_in_backward, "measured", "out of memory", None),
        (
            failing(ValueError("q is not what it should be")),
            "failed",
            "failed",
            "ValueError: q is not what it should be",
        ),
    ],
    ids=["full", "full in backward", "wrong"],
)
def test_a_failure_is_a_row_and_not_the_end(attend, forward: str, backward: str, detail: str | None) -> None:
    run = Bench(OPTIONS, make=fake(dense=fine, nsa=attend, gated=fine))
    run.run(SHAPE)
    run.run(replace(SHAPE, T=128))
    assert len({(row.T, row.variant, row.direction) for row in run.rows}) == len(run.rows) == 2 * 3 * 3
    for row in run.rows:
        own = forward if row.direction == "forward" else backward
        assert row.status == (own if row.variant == "nsa" else "measured")
        assert row.status != "failed" or row.detail == detail
    assert ("out of memory" in bench_tables.times(run.rows)) == (backward == "out of memory")


def test_inputs_that_do_not_fit_are_rows_too() -> None:
    run = Bench(replace(OPTIONS, variants=("nsa", "gated")), make=failing(torch.OutOfMemoryError("no")))
    run.run(SHAPE)
    assert [row.status for row in run.rows] == ["out of memory"] * 6
    assert is_out_of_memory(RuntimeError("CUDA_ERROR_OUT_OF_MEMORY")) and not is_out_of_memory(ValueError("q"))


def _quadratic(clock: list[float], seconds_a_pair: float = 1.0):
    """Attention whose time grows with the square of the length, on a clock of the test's own."""

    def attend(q: torch.Tensor) -> torch.Tensor:
        clock[0] += seconds_a_pair * q.shape[1] ** 2
        return 2 * q

    return attend


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Seconds, which pass only when a fake says so."""
    now = [0.0]
    monkeypatch.setattr("nsa_tools.measure.timing.time.perf_counter", lambda: now[0])
    yield now


def test_dense_attention_that_takes_too_long_is_skipped_and_says_so(clock: list[float]) -> None:
    options = replace(OPTIONS, dense_limit=64.0**2 * 1.5)
    run = Bench(options, make=fake(dense=_quadratic(clock), nsa=_quadratic(clock, 0.5), gated=fine))
    run.seconds_a_pair = 1.0
    run.run(SHAPE)
    run.run(replace(SHAPE, T=256))
    found = {(row.T, row.variant, row.direction): row for row in run.rows}
    assert found[64, "dense", "forward"].status == "measured" and found[64, "nsa", "forward"].over_dense == 2.0
    far = found[256, "dense", "forward"]
    assert far.status == "too slow" and far.detail == "about 65,536 s a timing"
    assert found[256, "nsa", "forward"].over_dense is None and found[256, "nsa", "forward"].ms
    assert "too slow" in bench_tables.times(run.rows) and "(2.00x)" in bench_tables.times(run.rows)


def test_slow_dense_attention_is_timed_once(clock: list[float]) -> None:
    calls = []

    def dense(q: torch.Tensor) -> torch.Tensor:
        calls.append(q.shape[1])
        clock[0] += 3.0
        return 2 * q

    run = Bench(replace(OPTIONS, repeats=5), make=fake(dense=dense, nsa=fine, gated=fine))
    run.seconds_a_pair = 3.0 / SHAPE.dense_pairs()
    run.run(SHAPE)
    measured = {row.direction: row for row in run.rows if row.variant == "dense"}
    assert len(calls) == 1 and all(len(row.timings_ms) == 1 for row in measured.values())
    assert measured["forward"].ms == pytest.approx(3000)
    assert all(len(row.timings_ms) == 5 for row in run.rows if row.variant == "nsa")


def test_a_decode_step_is_timed_beside_dense_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, options = tmp_path / "decode.json", ["--decode", "--q-tile=1", "--batch=2", "--repeats=2"]
    options += ["--cache-dtype=fp8", "--head-dim-v=6"]
    assert bench.main([*TINY, "--seqlen", "40", "64", *options, "--json", str(file)]) == 0
    assert "best dense over nsa" in capsys.readouterr().out
    read_bench(file)
    found = json.loads(file.read_text())["decode"]
    assert [row["T"] for row in found] == [40, 64]
    assert all(set(row["us"]) == {"nsa", "nsa fp8", "sdpa"} and min(row["us"].values()) > 0 for row in found)

    def fail(**_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(decode_steps, "nsa_with_kvcache", fail)
    assert bench.main([*TINY, "--seqlen", "40", *options]) == 1
    shown = capsys.readouterr().out
    assert "failed" in shown and "no such kernel" in shown
    assert "is for --decode" in refused(bench.main, [*TINY, "--seqlen", "40", "--cache-dtype=fp8"], capsys)
    assert "--packed" in refused(bench.main, [*TINY, "--seqlen", "40", "--decode", "--packed", "2"], capsys)


def test_a_file_of_another_kind_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "other.json"
    for text, message in (("[", "not JSON"), ("{}", "no schema 1")):
        file.write_text(text)
        assert message in refused(bench.main, ["--from", str(file)], capsys)
    row = asdict(Row.of(SHAPE, variant="nsa", direction="forward", graph=False, status="failed"))
    del row["ms"]
    file.write_text(json.dumps(dict(schema=1, rows=[row])))
    with pytest.raises(ValueError, match="'ms'"):
        read_bench(file)


def test_committed_results_are_readable() -> None:
    for file in sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.json")):
        document, found = read_bench(file)
        assert found or document["crossovers"] or document["first_call"], file
        assert document["environment"]["gpu"], file


@pytest.mark.gpu
@pytest.mark.parametrize("extra", [[], ["--graph"], ["--packed=5"]])
def test_every_row_is_measured_on_a_gpu(extra: list[str], tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    assert bench.main(["--seqlen=3000", "--repeats=2", "--json", str(file), *extra]) == 0
    found = rows(file)
    assert {row["status"] for row in found} == {"measured"} and all(row["ms"] > 0 for row in found)
    assert {row["graph"] for row in found} == {"--graph" in extra}
    assert all(row["of_limit"] <= 1 for row in found if row["variant"] != "dense" and row["direction"] == "forward")
    assert all((row["peak_bytes"] is None) == row["graph"] for row in found)


def test_smooth_inputs_change_slowly_and_have_unit_variance() -> None:
    q = replace(SHAPE, T=4096, data="smooth").inputs()["q"].detach()[0]
    drawn = replace(SHAPE, T=4096).inputs()["q"].detach()[0]

    def alike(x: torch.Tensor, apart: int) -> float:
        return (x[apart:] * x[:-apart]).mean().item()

    assert abs(q.var().item() - 1) < 0.05
    assert alike(q, 1) > 0.95 and alike(q, 4) > 0.9 and abs(alike(q, 100)) < 0.05
    assert abs(alike(drawn, 1)) < 0.05


def test_union_counts_the_blocks_of_a_tile_once() -> None:
    lists = torch.tensor([[0, 1, -1], [0, 2, 3]], dtype=torch.int32).repeat(64, 1).view(1, 128, 1, 3)
    for Hq, q_tile in ((64, 1), (16, 4)):  # two lists a tile
        shape = replace(SHAPE, T=128 * q_tile, Hq=Hq, Hkv=1, config=CONFIG.replace(q_tile=q_tile))
        assert union(lists, shape) == pytest.approx(4 / 2.5)
        assert union(lists[0], shape) == pytest.approx(4 / 2.5)
