"""The choice of blocks by an index, alone, beside what bounds it: products, and one maximum a score.

    python benchmarks/select_by_index.py [--seqlen 65536 262144] [--heads 8 4] [--dims 16 32 64 128] [--one-key]

bf16, blocks of 64, 16 of them a token, scores of random rows. Products are T^2 / 2 x 2 Di of each head at 600 TFLOP/s;
maxima are T^2 / 2 of each head at the rate of fp32 maxima of two registers, which is timed between the choices: a card
that products have heated is slower at both. "over" is the time over the longer of both. Medians of CUDA-event timings
after a warm-up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32
from tabulate import tabulate

from nsa_layer import NSAConfig
from nsa_layer.kernels.select_by_index.kernel import select_by_index
from nsa_tools.measure.timing import interleaved

PRODUCTS = 600e12  # FLOP/s


class Maxima:
    """Each thread takes maxima of neighbouring registers, `rounds` times `width` of them."""

    threads, width, unroll = 512, 16, 8

    @cute.jit
    def __call__(self, mX: cute.Tensor, rounds: Int32, stream):
        self.kernel(mX, rounds).launch(
            grid=[cute.size(mX) // (self.threads * self.width), 1, 1], block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, rounds: Int32):
        thread = cute.arch.block_idx()[0] * self.threads + cute.arch.thread_idx()[0]
        row = cute.local_tile(mX, (self.width,), (thread,))
        x = cute.make_rmem_tensor(self.width, Float32)
        cute.autovec_copy(row, x)
        for _ in cutlass.range(rounds, unroll=self.unroll):
            for i in cutlass.range_constexpr(self.width):
                x[i] = cute.arch.fmax(x[i], x[(i + 1) % self.width])
        cute.autovec_copy(x, row)


def maxima_call(*, rounds: int = 20_000) -> tuple[Callable[[], None], int]:
    """A call in which all SMs of the current GPU take fp32 maxima of two registers, and how many."""
    threads = 4 * Maxima.threads * torch.cuda.get_device_properties(0).multi_processor_count
    x = torch.randn(threads * Maxima.width, device="cuda")
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    fake = cute.runtime.make_fake_tensor(Float32, (cute.sym_int(),), stride=(1,), assumed_align=16)
    run = cute.compile(Maxima(), fake, Int32(rounds), stream, options="--enable-tvm-ffi")
    return lambda: run(x, rounds), x.numel() * rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, nargs="+", default=[65536, 262144])
    parser.add_argument("--heads", type=int, nargs="+", default=[8, 4], help="of keys and values: lists a token")
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--one-key", action="store_true", help="of all heads")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write every median, in milliseconds")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("select_by_index.py measures on a GPU, and PyTorch finds none")
    (maxima, taken), rows = maxima_call(), []
    for T, Hs, Di in product(args.seqlen, args.heads, args.dims):
        calls = dict(choice=call_of(T, Hs, Di, one_key=args.one_key), maxima=maxima)
        timings = interleaved(calls, repeats=args.repeats, device="cuda", label=f"T {T:,} Hs {Hs} Di {Di}")
        ms, each = (statistics.median(timings[name]) for name in ("choice", "maxima"))
        scores = T * T / 2 * Hs
        bounds = dict(products=1e3 * scores * 2 * Di / PRODUCTS, maxima=each * scores / taken)
        rows.append(dict(T=T, Hs=Hs, Di=Di, ms=ms, **bounds, over=ms / max(bounds.values())))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(tabulate(rows, headers="keys", tablefmt="pipe", floatfmt=("", "", "", ".3f", ".3f", ".3f", ".2f")))


def call_of(T: int, Hs: int, Di: int, *, one_key: bool):
    """The choice for these sizes."""
    q, k = (torch.randn(1, T, heads, Di, device="cuda", dtype=torch.bfloat16) for heads in (Hs, 1 if one_key else Hs))
    return lambda: select_by_index(q, k, config=NSAConfig())


if __name__ == "__main__":
    main()
