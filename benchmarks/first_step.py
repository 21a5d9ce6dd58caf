"""First steps of a process, with nothing in the cache and then with everything.

    python benchmarks/first_step.py [--seqlen 4096] [--paper]

bf16, 32/8 heads of 128, sigmoid gates, forward and backward. A process imports PyTorch, then the layer, and makes a
step of the default configuration, one of another configuration, tiles of 128 queries (``--paper``:
`NSAConfig.paper()`), and a packed one of the default: seconds of each to its end. A second process does the same with
the cache that the first one filled. Imports are in seconds of CPU time, the layer's beside PyTorch's. All that is
imported has been imported once before, by a process that is not timed: it is read from memory, with its bytecode.
NSA_COMPILE_WORKERS=0 compiles one kernel after the other.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE"
IMPORTS = "import nsa_layer.cute.backend, quack, torch._dynamo, torch._subclasses.fake_tensor"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, default=4096, help="tokens")
    parser.add_argument("--paper", action="store_true", help="the other configuration is NSAConfig.paper()")
    parser.add_argument("--process", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.process:
        for part, seconds in steps(args.seqlen, paper=args.paper):
            print(f"  {part}: {seconds:.2f}", flush=True)
        return
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as bytecode:
        environment = os.environ | {f"{CACHE}_ENABLED": "1", f"{CACHE}_DIR": cache}
        environment |= {"PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
        subprocess.run([sys.executable, "-W", "ignore", "-c", IMPORTS], env=environment, check=True)
        for name in ("nothing cached", "all cached"):
            command = [sys.executable, __file__, *sys.argv[1:], "--process"]
            print(name, flush=True)
            subprocess.run(command, env=environment, check=True)


def steps(T: int, *, paper: bool) -> Iterator[tuple[str, float]]:
    """The parts of this process as they end."""
    begin = time.process_time()
    import torch

    yield "import torch, CPU", time.process_time() - begin
    begin = time.process_time()
    from nsa_layer import NSAConfig, nsa

    if not torch.cuda.is_available():
        sys.exit("first_step.py measures on a GPU, and PyTorch finds none")
    yield "import nsa_layer, CPU", time.process_time() - begin
    torch.manual_seed(0)
    begin = time.perf_counter()
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    yield "GPU", time.perf_counter() - begin

    def step(config: NSAConfig, *, packed: bool = False) -> float:
        lead = (T,) if packed else (1, T)
        q, k, v, weight = (
            torch.randn(*of, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for of in ((*lead, 32), (*lead, 8), (*lead, 8), (32, 3))
        )
        starts = torch.tensor([0, T // 3, T], dtype=torch.int32, device="cuda") if packed else None
        begin = time.perf_counter()
        o = nsa(q, k, v, gate_weight=weight, cu_seqlens=starts, config=config)
        torch.autograd.grad(o.square().sum(), (q, k, v, weight))
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    other = NSAConfig.paper() if paper else NSAConfig(q_tile=128)
    yield "default", step(NSAConfig())
    yield "another configuration", step(other)
    yield "packed", step(NSAConfig(), packed=True)


if __name__ == "__main__":
    main()
