"""The choice by an index beside dense attention and the default operator, in one run: `nsa`, and a step of decoding.

    python benchmarks/index_layer.py operator [--seqlen 65536] [--heads 32/8 64/4] [--only NAME ...] [--json FILE]
    python benchmarks/index_layer.py decode [--seqlen 65536] [--heads 32/8] [--batch 1 64] [--json FILE]

bf16, heads of 128, blocks of 64, 16 a token, medians of CUDA-event timings after a warm-up. "operator": milliseconds
of forward alone, and of a training step's forward and backward, of `bench --data smooth`, interleaved. "dense" is the
fork's causal kernel, timed once where it takes seconds; "default" is `NSAConfig()`, gated. "Di 16" and "Di 32" are
``rule="index"`` with the selected branch alone, by the first dimensions of k and of the group's mean q; training has
their loss, which "no loss" leaves out. In brackets: dense over it, and it over "default"; GiB are a step's peak beyond
its inputs. "decode": microseconds of a step with own index keys, with one key for all lists, and of the default,
replayed from a graph; the bound is the bytes that it has to read at the rate of a copy, measured first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from itertools import product
from pathlib import Path

import torch
from tabulate import tabulate
from tqdm import tqdm

from nsa_layer import NSAConfig, nsa
from nsa_tools.measure import decode_steps, timed_calls
from nsa_tools.measure.peak_memory import peak_bytes
from nsa_tools.measure.timed_calls import BOTH, FORWARD, Attend, Step, dense_attention
from nsa_tools.measure.timing import interleaved
from nsa_tools.shape import Shape

D, DIMS = 128, (16, 32)
INDEX = NSAConfig(rule="index", branches=("selected",))
STATIC = dict(D=D, Dv=D, dtype=torch.bfloat16, device="cuda")
NAMES = ("dense", "default", *(f"Di {Di}{more}" for Di in DIMS for more in ("", ", no loss", ", deterministic")))
ONCE = 1 << 18  # tokens from which dense attention takes seconds
COPIED = 1 << 32  # bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("operator", "decode"))
    parser.add_argument("--seqlen", type=int, nargs="+", default=[65536])
    parser.add_argument("--heads", nargs="+", help="of queries / of keys and values")
    parser.add_argument("--only", nargs="+", default=NAMES, choices=NAMES, metavar="NAME", help="operators")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64], help="sequences that decode")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write every timing")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("index_layer.py measures on a GPU, and PyTorch finds none")
    print(torch.cuda.get_device_name())
    heads = args.heads or (["32/8", "64/4"] if args.what == "operator" else ["32/8"])
    rows, rate = [], copied_bytes_per_second() if args.what == "decode" else None
    for T, of in product(args.seqlen, heads):
        sizes = dict(STATIC, T=T, **dict(zip(("Hq", "Hkv"), map(int, of.split("/")))))
        if args.what == "operator":
            rows += operators(sizes, args.only, args.repeats)
        else:
            rows += [row for B in args.batch for row in steps(sizes | dict(B=B), rate, args.repeats)]
        torch.cuda.empty_cache()
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1) + "\n")
    shown = table(rows) if args.what == "operator" else [{x: row[x] for x in row if x != "T"} for row in rows]
    print(tabulate(shown, headers="keys", tablefmt="pipe", floatfmt=".1f"))


def operators(sizes: dict, names: Iterable[str], repeats: int) -> list[dict]:
    """A row for each operator: timings by direction, and a step's peak."""
    device, steps = sizes["device"], steps_of(sizes, names)
    once = {"dense"} if sizes["T"] >= ONCE else set()
    timers = {name: [make() for _, make in timed_calls.timers(x, graph=False, once=name in once)] for name, x in steps}
    found, peaks = defaultdict(list), {}
    for repeat in tqdm(range(1 + repeats), desc=f"{sizes['T']:,} tokens", leave=False):
        for name, of_name in timers.items():
            for timer in of_name if name not in once or repeat == 1 else ():
                taken: dict[str, float] = {}
                peaks[name] = peak_bytes(lambda: taken.update(timer.take(device)), device) / (1 << 30)
                for direction, ms in taken.items() if repeat else ():
                    found[name, direction].append(ms)
    size = {name: sizes[name] for name in ("Hq", "Hkv", "T")}
    return [size | dict(operator=x, peak=peaks[x]) | {way: found[x, way] for way in (FORWARD, BOTH)} for x in timers]


