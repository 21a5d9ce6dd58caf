"""Context parallelism on the GPUs of one host: equality with one GPU, bandwidths, times, the longest call.

    torchrun --nproc-per-node 2 benchmarks/context_parallel.py [check bandwidth layer longest] [--json FILE]

32 query heads, 8 key/value heads, bf16, the default configuration, gated, forward and backward, smooth data; with
``--rule index`` the selected branch alone, by an index, with its loss. Times are the slowest rank's medians, variants
in turn; a call of the layer is one of as many in a row as take a second, since a GPU at its power limit runs the first
ones after a pause faster. "one GPU" is every GPU with a whole call of its own, at the same time; in a group "alone" no
rank waits for another, and exchanges are copies of the same bytes. Communication that is not hidden is the time of a
trace in which a GPU runs nothing but kernels of NCCL and copies, waits included.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from without_peers import without_peers

from nsa_layer import ContextParallel, NSAConfig, nsa, shard_sequence
from nsa_tools.measure.kernel_trace import Kernel, record
from nsa_tools.measure.timing import milliseconds
from nsa_tools.report.tables import gib, markdown
from nsa_tools.shape import Shape, long_tailed

PARTS = ("check", "bandwidth", "layer", "longest")
HEADS = dict(Hq=32, Hkv=8, D=128, Dv=128)
VARIANTS = ("heads", "gather", "auto")  # modes
# Groups as NCCL makes them, of a stream of high priority, of at most 16 CTAs, of both, and without peers.
GROUPS = ("own", "first", "16", "16 first", "alone")
ONE = "one GPU"
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
ROW_MS = 1e3  # of calls in a row

Inputs = dict[str, torch.Tensor]
Spans = list[tuple[float, float]]


def shape_of(args: argparse.Namespace, T: int, *, packed: int | None = None) -> Shape:
    """The call that is measured."""
    static = dict(config=NSAConfig(), gate="weight")
    if args.rule == "index":
        config = NSAConfig(rule="index", branches=("selected",))
        static = dict(config=config, gate="none", index_dim=args.index_dim, index_loss=True)
    static |= dict(dtype=torch.bfloat16 if CUDA else torch.float32, device=DEVICE)
    lengths = None if packed is None else long_tailed(T, packed)
    return Shape(T=T, B=1, lengths=lengths, **HEADS, **static, backward=True, data="smooth")


def attend(shape: Shape, inputs: Inputs, do: torch.Tensor, **options: object) -> dict[str, torch.Tensor]:
    """o, the loss of an index, and the gradients of all inputs."""
    results = nsa(**inputs, **shape.options(), **options)
    o, *losses = results if isinstance(results, tuple) else (results,)
    grads = torch.autograd.grad([o, *losses], list(inputs.values()), [do, *map(torch.ones_like, losses)])
    by_name = dict(o=o.detach()) | {f"d{name}": d for name, d in zip(inputs, grads)}
    return by_name | {"index loss": loss.detach() for loss in losses}


def parts_of(inputs: Inputs, do: torch.Tensor, cp: ContextParallel, *, dim: int = 1) -> tuple[Inputs, torch.Tensor]:
    """This rank's tokens, in memory of their own, and the weights."""

    def part(x: torch.Tensor) -> torch.Tensor:
        return shard_sequence(x.detach(), cp, dim=dim).clone()

    held = {name: x.detach().clone() if name == "gate_weight" else part(x) for name, x in inputs.items()}
    return {name: x.requires_grad_() for name, x in held.items()}, part(do)


def slowest(call: Callable[[], object]) -> float:
    """Milliseconds of the slowest rank."""
    return max(in_a_row(call, 1))


def in_a_row(call: Callable[[], object], count: int) -> list[float]:
    """Milliseconds of each rank for one of so many calls between which nothing waits; all ranks start together."""

    def calls() -> None:
        for _ in range(count):
            call()

    dist.barrier()
    return of_ranks(milliseconds(calls, DEVICE) / count)


def of_ranks(value: float) -> list[float]:
    """The ranks' numbers."""
    found = [value] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def agreed(value: float, how: dist.ReduceOp.RedOpType) -> float:
    """One number of the ranks' numbers."""
    number = torch.tensor(value, device=DEVICE, dtype=torch.float64)
    dist.all_reduce(number, how)
    return number.item()


def clear() -> None:
    """Memory that nothing refers to goes back; peaks are counted anew."""
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak() -> int:
    """The most bytes that the allocator held on any rank."""
    return int(agreed(torch.cuda.max_memory_allocated() if CUDA else 0, dist.ReduceOp.MAX))


