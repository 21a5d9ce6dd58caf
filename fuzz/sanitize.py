"""`python -m fuzz sanitize`: chosen kernels, once, for NVIDIA's compute-sanitizer to look at.

    python -m fuzz sanitize  # compiles the kernels
    compute-sanitizer --tool memcheck --kernel-name kns=kernel_cutlass python -m fuzz sanitize

The second finds the kernels in a cache on disk. Other tools are racecheck and synccheck; with memcheck
`--report-api-errors no` leaves out what PyTorch asks and may be told no to.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from fuzz.case import Attention
from fuzz.kinds import call, listed
from nsa_layer import NSAConfig
from nsa_tools.testing import cases
from nsa_tools.testing.cases import Case

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


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fuzz sanitize", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", type=int, help="of the chosen ones, by number; all, unless given")
    parser.add_argument("--folder", type=Path, default=Path(".fuzz/sanitizer"), help="of kernels (.fuzz/sanitizer)")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no GPU here: nothing ran")
        return 2
    cache = {"ENABLED": "1", "DIR": str(options.folder.resolve())}
    os.environ.update({f"FLASH_ATTENTION_CUTE_DSL_CACHE_{name}": value for name, value in cache.items()})
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # a cache would hide what is read past the end of a buffer
    for case in CASES if options.case is None else [CASES[options.case]]:
        print(case)
        run_case(case)
    return 0


def run_case(case: Attention | Case) -> None:
    """Forward and backward, once; without guards, whose memory around a buffer would hide what is read there."""
    if isinstance(case, Case):
        cases.run("cute", cases.make_inputs(case, "cuda"))
    else:
        from fuzz.attention import make_inputs, results

        results(case, make_inputs(case))
    torch.cuda.synchronize()
