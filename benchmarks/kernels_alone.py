"""Kernels by token, each alone: the choice of blocks, lists of it, and attention over them, forward and backward.

    python benchmarks/kernels_alone.py [--seqlen 65536] [--heads 32/8 64/4] [--data trained random] [--json FILE]

bf16, D 128, 16 blocks of 64 a token: "smooth" and "random" are `bench`'s data, of which the choice makes the lists;
"trained" are random data and lists drawn like those of a trained model. "union" is the blocks that the tokens of a
kernel's tile list together over those of one of them. "selected" is `selected_attention`, which makes what kernels
read of the lists on the way: unions in forward, unions and pairs in backward. Medians of
CUDA-event timings after a warm-up, the host's part hidden; calls are interleaved, on inputs that are many times the L2.
flash-linear-attention's `parallel_nsa` takes part where it is installed and a group has a multiple of 16 heads. SFNSA,
which no package index has, does not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
from tabulate import tabulate

from nsa_layer import NSAConfig, selected_attention
from nsa_tools.measure.bench_run import union
from nsa_tools.measure.timing import Call, interleaved
from nsa_tools.shape import DATA, Shape

CONFIG, D = NSAConfig(q_tile=1), 128
TRAINED = "trained"
RIVAL = "fla"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, nargs="+", default=[65536])
    parser.add_argument("--heads", nargs="+", default=["32/8", "64/4"], help="of queries / of keys and values")
    parser.add_argument("--data", nargs="+", default=[TRAINED, *DATA], choices=[TRAINED, *DATA])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="columns to time")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write every median, in milliseconds")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("kernels_alone.py measures on a GPU, and PyTorch finds none")
    rows = []
    for T in args.seqlen:
        for heads in args.heads:
            for data in args.data:
                row = {"T": f"{T:,}", "heads": heads, "data": data}
                listed, calls = calls_of(T, *map(int, heads.split("/")), data)
                calls = {name: call for name, call in calls.items() if name in (args.only or calls)}
                repeats = args.repeats if T < 1 << 20 else 3
                timings = interleaved(
                    calls, repeats=repeats, device="cuda", label=" ".join(row.values()), hide_host=True
                )
                medians = {name: round(statistics.median(ms), 3) for name, ms in timings.items()}
                rows.append(row | {"union": round(listed, 2)} | medians)
                if args.json:
                    args.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(tabulate(rows, headers="keys", tablefmt="pipe"))


def calls_of(T: int, Hq: int, Hkv: int, data: str) -> tuple[float, dict[str, Call]]:
    """The union of the lists, and each kernel or pair of calls by name, on the same tensors."""
    from nsa_layer.call import Call as LayerCall
    from nsa_layer.cute.branch_options import compressed_options, pooling_options
    from nsa_layer.cute.forward import attend_branch
    from nsa_layer.cute.select_blocks import select_blocks
    from nsa_layer.cute.selected import query_lists, token_block_csr
    from nsa_layer.cute.varlen import Varlen
    from nsa_layer.kernels.pooling.mean_pool import mean_pool

    static = dict(B=1, T=T, Hq=Hq, Hkv=Hkv, D=D, Dv=D, dtype=torch.bfloat16, config=CONFIG, gate="none", device="cuda")
    shape = Shape(**static, data="random" if data == TRAINED else data)
    q, k, v = (x.detach() for x in shape.inputs().values())
    own, do = LayerCall(q, k, v, spec=shape.spec), shape.output_gradient()
    varlen = Varlen.of(own)
    (k_cmp,), v_cmp = mean_pool(k, v, k_dtypes=(k.dtype,), v_dtype=v.dtype, **pooling_options(own.config, varlen))
    lse = attend_branch(q, k_cmp, v_cmp, own.spec, compressed_options(own, varlen))[1]

    def choose() -> torch.Tensor:
        return select_blocks(own, varlen, k_cmp, lse)[0]

    lists = trained_lists(T, Hkv, device="cuda") if data == TRAINED else choose()
    calls = {
        "choice": choose,
        "unions": lambda: query_lists(own, varlen, lists),
        "pairs": lambda: token_block_csr(own, varlen, lists),
    }

    def select(*qkv: torch.Tensor) -> torch.Tensor:
        return selected_attention(*qkv, lists, block_size=CONFIG.block_size, backend="cute")

    over_lists = {"selected": select}
    rival = fla_select(lists, Hq)
    if rival is not None and Hq // Hkv % 16 == 0:
        over_lists[RIVAL] = rival
    for name, call in over_lists.items():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        o = call(*leaves)
        calls[f"{name}, forward"] = lambda call=call: call(q, k, v)
        calls[f"{name}, backward"] = lambda o=o, x=leaves: torch.autograd.grad(o, x, do, retain_graph=True)
    return union(lists, shape), calls


def trained_lists(T: int, Hkv: int, *, device: str) -> torch.Tensor:
    """Lists like those of a trained model, int32 [1, T, Hkv, n]: 4, 8, 16 and 32 neighbours list 1.3, 1.6, 2.1 and 2.8
    times as many blocks as one token does, of 1,024 blocks.

    A block's score is three times its popularity, which drifts along the sequence, plus noise that neighbours share in
    part: both are first-order autoregressive, of variance 1. Block 0, a token's own and the one before are listed.
    """
    size, n, blocks = CONFIG.block_size, CONFIG.block_counts, CONFIG.num_blocks(T)
    weight, memory = torch.tensor([3.0, 1.0], device=device), torch.tensor([0.99, 0.95], device=device)
    generator = torch.Generator(device).manual_seed(0)
    step = torch.arange(size, device=device)
    decay = torch.where(step[:, None] >= step, memory[:, None, None] ** (step[:, None] - step), 0)  # [2, size, size]
    kept = memory[:, None] ** (step + 1)
    state = torch.randn(2, Hkv * blocks, generator=generator, device=device)
    lists = torch.full((T, Hkv, n), -1, dtype=torch.int32, device=device)
    for own in range(blocks):  # as many tokens at a time as a block has
        new = torch.randn(2, size, Hkv * blocks, generator=generator, device=device)
        both = kept[..., None] * state[:, None] + (1 - memory**2).sqrt()[:, None, None] * (decay @ new)
        score, state = torch.einsum("p,ptx->tx", weight, both).unflatten(1, (Hkv, blocks)), both[:, -1]
        score[..., [0, max(0, own - 1), own]] = 1e9
        best = score[..., : own + 1].topk(min(n, own + 1)).indices.sort().values
        tokens = lists[own * size : (own + 1) * size]
        tokens[..., : best.shape[-1]] = best[: len(tokens)]
    return lists[None]


def fla_select(lists: torch.Tensor, Hq: int) -> Call | None:
    """The same attention by flash-linear-attention; None where it is not installed."""
    try:
        from fla.ops.nsa import parallel_nsa
    except ImportError as error:
        print(f"{RIVAL} is left out: {error}", file=sys.stderr)
        return None
    gates = torch.ones(1, lists.shape[1], Hq, device="cuda", dtype=torch.bfloat16)
    options = dict(block_indices=lists.long(), block_counts=lists.shape[-1], block_size=CONFIG.block_size)
    return lambda q, k, v: parallel_nsa(q, k, v, g_slc=gates, g_swa=gates, **options)


if __name__ == "__main__":
    main()
