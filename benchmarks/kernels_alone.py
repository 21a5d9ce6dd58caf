"""Kernels by token, each alone: the choice of blocks, lists of it, and attention over them, forward and backward.

    python benchmarks/kernels_alone.py [--seqlen 65536] [--heads 32/8 64/4] [--data smooth random] [--json FILE]

bf16, D 128, 16 blocks of 64 a token, as the choice gives them; the data are `bench`'s. "selected" is
`selected_attention`, which makes its lists on the way: unions in forward, unions and pairs in backward. Medians of
CUDA-event timings after a warm-up, the host's part hidden; calls take turns, on inputs that are many times the L2.
flash-linear-attention's `parallel_nsa` takes part where it is installed and a group has a multiple of 16 heads. SFNSA,
which no package index has, does not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from tabulate import tabulate

from nsa_layer import NSAConfig, selected_attention
from nsa_tools.measure.timing import Call, interleaved
from nsa_tools.shape import DATA, Shape

CONFIG, D = NSAConfig(q_tile=1), 128
RIVAL = "fla"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, nargs="+", default=[65536])
    parser.add_argument("--heads", nargs="+", default=["32/8", "64/4"], help="of queries / of keys and values")
    parser.add_argument("--data", nargs="+", default=["smooth", "random"], choices=DATA)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write every median, in milliseconds")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("kernels_alone.py measures on a GPU, and PyTorch finds none")
    rows = []
    for T in given.seqlen:
        for heads in given.heads:
            for data in given.data:
                row = {"T": f"{T:,}", "heads": heads, "data": data}
                calls = dict(calls_of(T, *map(int, heads.split("/")), data))
                repeats = given.repeats if T < 1 << 20 else 3
                timings = interleaved(
                    calls, repeats=repeats, device="cuda", label=" ".join(row.values()), hide_host=True
                )
                rows.append(row | {name: round(statistics.median(ms), 3) for name, ms in timings.items()})
                if given.json:
                    given.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(tabulate(rows, headers="keys", tablefmt="pipe"))


def calls_of(T: int, Hq: int, Hkv: int, data: str) -> Iterator[tuple[str, Call]]:
    """(name, call) of each kernel or pair of calls, on the same tensors."""
    from nsa_layer.cute.branch_options import compressed_options, pooling_options
    from nsa_layer.cute.forward import attend
    from nsa_layer.cute.token_unions import Places, key_pairs, query_lists
    from nsa_layer.cute.topk_dispatch import token_topk
    from nsa_layer.kernels.mean_pool.pool import pool

    shape = Shape(
        B=1, T=T, Hq=Hq, Hkv=Hkv, D=D, Dv=D, dtype=torch.bfloat16, config=CONFIG, gate="none", device="cuda", data=data
    )
    q, k, v = (x.detach() for x in shape.inputs().values())
    spec, do = shape.spec(), shape.output_gradient()
    (k_cmp,), v_cmp = pool(k, v, k_dtypes=(k.dtype,), v_dtype=v.dtype, **pooling_options(spec, None))
    lse = attend(q, k_cmp, v_cmp, spec, compressed_options(spec, None, None))[1]

    def choose() -> torch.Tensor:
        return token_topk(q, k_cmp, lse, S=T, spec=spec, packing=None, q_offset=None)

    lists, places = choose(), Places.of_layer(T, T, spec, None, None)
    yield "choice", choose
    yield "unions", lambda: query_lists(lists, Hq // Hkv, places)
    yield "pairs", lambda: key_pairs(lists, (Hq, Hkv), places)

    def select(*qkv: torch.Tensor) -> torch.Tensor:
        return selected_attention(*qkv, lists, block_size=CONFIG.block_size, backend="cute")

    calls = {"selected": select}
    rival = fla_select(lists, Hq)
    if rival is not None and Hq // Hkv % 16 == 0:
        calls[RIVAL] = rival
    for name, call in calls.items():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        o = call(*leaves)
        yield f"{name}, forward", lambda call=call: call(q, k, v)
        yield f"{name}, backward", lambda o=o, x=leaves: torch.autograd.grad(o, x, do, retain_graph=True)


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