def check(args: argparse.Namespace) -> Iterable[dict]:
    """Largest differences from one GPU, over the largest element, and the share of equal elements."""
    for shape in (shape_of(args, args.check_tokens), shape_of(args, args.check_tokens, packed=5)):
        dim = 1 if shape.lengths is None else 0
        whole, do = shape.inputs(), shape.output_gradient()
        expected = attend(shape, whole, do)
        for name, cp in made(args.variants, args.groups).items():
            inputs, part_do = parts_of(whole, do, cp, dim=dim)
            got = attend(shape, inputs, part_do, cp=cp)
            for what, y in expected.items():
                x = got[what]
                if what == "dgate_weight":
                    dist.all_reduce(x)
                elif what != "index loss":
                    y = shard_sequence(y, cp, dim=dim)
                error = ((x.double() - y.double()).abs().max() / y.double().abs().max()).item()
                row = dict(tokens=shape.describe(), variant=name, tensor=what, error=agreed(error, dist.ReduceOp.MAX))
                yield row | dict(equal=agreed((x == y).double().mean().item(), dist.ReduceOp.MIN))


def bandwidth(args: argparse.Namespace) -> Iterable[dict]:
    """GB/s that leave each GPU, in collectives of so many bytes sent by each."""
    ops, R, group = torch.ops._c10d_functional, dist.get_world_size(), dist.group.WORLD.group_name
    for size in args.bytes:
        part = torch.zeros(size // (R - 1) // 4, device=DEVICE)
        whole = part.repeat(R)
        counts = [len(part)] * R
        calls = {
            "all-to-all": lambda: ops.all_to_all_single(whole, counts, counts, group),
            "all-gather": lambda: ops.all_gather_into_tensor(part, R, group),
            "reduce-scatter": lambda: ops.reduce_scatter_tensor(whole, "sum", R, group),
        }
        for name, call in calls.items():
            timings = [slowest(lambda: ops.wait_tensor(call())) for _ in range(6)][1:]
            ms, sent = statistics.median(timings), part.nbytes * (R - 1)
            yield dict(collective=name, bytes=sent, ms=ms, gb_per_s=sent / ms / 1e6)


def layer(args: argparse.Namespace) -> Iterable[dict]:
    """Times of a call on one GPU and on all, and the communication that is not hidden."""
    for T in args.tokens:
        clear()
        shape, ranks = shape_of(args, T), made(args.variants, args.groups)
        whole, do = shape.inputs(), shape.output_gradient()
        parts = parts_of(whole, do, next(iter(ranks.values())))
        calls: dict[str, Callable[[], object]] = {ONE: partial(attend, shape, whole, do)}
        for name, cp in ranks.items():
            call = partial(attend, shape, *parts, cp=cp)
            calls[name] = without_peers()(call) if dist.get_backend(cp.group) == "fake" else call
        counts = {}
        for name, call in calls.items():
            slowest(call)
            counts[name] = math.ceil(ROW_MS / slowest(call))
        timings: dict[str, list[list[float]]] = {name: [] for name in calls}
        for _ in range(args.repeats):
            for name, call in calls.items():
                clear()  # of memory that calls of other sizes hold
                call()
                timings[name].append(in_a_row(call, counts[name]))
        for name, taken in timings.items():
            each = [statistics.median(of_rank) for of_rank in zip(*taken)]
            row = dict(T=T, variant=name, in_a_row=counts[name], ms=max(each), each_ms=each, timings_ms=taken)
            if name == ONE:
                one = row["ms"]
            row["of_one"] = row["ms"] / one
            if CUDA and name != ONE:
                dist.barrier()
                kernels = record({"before": calls[name], "step": calls[name]})
                row |= exposed(kernel for kernel in kernels if kernel.phase == "step")
            yield row


def exposed(kernels: Iterable[Kernel]) -> dict[str, list[float]]:
    """Milliseconds in which NCCL's kernels and copies run, in which only they do, and in which nothing does, of each
    rank; the one on the faster GPU waits for the others."""
    sides: dict[bool, Spans] = {True: [], False: []}
    for kernel in kernels:
        exchanges = any(word in kernel.name.lower() for word in ("nccl", "memcpy"))
        sides[exchanges].append((kernel.begin, kernel.begin + kernel.ms))
    both = covered(sides[True] + sides[False])
    spans = sides[True] + sides[False]
    whole = max(end for _, end in spans) - min(begin for begin, _ in spans)
    found = dict(nccl_ms=covered(sides[True]), not_hidden_ms=both - covered(sides[False]), idle_ms=whole - both)
    return {name: of_ranks(ms) for name, ms in found.items()}


def covered(spans: Spans) -> float:
    """Length of the union."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def longest(args: argparse.Namespace) -> Iterable[dict]:
    """Calls of more and more tokens until one does not fit; on one rank alone, and the others wait until their time is
    up, with what was found before in the file."""
    everyone = torch.zeros(dist.get_world_size(), device=DEVICE)
    dist.all_to_all_single(everyone.clone(), everyone)  # NCCL takes its memory now, while there is some
    for name in args.longest_variants:
        cp = None if name == ONE else next(iter(made([name], args.groups).values()))
        for T in args.longest_tokens:
            clear()
            fits, ms = True, 0.0
            try:
                if cp is not None or dist.get_rank() == 0:
                    shape = shape_of(args, T)
                    inputs, do, options = shape.inputs(), shape.output_gradient(), {} if cp is None else {"cp": cp}
                    ms = milliseconds(lambda: attend(shape, inputs, do, **options), DEVICE)
            except torch.OutOfMemoryError:
                fits = False
            inputs = do = None
            fits = bool(agreed(fits, dist.ReduceOp.MIN))
            tokens = T if cp is None else T * cp.size
            yield dict(variant=name, T=tokens, fits=fits, ms=agreed(ms, dist.ReduceOp.MAX), peak_bytes=peak())
            if not fits:
                break


def made(variants: Iterable[str], groups: Iterable[str] = ("own",)) -> dict[str, ContextParallel]:
    """Each variant on each kind of group, by their names."""
    found = {}
    for mode, kind in product(variants, groups):
        found[mode if kind == "own" else f"{mode}, {kind}"] = ContextParallel(group_of(kind), mode=mode)
    return found


@cache
def group_of(kind: str) -> dist.ProcessGroup:
    """All ranks, in a kind of group."""
    if kind == "alone":
        return dist.new_group(backend="fake")
    if kind == "own" or not CUDA:
        return dist.group.WORLD
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream="first" in kind)
    if "16" in kind:
        options.config.max_ctas = 16
    return dist.new_group(backend="nccl", pg_options=options)


def shown(value: object) -> str:
    if isinstance(value, list):
        return " / ".join(map(shown, value))
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 2 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def table(rows: list[dict]) -> str:
    """Markdown of what a part found."""
    keys = [key for key in rows[0] | rows[-1] if key != "timings_ms"]
    cells = [[gib(row.get(k)) if k == "peak_bytes" else shown(row.get(k, "")) for k in keys] for row in rows]
    return markdown([key.replace("peak_bytes", "peak GiB") for key in keys], cells)


def main() -> None:
    args = options()
    if CUDA:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if CUDA else "gloo")
    found: dict[str, object] = dict(
        command="torchrun benchmarks/context_parallel.py " + " ".join(args.parts), ranks=dist.get_world_size()
    )
    found |= dict(rule=args.rule, index_dim=args.index_dim) if args.rule == "index" else {}
    if CUDA:
        found |= dict(gpu=torch.cuda.get_device_name(), torch=torch.__version__, nccl=str(torch.cuda.nccl.version()))
    for name in args.parts:
        found[name] = rows = []
        for row in globals()[name](args):
            rows.append(row)
            if dist.get_rank() == 0:
                print(name, {key: shown(value) for key, value in row.items()}, flush=True)
                if args.json:  # each time, so that what fails later loses nothing
                    args.json.write_text(json.dumps(found, indent=1) + "\n")
        if dist.get_rank() == 0:
            print(f"\n{table(rows)}\n", flush=True)
    dist.destroy_process_group()


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"of {', '.join(PARTS)}; all unless given")
    parser.add_argument("--json", type=Path, help="also write what was found to this file, as it is found")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=["own"], help="see GROUPS; alone is for times")
    parser.add_argument("--rule", choices=("nsa", "index"), default="nsa", help="of NSAConfig")
    parser.add_argument("--index-dim", type=int, default=32, help="of q_index and k_index, with --rule index")
    parser.add_argument("--check-tokens", type=int, default=16384)
    parser.add_argument("--bytes", type=int, nargs="+", default=[1 << 24, 1 << 27, 1 << 31], help="that a GPU sends")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1 << 18, 1 << 20])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--longest-variants", nargs="+", choices=[ONE, *VARIANTS], default=[ONE, "heads", "gather"])
    each = [n << 18 for n in (8, 9, 10, 11, 12)]
    parser.add_argument(
        "--longest-tokens", type=int, nargs="+", default=each, help="of each GPU, until they do not fit"
    )
    args = parser.parse_args(arguments)
    if unknown := sorted(set(args.parts) - set(PARTS)):
        parser.error(f"parts must be of {', '.join(PARTS)}, got {', '.join(unknown)}")
    return args


if __name__ == "__main__":
    main()
