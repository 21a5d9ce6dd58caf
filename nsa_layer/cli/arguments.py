"""What arguments of several commands stand for; importing this needs nothing but Python."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

# The names that the command line takes, and PyTorch's.
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
UNITS = {"K": 1 << 10, "M": 1 << 20}


def tokens(text: str) -> int:
    """A number of tokens: 65536, 64K or 1M."""
    unit = UNITS.get(text[-1:].upper(), 1)
    try:
        return int(text if unit == 1 else text[:-1]) * unit
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens such as 65536, 64K or 1M") from None


def output_file(text: str) -> Path:
    """A file that can be written: what took minutes to compute should not be lost to a mistyped folder."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder, expected a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: there is no folder {str(path.parent)!r}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: permission denied")
    return path
