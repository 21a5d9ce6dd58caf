"""A demo run: prepare the folder, train both models, write the report."""

from __future__ import annotations

import json
import platform
import sys
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import torch

from nsa_tools.demo.checkpoint import load_checkpoint
from nsa_tools.demo.data import Text, load_text
from nsa_tools.demo.demo_config import DemoConfig, DemoError
from nsa_tools.demo.model import ByteModel, build_models
from nsa_tools.demo.report import write_loss, write_report
from nsa_tools.demo.stop_request import StopRequest
from nsa_tools.demo.train import Training, build_optimizers, log_chosen_blocks, side_by_side
from nsa_tools.report.files import MetricsLog, write_json


def run_demo(config: DemoConfig, out: Path, *, resume: bool = False, started: float | None = None) -> int:
    """Train both models and write the folder ``out``.

    Args:
        config: what to train.
        out: the folder; a run of the same configuration that is already there is moved aside unless ``resume``.
        resume: go on from the checkpoint in ``out``.
        started: when the command began, on the clock of `time.monotonic`; the time budget counts from there.

    Returns:
        0, or 128 + the number of the signal that stopped it.

    Raises:
        DemoError: the text or the folder does not fit; nothing was written.
        FloatingPointError: a loss is not finite; what was written before stays.
    """
    started = time.monotonic() if started is None else started
    text = load_text(config.text, seqlen=config.seqlen)
    check_folder(out, config, text, resume=resume)
    models = build_models(config)
    optimizers = build_optimizers(models, config)
    checkpoint = out / "checkpoint.safetensors"
    step = 0
    if resume:
        step = load_checkpoint(checkpoint, models=models, optimizers=optimizers, device=config.device)
    else:
        _make_folder(out)
    write_json(out / "config.json", describe(config, text, models))
    log = MetricsLog(out / "metrics.jsonl", up_to_step=step)
    deadline = started + config.minutes * 60 if config.minutes else float("inf")
    with closing(log), side_by_side(config.device, models=len(models), threads=config.threads) as each:
        training = Training(config, text, models, optimizers, each, log, checkpoint, deadline)
        with StopRequest() as stop:
            reached = training.run(step, stop, on_evaluation=lambda: write_loss(out, log, config))
        how = f"step {reached} of {config.steps}; go on with --resume --out {out}"
        if stop.signal is not None:
            write_loss(out, log, config)
            print(f"stopped at {how}", file=sys.stderr)
            return 128 + stop.signal
        if reached < config.steps:
            print(f"the time budget of {config.minutes:g} minutes ended training at {how}", file=sys.stderr)
        if config.index_steps:
            log_chosen_blocks(models["dense"], reached, text, config, each, log)
        print("writing the report", file=sys.stderr)
        print(write_report(out, models, each, text, log, config))
    return 0


def describe(config: DemoConfig, text: Text, models: dict[str, ByteModel]) -> dict[str, object]:
    """The content of config.json."""
    device = torch.device(config.device)
    machine = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
    }
    sizes = dict(train_bytes=len(text.train), held_out_bytes=len(text.held_out))
    return {
        "demo": asdict(config),
        "nsa": asdict(config.nsa()),
        "text": dict(files=text.files, sha256=text.sha256, **sizes),
        "parameters": {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()},
        "machine": machine,
    }


def check_folder(out: Path, config: DemoConfig, text: Text, *, resume: bool) -> None:
    """Raise DemoError for what is no folder, or holds other files or a run of another configuration or text; with
    ``resume`` for one without a checkpoint."""
    if out.exists() and not out.is_dir():
        raise DemoError(f"--out {out} must be a folder, it is a file")
    saved = _saved_run(out)
    if saved is None:
        if resume:
            raise DemoError(f"--resume needs a run in --out {out}, there is none")
        if out.is_dir() and any(out.iterdir()):
            raise DemoError(f"--out {out} holds files that are not of a demo run: name another folder")
        return
    differences = config.differences(saved.get("demo", {}))
    if not differences and saved.get("text", {}).get("sha256") != text.sha256:
        differences = ["the text has changed"]
    if differences:
        raise DemoError(
            f"--out {out} holds a run of another configuration ({'; '.join(differences)}): "
            "name another folder, or the same options"
        )
    if resume and not (out / "checkpoint.safetensors").exists():
        raise DemoError(f"--resume needs {out / 'checkpoint.safetensors'}, it does not exist: start without --resume")


def _saved_run(out: Path) -> dict[str, object] | None:
    path = out / "config.json"
    if not path.exists():
        return None
    try:
        saved = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DemoError(f"{path} cannot be read: {error}") from error
    if not isinstance(saved, dict) or not isinstance(saved.get("demo"), dict):
        raise DemoError(f"--out {out} holds a config.json that is not of a demo run: name another folder")
    return saved


def _make_folder(out: Path) -> None:
    """Make it; an earlier run of the same configuration is kept beside the new one, under the first free number."""
    if (out / "config.json").exists():
        number = 1
        while (kept := out.with_name(f"{out.name}.{number}")).exists():
            number += 1
        out.rename(kept)
        print(f"{out} held an earlier run of this configuration: it is now {kept}", file=sys.stderr)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(f"--out {out} cannot be made: {error.strerror}") from error
