"""`python -m fuzz sanitize`: chosen kernels under NVIDIA's compute-sanitizer, for bad accesses, races and barriers.

Kernels are compiled before, without it, and come from a cache on disk; other kernels than this repository's run as
they are. Needs a GPU, the compute-sanitizer of a CUDA toolkit, and a driver that lets it at the device; says which of
them is missing. Exit codes: 0 nothing found; 1 something was found; 2 it could not run.
"""

from __future__ import annotations

import argparse
import glob
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from fuzz.case import Attention
from fuzz.kinds import call, listed
from nsa_layer import NSAConfig
from nsa_tools.testing import cases
from nsa_tools.testing.cases import Case

SECONDS = 120.0  # for a tool and a case
TOOLS = ("memcheck", "racecheck", "synccheck")
PLACES = ("/usr/local/cuda*/bin/compute-sanitizer", "/usr/local/cuda*/compute-sanitizer/compute-sanitizer")
REFUSED = ("Device not supported", "LibraryNotLoaded", "Error: Target application terminated before first instrumented")
CASES = (  # in each a CTA of backward loops over so many queries that it fills stages anew
    call(D=128, T_q=300, T_k=20, compress=(16, 15)),
    listed(list_heads=4, plan=5, deterministic=True, causal=True, passes=1, T_q=700, T_k=260, density=0.8, seed=4),
    listed(D=128, packed=((700, 129), (1, 1), (0, 4)), form="compact", list_heads=2, passes=1, density=0.9),
    listed(mask_mod="table", block_k=64, T_q=200, T_k=200),
    listed(
        D=128, list_heads=2, deterministic=True, lists="no full", T_q=700, T_k=260, window=(100, 0), density=0.9,
        autograd=True,
    ),
    call(Hq=8, pack_gqa=True, T_q=500, T_k=330, window=(400, None)),
    Case(T=300, Hq=8, D=64, dtype=torch.bfloat16, config=NSAConfig(block_counts=3, q_tile=128, window_size=100)),
    Case(
        config=NSAConfig(block_counts=3, q_tile=128, window_size=100, deterministic=True), Hq=8, D=128,
        dtype=torch.bfloat16, lengths=(130, 0, 1, 200), gate="given", compress_weights=True,
    ),
)  # fmt: skip
OURS = "kns=kernel_cutlass"  # a part of the names that the DSL gives kernels


def find() -> str | None:
    """The sanitizer, on the path or where toolkits put it."""
    found = [path for place in PLACES for path in sorted(glob.glob(place), reverse=True)]
    return shutil.which("compute-sanitizer") or next(iter(found), None)


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    if options.inside is not None:
        return _run_case(CASES[int(options.inside)])
    if not torch.cuda.is_available():
        print("no GPU here: nothing ran")
        return 2
    binary = find()
    if binary is None:
        print(f"no compute-sanitizer on the path or in {', '.join(PLACES)}: nothing ran")
        return 2
    # Kernels that are compiled before come from a folder, where every process here looks for them.
    cache = {"ENABLED": "1", "DIR": str(options.folder.resolve())}
    os.environ.update({f"FLASH_ATTENTION_CUTE_DSL_CACHE_{name}": value for name, value in cache.items()})
    chosen = [str(i) for i in (range(len(CASES)) if options.case is None else [options.case])]
    for subject in chosen:  # compiles its kernels
        if code := subprocess.run(_inside(subject)).returncode:
            print(f"case {subject} without the sanitizer: exit {code}; nothing ran under it")
            return 2
    results = [_sanitize(binary, tool, subject) for tool in options.tool or TOOLS for subject in chosen]
    return 1 if 1 in results else 0 if 0 in results else 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fuzz sanitize", description=__doc__)
    parser.add_argument("--tool", choices=TOOLS, action="append", help="all three, unless given")
    parser.add_argument("--case", type=int, help="of the chosen ones, by number; all, unless given")
    parser.add_argument("--folder", type=Path, default=Path(".fuzz/sanitizer"), help="of kernels (.fuzz/sanitizer)")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    return parser


def _inside(subject: str) -> list[str]:
    return [sys.executable, "-m", "fuzz", "sanitize", "--inside", subject]


def _run_case(case: Attention | Case) -> int:
    """Forward and backward, once; without guards, whose memory around a buffer would hide what is read there."""
    if isinstance(case, Case):
        cases.run("cute", cases.make_inputs(case, "cuda"))
    else:
        from fuzz.attention import make_inputs, results

        results(case, make_inputs(case))
    torch.cuda.synchronize()
    return 0


def _sanitize(binary: str, tool: str, subject: str) -> int:
    """0 clean, 1 something found, 2 could not run."""
    shown = f"{tool}, case {subject}"
    command = [binary, *f"--tool {tool} --error-exitcode 86 --print-limit 40 --kernel-name {OURS}".split()]
    if tool == "memcheck":
        command += ["--report-api-errors", "no"]  # PyTorch asks what it may be told no to
    # The allocator's cache would hide what is read past the end of a buffer.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command += _inside(subject)
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        print(f"{shown}: no end after {SECONDS:.0f} s; it says nothing about {CASES[int(subject)]}")
        return 2
    said = done.stdout + done.stderr
    refused = next((words for words in REFUSED if words in said), None)
    if refused:
        print(f"{shown}: could not run: {refused}")
        return 2
    summary = next((line for line in reversed(said.splitlines()) if "SUMMARY" in line), said[-300:])
    print(f"{shown}: exit {done.returncode}; {summary.strip()}")
    if done.returncode:
        print(f"    {CASES[int(subject)]}\n{said[-2000:]}")
    return 1 if done.returncode else 0
