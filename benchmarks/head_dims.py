"""Rates of attention at each head dimension: the selected branch by token, and dimensions that are padded.

    python benchmarks/head_dims.py [--seqlen 65536] [--heads 32/8] [--dims 128/128 96/96 192/128] [--json FILE]

bf16, lists of 16 blocks of 64 a token, drawn like those of a trained model (`kernels_alone.trained_lists`). TFLOP/s
count the products over the listed keys that the definition has, 2 of them in forward and 5 in backward; "rate" is their
share of those at 128/128 in the same run, "padded" the time over that of the native dimensions that rows are copied to.
Medians of CUDA-event timings after a warm-up; calls are interleaved, on inputs that are many times the L2.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
from kernels_alone import CONFIG, trained_lists
from tabulate import tabulate

from nsa_layer import selected_attention, support
from nsa_tools.measure.timing import Call, interleaved

Dims = tuple[int, int]
BASE = (128, 128)
PADDED = ((80, 80), (112, 112), (136, 104), (224, 224))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, default=65536)
    parser.add_argument("--heads", default="32/8", help="of queries / of keys and values")
    parser.add_argument(
        "--dims", nargs="+", default=["/".join(map(str, dims)) for dims in support.NATIVE_DIMS + PADDED]
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write every median, in milliseconds")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("head_dims.py measures on a GPU, and PyTorch finds none")
    every = [BASE, *(dims for each in args.dims if (dims := tuple(map(int, each.split("/")))) != BASE)]
    every += [native for dims in every if (native := support.native_dims(*dims)) not in every]
    Hq, Hkv = map(int, args.heads.split("/"))
    lists = trained_lists(args.seqlen, Hkv, device="cuda")
    calls = {}
    for dims in dict.fromkeys(every):
        calls |= {f"{name} {dims}": call for name, call in calls_of(lists, Hq, dims).items()}
    timings = interleaved(calls, repeats=args.repeats, device="cuda", label="head dimensions", hide_host=True)
    medians = {name: statistics.median(ms) for name, ms in timings.items()}
    pairs = Hq // Hkv * (lists >= 0).sum().item() * CONFIG.block_size
    result = [row(dims, medians, pairs) for dims in dict.fromkeys(every)]
    if args.json:
        args.json.write_text(json.dumps(dict(medians=medians, rows=result), indent=1) + "\n")
    print(tabulate(result, headers="keys", tablefmt="pipe"))


def calls_of(lists: torch.Tensor, Hq: int, dims: Dims) -> dict[str, Call]:
    """Forward, and forward and backward, by name, on the same tensors."""
    (_, T, Hkv, _), generator = lists.shape, torch.Generator("cuda").manual_seed(0)
    shapes = ((Hq, dims[0]), (Hkv, dims[0]), (Hkv, dims[1]), (Hq, dims[1]))
    static = dict(generator=generator, device="cuda", dtype=torch.bfloat16)
    q, k, v, do = (torch.randn(1, T, *shape, **static) for shape in shapes)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        return selected_attention(*qkv, lists, block_size=CONFIG.block_size, backend="cute")

    return {"forward": lambda: attend(q, k, v), "both": lambda: torch.autograd.grad(attend(*leaves), leaves, do)}


def flops(dims: Dims, pairs: int) -> dict[str, int]:
    """Operations of the products for `pairs` pairs of a query and a listed key: S and o in forward; S, dP, dq, dk and
    dv in backward."""
    D, Dv = dims
    return {"forward": 2 * pairs * (D + Dv), "both": 2 * pairs * (4 * D + 3 * Dv)}


def row(dims: Dims, medians: dict[str, float], pairs: int) -> dict[str, object]:
    """A row of the table, of medians by "forward (D, Dv)" and "both (D, Dv)"."""
    cells: dict[str, object] = {"D/Dv": "{}/{}".format(*dims)}
    for name, count in flops(dims, pairs).items():
        rates = [
            count_of / medians[f"{name} {of}"] for of, count_of in ((dims, count), (BASE, flops(BASE, pairs)[name]))
        ]
        native = support.native_dims(*dims)
        padded = "" if native == dims else f"{medians[f'{name} {dims}'] / medians[f'{name} {native}']:.3f}"
        ms = medians[f"{name} {dims}"]
        cells |= {f"{name} (ms)": f"{ms:.2f}", f"{name} TFLOP/s": f"{rates[0] / 1e9:.0f}"}
        cells |= {f"{name} rate": f"{rates[0] / rates[1]:.2f}", f"{name} padded": padded}
    return cells


if __name__ == "__main__":
    main()