def steps_of(sizes: dict, names: Iterable[str]) -> list[tuple[str, Step]]:
    """The operators, on the same tensors."""
    shape = Shape(**sizes, B=1, config=NSAConfig(), index_dim=max(DIMS), data="smooth")
    inputs, do, steps = shape.inputs(), shape.output_gradient(), []
    qkv = {name: inputs[name] for name in "qkv"}
    for name in names:
        if name == "dense":
            attend, tensors = dense_attention(shape.device, {}), qkv
            Step(attend, [{x: qkv[x][:, :1024].detach().requires_grad_() for x in qkv}], do[:, :1024])()  # compiles
        elif name == "default":
            attend, tensors = operator(NSAConfig()), qkv | dict(gate_weight=inputs["gate_weight"])
        else:
            Di, config = int(name.split(",")[0][3:]), INDEX.replace(deterministic="deterministic" in name)
            index = {x: inputs[x][..., :Di].detach().contiguous().requires_grad_() for x in ("q_index", "k_index")}
            attend, tensors = operator(config, loss="no loss" not in name), qkv | index
        steps.append((name, Step(attend, [tensors], do)))
    return steps


def operator(config: NSAConfig, loss: bool = False) -> Attend:
    """`nsa` with this configuration, and with the index' loss in training."""
    return lambda **tensors: nsa(**tensors, config=config, return_index_loss=loss and torch.is_grad_enabled())


def table(rows: list[dict]) -> list[dict]:
    """Medians, and their ratios to dense attention's and the default's."""
    median = {(*of(row), way): statistics.median(row[way]) for row in rows for way in (FORWARD, BOTH)}
    shown = []
    for row in rows:
        cells = {"heads": f"{row['Hq']}/{row['Hkv']}", "T": f"{row['T']:,}", "operator": row["operator"]}
        for way in (FORWARD, BOTH):
            ms = median[(*of(row), way)]
            dense, default = (median.get((*of(row | dict(operator=x)), way)) for x in ("dense", "default"))
            ratios = f"{dense / ms:.1f}x" if dense else "", f"{ms / default:.3f}" if default else ""
            cells[way] = f"{ms:,.2f} ({', '.join(filter(None, ratios))})"
        shown.append(cells | dict(GiB=row["peak"]))
    return shown


def of(row: dict) -> tuple:
    return row["Hq"], row["T"], row["operator"]


def steps(sizes: dict, rate: float, repeats: int) -> list[dict]:
    """A row for each way to choose, with dense attention's times beside."""
    rows, ways = [], {"default": NSAConfig(), "own keys": INDEX, "one key": INDEX}
    for name, config in ways.items():
        index = dict(index_dim=32, one_key=name == "one key") if config is INDEX else {}
        shape = Shape(**sizes, config=config, **index, backward=False)
        step = decode_steps.measure(shape, "cute", repeats=repeats)
        bound = step.bytes / rate * 1e6
        row = dict(T=sizes["T"], heads=f"{sizes['Hq']}/{sizes['Hkv']}", batch=sizes["B"], keys=name, **step.us)
        over = step.us["nsa"] / bound if step.us["nsa"] else None
        rows.append(row | dict(MB=step.bytes / 1e6, bound=bound, over_bound=over, failed=step.failed or ""))
        torch.cuda.empty_cache()
    return rows


def copied_bytes_per_second() -> float:
    """Bytes that a copy within the GPU's memory reads and writes in a second."""
    x = torch.empty(COPIED, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    ms = statistics.median(interleaved({"copy": lambda: y.copy_(x)}, repeats=5, device="cuda", label="copy")["copy"])
    print(f"a copy: {2 * COPIED / ms / 1e9:.2f} TB/s")
    return 2 * COPIED / ms * 1e3


if __name__ == "__main__":
    main()
