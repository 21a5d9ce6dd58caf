"""Memory of a layer on one rank of two, on one GPU: what comes from the other rank is a copy of this one's.

A rank has as many tokens as the layer on one GPU that it is beside: of a sequence of twice as many.
"""

from __future__ import annotations

import argparse
import gc

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.testing._internal.distributed.fake_pg import FakeStore
from without_peers import without_peers

from nsa_layer import ContextParallel, MemoryPolicy, NSAConfig, nsa


def peak(tokens: int, cp: ContextParallel | None) -> float:
    """GiB of forward and backward, inputs and gradients included."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    shapes = dict(q=(1, tokens, 32, 128), k=(1, tokens, 8, 128), v=(1, tokens, 8, 128), gate_weight=(32, 3, 128))
    given = {name: torch.randn(x, device="cuda", dtype=torch.bfloat16).requires_grad_() for name, x in shapes.items()}
    o = nsa(**given, config=NSAConfig(), memory=MemoryPolicy(recompute="all"), cp=cp)
    torch.autograd.grad(o, list(given.values()), torch.ones_like(o))
    return torch.cuda.max_memory_allocated() / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1 << 19, 1 << 20])
    given = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    ranks = {mode: ContextParallel(dist.group.WORLD, mode=mode) for mode in ("heads", "gather")}
    for tokens in given.tokens:
        one = peak(tokens, None)
        with without_peers():
            found = {mode: peak(tokens, cp) for mode, cp in ranks.items()}
        rows = [("one GPU", f"{tokens:,}", one, None)]
        rows += [(f"a rank of two, {mode}", f"{2 * tokens:,}", x, 2 * one / x) for mode, x in found.items()]
        print(tabulate(rows, ("", "tokens", "GiB", "tokens in as much memory"), "github", floatfmt=".2f"), flush=True)


if __name__ == "__main__":
    main()
