"""Rates of attention at each head dimension: the selected branch by token, and dimensions that are padded.

    python benchmarks/head_dims.py [--seqlen 65536] [--heads 32/8] [--dims 128/128 96/96 192/128] [--json FILE]
    python benchmarks/head_dims.py --branches [--dims 128/128 96/96 192/128]

bf16, lists of 16 blocks of 64 a token, drawn like those of a trained model (`kernels_alone.trained_lists`). TFLOP/s
count the products over the listed keys that the definition has, 2 of them in forward and 5 in backward; "rate" is their
share of those at 128/128 in the same run, "padded" the time over that of the native dimensions that tiles have.
With --branches: the layer with the compressed branch alone and with the window alone, and dense causal attention by the
fork's kernel, at native dimensions; TFLOP/s count the products over visible pairs, "of dense" is their share of dense
attention's at the same dimensions. Medians of CUDA-event timings after a warm-up; calls are interleaved, on inputs that
are many times the L2.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from kernels_alone import CONFIG, trained_lists
from tabulate import tabulate

from nsa_layer import nsa, selected_attention, support
from nsa_tools.measure.roofline import visible_pairs
from nsa_tools.measure.timed_calls import dense_attention
from nsa_tools.measure.timing import Call, interleaved
from nsa_tools.shape import Shape

Dims = tuple[int, int]
Attend = Callable[..., torch.Tensor]
BASE = (128, 128)
PADDED = ((80, 80), (112, 112), (136, 104), (224, 224))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, default=65536)
    parser.add_argument("--heads", default="32/8", help="of queries / of keys and values")
    parser.add_argument(
        "--dims", nargs="+", default=["/".join(map(str, dims)) for dims in support.NATIVE_DIMS + PADDED]
    )
    parser.add_argument("--branches", action="store_true", help="time these and dense attention in place of lists")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write every median, in milliseconds")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("head_dims.py measures on a GPU, and PyTorch finds none")
    every = [BASE, *(dims for each in args.dims if (dims := tuple(map(int, each.split("/")))) != BASE)]
    every += [native for dims in every if (native := support.native_dims(*dims)) not in every]
    Hq, Hkv = map(int, args.heads.split("/"))
    if args.branches:
        every = [dims for dims in every if dims in support.NATIVE_DIMS]
        sizes = dict(B=1, T=args.seqlen, Hq=Hq, Hkv=Hkv, D=128, Dv=128, dtype=torch.bfloat16, device="cuda")
        shape, attend = Shape(**sizes, config=CONFIG), branches()
    else:
        lists = trained_lists(args.seqlen, Hkv, device="cuda")
        attend = {"": partial(selected_attention, block_indices=lists, block_size=CONFIG.block_size, backend="cute")}
    calls = {}
    for dims in dict.fromkeys(every):
        of_dims = calls_of((1, args.seqlen), (Hq, Hkv), dims, attend)
        calls |= {f"{name} {dims}": call for name, call in of_dims.items()}
    timings = interleaved(calls, repeats=args.repeats, device="cuda", label="head dimensions", hide_host=True)
    medians = {name: statistics.median(ms) for name, ms in timings.items()}
    if args.branches:
        result = [branch_row(dims, name, medians, shape) for dims in dict.fromkeys(every) for name in attend]
    else:
        pairs = Hq // Hkv * (lists >= 0).sum().item() * CONFIG.block_size
        result = [row(dims, medians, pairs) for dims in dict.fromkeys(every)]
    if args.json:
        args.json.write_text(json.dumps(dict(medians=medians, rows=result), indent=1) + "\n")
    print(tabulate(result, headers="keys", tablefmt="pipe"))


def branches() -> dict[str, Attend]:
    """Dense attention, and the layer with one branch, by name."""
    alone = {name: CONFIG.replace(branches=(name,)) for name in ("compressed", "window")}
    return {"dense": dense_attention("cuda", {})} | {
        name: partial(nsa, config=config, backend="cute") for name, config in alone.items()
    }


def calls_of(lead: tuple[int, int], heads: tuple[int, int], dims: Dims, attend: dict[str, Attend]) -> dict[str, Call]:
    """Forward, and forward and backward, of each function of q, k and v, by name, on the same tensors."""
    (Hq, Hkv), generator = heads, torch.Generator("cuda").manual_seed(0)
    shapes = ((Hq, dims[0]), (Hkv, dims[0]), (Hkv, dims[1]), (Hq, dims[1]))
    static = dict(generator=generator, device="cuda", dtype=torch.bfloat16)
    q, k, v, do = (torch.randn(*lead, *shape, **static) for shape in shapes)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    calls = {}
    for name, of in attend.items():
        calls[f"{name} forward".strip()] = partial(of, q, k, v)
        calls[f"{name} both".strip()] = lambda of=of: torch.autograd.grad(of(*leaves), leaves, do)
    return calls


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


def branch_row(dims: Dims, name: str, medians: dict[str, float], shape: Shape) -> dict[str, object]:
    """A row of the branches' table, of medians by "compressed forward (D, Dv)" and so on."""
    pairs = visible_pairs(replace(shape, D=dims[0], Dv=dims[1]))
    pairs = {"compressed": pairs["cmp"], "window": pairs["swa"], "dense": shape.T * (shape.T + 1) // 2}
    cells: dict[str, object] = {"D/Dv": "{}/{}".format(*dims), "": name}
    for way in ("forward", "both"):
        rates = [flops(dims, pairs[of] * shape.Hq)[way] / medians[f"{of} {way} {dims}"] for of in (name, "dense")]
        cells |= {f"{way} (ms)": f"{medians[f'{name} {way} {dims}']:.2f}", f"{way} TFLOP/s": f"{rates[0] / 1e9:.0f}"}
        cells |= {f"{way} of dense": f"{rates[0] / rates[1]:.2f}"}
    return cells


if __name__ == "__main__":
    main()
