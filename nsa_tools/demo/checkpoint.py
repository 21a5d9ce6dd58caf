"""One safetensors file that holds everything a run goes on from: weights, optimizer state, RNG state, step."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from nsa_tools.demo.demo_config import DemoError
from nsa_tools.report.files import write_atomic

FORMAT = "nsa-demo-1"


def save_checkpoint(
    path: Path, *, step: int, models: dict[str, torch.nn.Module], optimizers: dict[str, torch.optim.Optimizer]
) -> None:
    """Replace the checkpoint; a run that is stopped meanwhile keeps the old one."""
    tensors = {"rng.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["rng.cuda"] = torch.cuda.get_rng_state()
    for name, model in models.items():
        tensors |= {f"{name}.model.{key}": value for key, value in model.state_dict().items()}
        for index, state in optimizers[name].state_dict()["state"].items():
            tensors |= {f"{name}.optimizer.{index}.{key}": value for key, value in state.items()}
    metadata = {"format": FORMAT, "step": json.dumps(step)}
    write_atomic(path, save({key: value.contiguous() for key, value in tensors.items()}, metadata))


def load_checkpoint(
    path: Path, *, models: dict[str, torch.nn.Module], optimizers: dict[str, torch.optim.Optimizer], device: str
) -> int:
    """Load models and optimizers and return the step; DemoError for a missing or damaged file, or other models."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}
    except (OSError, SafetensorError) as error:
        raise DemoError(f"checkpoint {path} cannot be read: {error}") from error
    if metadata.get("format") != FORMAT:
        raise DemoError(f"checkpoint {path} must have format {FORMAT!r}, got {metadata.get('format')!r}")
    try:
        for name, model in models.items():
            model.load_state_dict(_below(tensors, f"{name}.model."))
            optimizer = optimizers[name]
            state: dict[int, dict[str, torch.Tensor]] = {}
            for key, value in _below(tensors, f"{name}.optimizer.").items():
                index, field = key.split(".", 1)
                state.setdefault(int(index), {})[field] = value
            optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
    except (RuntimeError, ValueError) as error:
        raise DemoError(f"checkpoint {path} does not fit the models: {error}") from error
    torch.set_rng_state(tensors["rng.cpu"])
    if "rng.cuda" in tensors and torch.device(device).type == "cuda":
        torch.cuda.set_rng_state(tensors["rng.cuda"])
    return json.loads(metadata["step"])


def _below(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
