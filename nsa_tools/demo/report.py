"""The files that are written at the end of a run: curves of losses, pictures, a table and a sample."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import torch

from nsa_tools.demo.data import Text, held_out_windows, training_batch
from nsa_tools.demo.demo_config import DemoConfig
from nsa_tools.demo.model import ByteModel
from nsa_tools.demo.sample import sample_report
from nsa_tools.demo.train import Map
from nsa_tools.demo.visibility import NSA_COLOUR, visibility_figure
from nsa_tools.measure.peak_memory import peak_bytes
from nsa_tools.report.figures import INK, MUTED, clean_axes, new_figure, to_png
from nsa_tools.report.files import MetricsLog, write_atomic
from nsa_tools.report.tables import markdown

COLOURS = {"nsa": NSA_COLOUR, "dense": "#eb6834"}
NAMES = {"nsa": "sparse (NSA)", "dense": "dense"}
# Of the dense model's weights with attention to chosen blocks alone, by model and if the index has been trained.
CHOSEN = {
    ("by nsa", False): ("dense, blocks by the published rule", "#7a7a7a", ":"),
    ("by index", False): ("dense, blocks by an index", "#2a9d5c", ":"),
    ("by index", True): ("dense, blocks by a trained index", "#2a9d5c", "--"),
}
# A training step sees one sequence, and sequences differ more than steps do.
SMOOTHED = 10
# The first steps compile kernels and fill caches.
UNTIMED_STEPS = 3


def write_loss(out: Path, log: MetricsLog, config: DemoConfig) -> None:
    """Write loss.png: the held-out loss of both models over the steps, and behind it the training loss, smoothed."""
    figure = new_figure(7.5, 4.6)
    axes = figure.add_subplot()
    clean_axes(axes)
    for model, colour in COLOURS.items():
        steps, losses = _curve(log, "train", model)
        windows = [losses[max(0, end - SMOOTHED) : end] for end in range(1, len(losses) + 1)]
        axes.plot(steps, list(map(statistics.fmean, windows)), color=colour, linewidth=0.8, alpha=0.45)
        steps, losses = _curve(log, "held_out", model)
        label = f"{NAMES[model]}: {losses[-1]:.3f}" if losses else NAMES[model]
        axes.plot(steps, losses, color=colour, linewidth=2, marker="o", markersize=4, label=label)
    for record, (name, colour, style) in _chosen(log):
        label = f"{name}: {record['loss']:.3f}"
        axes.axhline(record["loss"], color=colour, linestyle=style, linewidth=1, label=label)
    axes.set_xlabel("optimizer steps", color=MUTED)
    axes.set_ylabel("loss, nats per byte", color=MUTED)
    title = f"{config.layers} layers of width {config.dim}, {config.seqlen:,} tokens, {config.device}"
    axes.set_title(title, color=INK, fontsize=11, loc="left")
    axes.legend(title=f"held-out text (thin: training, mean of {SMOOTHED} steps)", frameon=False, labelcolor=INK)
    write_atomic(out / "loss.png", to_png(figure))


def _chosen(log: MetricsLog) -> list[tuple[dict, tuple[str, str, str]]]:
    """Records of attention to chosen blocks, of the last time that there were some, with name, colour and style."""
    records = log.select("chosen")[-len(CHOSEN) :]
    return [(record, CHOSEN[record["model"], record["index_steps"] > 0]) for record in records]


def _curve(log: MetricsLog, kind: str, model: str) -> tuple[list[int], list[float]]:
    records = log.select(kind, model)
    return [record["step"] for record in records], [record["loss"] for record in records]


def write_report(
    out: Path, models: dict[str, ByteModel], each: Map, text: Text, log: MetricsLog, config: DemoConfig
) -> str:
    """Write loss.png, visibility.png, table.md and sample.txt; return the table."""
    write_loss(out, log, config)
    tokens = held_out_windows(text, windows=1, seqlen=config.seqlen)[0, :-1].to(config.device)
    write_atomic(out / "visibility.png", visibility_figure(models["nsa"], tokens, config=config.nsa()))
    table = summary_table(models, text, log, config)
    write_atomic(out / "table.md", table + "\n")
    if config.sample_bytes:
        write_atomic(out / "sample.txt", sample_report(models, each, text, config))
    return table


def summary_table(models: dict[str, ByteModel], text: Text, log: MetricsLog, config: DemoConfig) -> str:
    """One row for each model, as Markdown."""
    header = [
        "attention", "parameters", "steps", "held-out loss (nats/byte)", "bits/byte", "median step (ms)", "tokens/s",
        "peak memory of a step (MiB)",
    ]  # fmt: skip
    rows = []
    for name, model in models.items():
        train, held_out = log.select("train", name), log.select("held_out", name)
        seconds = [record["seconds"] for record in train[UNTIMED_STEPS:] or train]
        step, loss = statistics.median(seconds or [math.nan]), held_out[-1]["loss"] if held_out else math.nan
        parameters, rate = sum(p.numel() for p in model.parameters()), config.batch * config.seqlen / step
        peak = _peak_of_step(model, text, config) / 2**20
        cells = [f"{parameters:,}", len(train), f"{loss:.3f}", f"{loss / math.log(2):.3f}"]
        rows.append([NAMES[name], *cells, f"{step * 1e3:.1f}", f"{rate:,.0f}", f"{peak:,.1f}"])
    for record, (name, *_) in _chosen(log):
        loss, steps = record["loss"], record["index_steps"]
        rows.append([name, "", steps, f"{loss:.3f}", f"{loss / math.log(2):.3f}", "", "", ""])
    return f"{markdown(header, rows)}\n\n{_what_was_run(config)}"


def _what_was_run(config: DemoConfig) -> str:
    how = "the models one after the other"
    if torch.device(config.device).type == "cpu":
        how = f"both models at the same time, each with {config.threads} thread{'s' * (config.threads > 1)}"
    return (
        f"{config.seqlen:,} tokens in a sequence, {config.batch} in a step, on {config.device} ({config.dtype}), "
        f"{how}; a step is forward, backward and optimizer. Peak memory is that of forward and backward: activations "
        "and gradients, above parameters and optimizer state."
    )


def _peak_of_step(model: ByteModel, text: Text, config: DemoConfig) -> int:
    sequences = training_batch(text, seed=config.seed, step=0, batch=config.batch, seqlen=config.seqlen)
    sequences = sequences.to(config.device)
    model.train()
    model.zero_grad(set_to_none=True)
    try:
        return peak_bytes(lambda: model.loss(sequences).backward(), config.device)
    finally:
        model.zero_grad(set_to_none=True)
        if torch.device(config.device).type == "cuda":
            torch.cuda.empty_cache()
