"""Context parallelism on the GPUs of one host: equality with one GPU, bandwidths, times, the longest call, a model.

    torchrun --nproc-per-node 2 benchmarks/context_parallel.py [check bandwidth layer longest model] [--json FILE]

32 query heads, 8 key/value heads, bf16, the default configuration, gated, forward and backward, smooth data. Times are
the slowest rank's medians, variants in turn; a call of the layer is one of as many in a row as take a second, since a
GPU at its power limit runs the first ones after a pause faster. "one GPU" is every GPU with a whole call of its own, at
the same time; in a group "alone" no rank waits for another, and exchanges are copies of the same bytes. Communication
that is not hidden is the time of a trace in which a GPU runs nothing but kernels of NCCL and copies, waits included.
The model has SwiGLU MLPs of width 14,336, checkpoints each half of a layer, shards weights by FSDP2 and multiplies in
bf16; the share of attention is what a step takes less with a sum of q, k and v in place of `nsa`.
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
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from without_peers import without_peers

import nsa_layer.module
from nsa_layer import ContextParallel, NSAConfig, NSAttention, nsa, shard_sequence
from nsa_layer.rope import RotaryEmbedding
from nsa_tools.measure.kernel_trace import Kernel, record
from nsa_tools.measure.timing import milliseconds
from nsa_tools.report.tables import gib, markdown
from nsa_tools.shape import Shape, long_tailed

PARTS = ("check", "bandwidth", "layer", "longest", "model")
HEADS = dict(Hq=32, Hkv=8, D=128, Dv=128)
VARIANTS = ("heads", "gather", "auto")  # modes
# Groups as NCCL makes them, of a stream of high priority, of at most 16 thread blocks, of both, and without peers.
GROUPS = ("own", "first", "16", "16 first", "alone")
ONE = "one GPU"
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
ROW_MS = 1e3  # of calls in a row
VOCABULARY, HIDDEN, LOSS_TOKENS = 32768, 14336, 16384

Inputs = dict[str, torch.Tensor]
Spans = list[tuple[float, float]]


def shape_of(T: int, *, packed: int | None = None) -> Shape:
    """The call that is measured."""
    static = dict(dtype=torch.bfloat16 if CUDA else torch.float32, device=DEVICE, config=NSAConfig())
    lengths = None if packed is None else long_tailed(T, packed)
    return Shape(T=T, B=1, lengths=lengths, **HEADS, **static, backward=True, gate="weight", data="smooth")


def attend(inputs: Inputs, do: torch.Tensor, **options: object) -> tuple[torch.Tensor, ...]:
    """o and the gradients of all inputs."""
    o = nsa(**inputs, config=NSAConfig(), **options)
    return o.detach(), *torch.autograd.grad(o, list(inputs.values()), do)


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


def check(given: argparse.Namespace) -> Iterable[dict]:
    """Largest differences from one GPU, over the largest element, and the share of equal elements."""
    for shape in (shape_of(given.check_tokens), shape_of(given.check_tokens, packed=5)):
        dim, packed = (1, {}) if shape.lengths is None else (0, shape.packing())
        whole, do = shape.inputs(), shape.output_gradient()
        expected = attend(whole, do, **packed)
        for name, cp in made(given.variants, given.groups).items():
            inputs, part_do = parts_of(whole, do, cp, dim=dim)
            got = attend(inputs, part_do, cp=cp, **packed)
            for what, x, y in zip(("o", *("d" + key for key in inputs)), got, expected, strict=True):
                if what == "dgate_weight":
                    dist.all_reduce(x)
                else:
                    y = shard_sequence(y, cp, dim=dim)
                error = ((x.double() - y.double()).abs().max() / y.double().abs().max()).item()
                row = dict(tokens=shape.describe(), variant=name, tensor=what, error=agreed(error, dist.ReduceOp.MAX))
                yield row | dict(equal=agreed((x == y).double().mean().item(), dist.ReduceOp.MIN))


def bandwidth(given: argparse.Namespace) -> Iterable[dict]:
    """GB/s that leave each GPU, in collectives of so many bytes sent by each."""
    ops, R, group = torch.ops._c10d_functional, dist.get_world_size(), dist.group.WORLD.group_name
    for size in given.bytes:
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


def layer(given: argparse.Namespace) -> Iterable[dict]:
    """Times of a call on one GPU and on all, and the communication that is not hidden."""
    for T in given.tokens:
        clear()
        shape, ranks = shape_of(T), made(given.variants, given.groups)
        whole, do = shape.inputs(), shape.output_gradient()
        parts = parts_of(whole, do, next(iter(ranks.values())))
        calls: dict[str, Callable[[], object]] = {ONE: partial(attend, whole, do)}
        for name, cp in ranks.items():
            call = partial(attend, *parts, cp=cp)
            calls[name] = without_peers()(call) if dist.get_backend(cp.group) == "fake" else call
        counts = {}
        for name, call in calls.items():
            slowest(call)
            counts[name] = math.ceil(ROW_MS / slowest(call))
        timings: dict[str, list[list[float]]] = {name: [] for name in calls}
        for _ in range(given.repeats):
            for name, call in calls.items():
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


def longest(given: argparse.Namespace) -> Iterable[dict]:
    """Calls of more and more tokens until one does not fit; on one rank alone, and the others wait until their time is
    up, with what was found before in the file."""
    for name in given.longest_variants:
        cp = None if name == ONE else next(iter(made([name], given.groups).values()))
        for T in given.longest_tokens:
            clear()
            fits, ms = True, 0.0
            try:
                if cp is not None or dist.get_rank() == 0:
                    inputs, do = shape_of(T).inputs(), shape_of(T).output_gradient()
                    options = {} if cp is None else {"cp": cp}
                    ms = milliseconds(lambda: attend(inputs, do, **options), DEVICE)
            except torch.OutOfMemoryError:
                fits = False
            inputs = do = None
            fits = bool(agreed(fits, dist.ReduceOp.MIN))
            tokens = T if cp is None else T * cp.size
            yield dict(variant=name, T=tokens, fits=fits, ms=agreed(ms, dist.ReduceOp.MAX), peak_bytes=peak())
            if not fits:
                break


class Layer(nn.Module):
    """Attention and a SwiGLU MLP, each after a norm, beside a residual path, and computed again in backward."""

    def __init__(self, dim: int, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(dim) for _ in range(2))
        self.attention = NSAttention(dim, num_heads=heads, num_kv_heads=kv_heads, rope=RotaryEmbedding(dim // heads))
        self.gate, self.up, self.down = (
            nn.Linear(*sizes, bias=False) for sizes in ((dim, hidden), (dim, hidden), (hidden, dim))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(lambda x: x + self.attention(self.norms[0](x)), x, use_reentrant=False)
        return checkpoint(self.mlp, x, use_reentrant=False)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """This rank's tokens and labels [B, T / R] to the mean loss of them, whose logits are made in parts."""

    def __init__(self, layers: int, **sizes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, sizes["dim"])
        self.layers = nn.Sequential(*(Layer(**sizes) for _ in range(layers)), nn.RMSNorm(sizes["dim"]))
        self.head = nn.Linear(sizes["dim"], VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.layers(self.embedding(tokens))
        parts = zip(x.flatten(0, 1).split(LOSS_TOKENS), labels.flatten().split(LOSS_TOKENS))
        return sum(checkpoint(self.loss, *part, use_reentrant=False) for part in parts) / labels.numel()

    def loss(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(x).float(), labels, reduction="sum")


def model(given: argparse.Namespace) -> Iterable[dict]:
    """A training step of a model, with attention and with a sum in its place."""
    clear()
    mesh = init_device_mesh(DEVICE, (1, dist.get_world_size()), mesh_dim_names=("dp", "cp"))
    (cp,) = made([given.model_variant], given.groups[:1]).values()
    precision = (
        dict(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)) if CUDA else {}
    )
    torch.manual_seed(0)
    with torch.device(DEVICE):
        net = Model(given.layers, dim=given.dim, hidden=given.hidden, heads=given.dim // 128, kv_heads=given.dim // 512)
    everyone = mesh._flatten("everyone")
    for part in net.layers[:-1]:
        part.attention.set_context_parallel(cp)
        fully_shard(part, mesh=everyone, **precision)
    fully_shard(net, mesh=everyone, **precision)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    tokens = torch.randint(VOCABULARY, (1, given.model_tokens + 1), generator=torch.Generator().manual_seed(0))
    tokens, labels = (shard_sequence(x, cp).to(DEVICE) for x in (tokens[:, :-1], tokens[:, 1:]))
    losses: list[torch.Tensor] = []

    def step() -> None:
        loss = net(tokens, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    real = nsa_layer.module.nsa
    row = dict(variant=given.model_variant, T=given.model_tokens, parameters=sum(p.numel() for p in net.parameters()))
    for name, function in (("ms", real), ("ms_without_attention", summed)):
        nsa_layer.module.nsa = function
        slowest(step)
        row[name] = statistics.median(slowest(step) for _ in range(2))
        if function is real:
            row |= dict(peak_bytes=peak(), tokens_per_s=given.model_tokens / row["ms"] * 1e3)
    nsa_layer.module.nsa = real
    row["share_of_attention"] = 1 - row["ms_without_attention"] / row["ms"]
    yield row | dict(first_loss=losses[0].item())


def summed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: object) -> torch.Tensor:
    """A stand-in for attention that costs next to nothing."""
    return q + (k + v).repeat_interleave(q.shape[-2] // k.shape[-2], dim=-2)


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
    given = options()
    if CUDA:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if CUDA else "gloo")
    found: dict[str, object] = dict(
        command="torchrun benchmarks/context_parallel.py " + " ".join(given.parts), ranks=dist.get_world_size()
    )
    if CUDA:
        found |= dict(gpu=torch.cuda.get_device_name(), torch=torch.__version__, nccl=str(torch.cuda.nccl.version()))
    for name in given.parts:
        found[name] = rows = []
        for row in globals()[name](given):
            rows.append(row)
            if dist.get_rank() == 0:
                print(name, {key: shown(value) for key, value in row.items()}, flush=True)
                if given.json:  # each time, so that what fails later loses nothing
                    given.json.write_text(json.dumps(found, indent=1) + "\n")
        if dist.get_rank() == 0:
            print(f"\n{table(rows)}\n", flush=True)
    dist.destroy_process_group()


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"of {', '.join(PARTS)}; all unless given")
    parser.add_argument("--json", type=Path, help="also write what was found to this file, as it is found")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=["own"], help="see GROUPS; alone is for times")
    parser.add_argument("--check-tokens", type=int, default=16384)
    parser.add_argument("--bytes", type=int, nargs="+", default=[1 << 24, 1 << 27, 1 << 31], help="that a GPU sends")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1 << 18, 1 << 20])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--longest-variants", nargs="+", choices=[ONE, *VARIANTS], default=[ONE, "heads", "gather"])
    each = [n << 18 for n in (8, 9, 10, 11, 12)]
    parser.add_argument(
        "--longest-tokens", type=int, nargs="+", default=each, help="of each GPU, until they do not fit"
    )
    parser.add_argument("--model-variant", choices=VARIANTS, default="auto")
    for name, size in dict(model_tokens=1 << 19, layers=8, dim=4096, hidden=HIDDEN).items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=size)
    given = parser.parse_args(arguments)
    if unknown := sorted(set(given.parts) - set(PARTS)):
        parser.error(f"parts must be of {', '.join(PARTS)}, got {', '.join(unknown)}")
    return given


if __name__ == "__main__":
    main()
