"""`python -m fuzz sanitize`: chosen kernels under NVIDIA's compute-sanitizer, for bad accesses, races and barriers.

Needs a GPU, the compute-sanitizer of a CUDA toolkit, and a driver that lets it at the device; says which of them is
missing. Exit codes: 0 nothing found; 1 something was; 2 it could not run.
"""

from __future__ import annotations

import argparse
import glob
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from fuzz.case import Attention, Kind

TOOLS = ("memcheck", "racecheck", "synccheck")
PLACES = ("/usr/local/cuda*/bin/compute-sanitizer", "/usr/local/cuda*/compute-sanitizer/compute-sanitizer")
REFUSED = ("Device not supported", "LibraryNotLoaded", "Error: Target application terminated before first instrumented")
CASES = (
    Attention(kind=Kind(D=128, mask="compressed"), lengths=((300, 20),), factor=16, offset=15),
    Attention(
        kind=Kind(lists=True, heads="q", plan=True, deterministic=True, mask="causal"),
        lengths=((300, 260),),
        density=0.8,
    ),
    Attention(
        kind=Kind(D=128, lists=True, heads="kv", packed=True, form="compact"), lengths=((300, 129), (1, 1), (0, 4))
    ),
    Attention(kind=Kind(lists=True, heads="one", mask="table", block_k=64), lengths=((200, 200),)),
)


def find() -> str | None:
    """The sanitizer, on the path or where toolkits put it."""
    found = [path for place in PLACES for path in sorted(glob.glob(place), reverse=True)]
    return shutil.which("compute-sanitizer") or next(iter(found), None)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz sanitize", description=__doc__)
    parser.add_argument("--tool", choices=TOOLS, action="append", help="all three, unless given")
    parser.add_argument("--seconds", type=float, default=120.0, help="for a tool and a case")
    parser.add_argument("--case", type=int, help="of the chosen ones, by number; all, unless given")
    parser.add_argument("--inside", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.inside is not None:
        return _run_case(CASES[options.inside])
    import torch

    if not torch.cuda.is_available():
        print("no GPU here: nothing ran")
        return 2
    binary = find()
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # kernels are compiled before, without it
    if binary is None:
        print(f"no compute-sanitizer on the path or in {', '.join(PLACES)}: nothing ran")
        return 2
    chosen = range(len(CASES)) if options.case is None else [options.case]
    for number in chosen:
        subprocess.run([sys.executable, "-m", "fuzz", "sanitize", "--inside", str(number)], check=True)
    results = [_sanitize(binary, tool, i, options.seconds) for tool in options.tool or TOOLS for i in chosen]
    return 1 if 1 in results else 0 if 0 in results else 2


def _run_case(case: Attention) -> int:
    import torch

    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
    from fuzz.attention import lists_for, make, options

    call = make(case)
    both = options(call)
    o, lse, *_ = _flash_attn_fwd(
        call.q, call.k, call.v, **both, block_sparse_tensors=lists_for(call, False), return_lse=True
    )
    _flash_attn_bwd(
        call.q, call.k, call.v, o, call.do, lse, **both, block_sparse_tensors=lists_for(call, True),
        deterministic=case.kind.deterministic,
    )  # fmt: skip
    torch.cuda.synchronize()
    return 0


def _sanitize(binary: str, tool: str, number: int, seconds: float) -> int:
    """0 clean, 1 something found, 2 could not run."""
    # The allocator's cache would hide what is read past the end of a buffer.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    inside = [sys.executable, "-m", "fuzz", "sanitize", "--inside", str(number)]
    command = [binary, "--tool", tool, "--error-exitcode", "86", "--print-limit", "5", *inside]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        print(f"{tool}, case {number}: no end after {seconds:.0f} s; it says nothing about {CASES[number]}")
        return 2
    said = done.stdout + done.stderr
    if any(words in said for words in REFUSED):
        print(f"{tool}, case {number}: could not run: {next(words for words in REFUSED if words in said)}")
        return 2
    summary = next((line for line in reversed(said.splitlines()) if "SUMMARY" in line), said[-300:])
    print(f"{tool}, case {number}: exit {done.returncode}; {summary.strip()}")
    if done.returncode:
        print(f"    {CASES[number]}\n{said[-2000:]}")
    return 0 if done.returncode == 0 else 1
