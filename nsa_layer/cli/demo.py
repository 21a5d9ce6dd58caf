"""`python -m nsa_layer demo`: train a small language model with sparse and with dense attention, side by side."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import fields
from pathlib import Path

from nsa_layer.demo.config import CPU, EVERYWHERE, GPU, DemoConfig, DemoError

CONVERTERS = {"int": int, "float": float, "str": str}


def build_parser() -> argparse.ArgumentParser:
    """An option for each field of `DemoConfig`, and where to write."""
    parser = argparse.ArgumentParser(
        prog="python -m nsa_layer demo",
        description="Train a small byte-level language model with Native Sparse Attention beside the same model with "
        "dense attention, and write loss curves, a picture of what each query sees, step times, a sample and a "
        "checkpoint. Ctrl-C stops after the current step; --resume goes on from there.",
    )
    parser.add_argument("--out", type=Path, default=Path("nsa-demo"), help="folder to write (default: nsa-demo)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    for field in fields(DemoConfig):
        flag, text = "--" + field.name.replace("_", "-"), field.metadata["help"].replace("%", "%%")
        if field.name in EVERYWHERE:
            text += f" (default: {EVERYWHERE[field.name]})"
        elif field.name in CPU:
            text += f" (default: {CPU[field.name]} on a CPU, {GPU[field.name]} on a GPU)"
        if field.name == "text":
            parser.add_argument(flag, nargs="+", metavar="FILE", help=text)
        else:
            parser.add_argument(flag, type=CONVERTERS[field.type], help=text)
    return parser


def main(argv: list[str]) -> int:
    """Run the command; 0 when it went through, 2 for bad arguments, 128 + signal when stopped."""
    started = time.monotonic()
    given = vars(build_parser().parse_args(argv))
    out, resume, device = given.pop("out"), given.pop("resume"), given.pop("device")
    given = {name: value for name, value in given.items() if value is not None}
    from nsa_layer.demo.run import run_demo

    try:
        config = DemoConfig.for_device(device, **given)
    except ValueError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    try:
        status = run_demo(config, out, resume=resume, started=started)
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except FloatingPointError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    if status == 0:
        print(f"written to {out}/: {', '.join(sorted(path.name for path in out.iterdir()))}")
    return status
