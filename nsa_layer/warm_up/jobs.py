"""Kernels to compile, and the architectures to compile for."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from nsa_layer.call import Signature

# The variables that make a process compile for an architecture, whatever GPU it has; a process can do one only.
ENVIRONMENT = {
    90: {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"},
    100: {"FLASH_ATTENTION_ARCH": "sm_100", "CUTE_DSL_ARCH": "sm_100a", "FLASH_ATTENTION_NUM_SMS": "148"},
}


class Kernel(NamedTuple):
    """A kernel of a call, its file in the cache, and the result of compiling it.

    Attributes:
        seconds: of compiling; None where the cache had it.
    """

    name: str
    file: Path
    call: Signature
    seconds: float | None = None
    error: str | None = None
