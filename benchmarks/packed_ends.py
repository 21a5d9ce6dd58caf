"""Cost of loads that end with a packed sequence: packed calls in this tree, and in one whose loads do not.

    python benchmarks/packed_ends.py --before FOLDER [--repeats 31] [--json FILE]

FOLDER holds the other tree's packages as files: `cp -rL .tree/flash_attn .tree/nsa_layer FOLDER`, from its checkout.
Each tree runs in a process of its own on the same GPU; they take turns at every timing, as in `against_upstream.py`.
Shape: bf16, 65,536 tokens, 32 query heads, 8 key/value heads, D 128: inputs are many times the L2. Compressed keys are
one for 64 tokens; selected blocks of 64 keys are 16 for 128 queries, which the layer chooses. Medians, the host's part
hidden; largest differences of results over the largest value. Exits with 1 if a result differs by more than 2 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from against_upstream import HKV, HQ, MOST_DIFFERENCE, Call, D, Worker, answer, measure
from tqdm import tqdm

from nsa_tools.report.tables import markdown

TOKENS, BLOCK, WINDOW = 65536, 64, 512
KINDS = ("causal", "window", "compressed", "selected, one pass", "selected, two passes", "layer")


@dataclass(frozen=True)
class Case:
    """Equally long sequences, and what is called."""

    kind: str
    sequences: int


def starts(sequences: int, length: int) -> torch.Tensor:
    return torch.arange(sequences + 1, dtype=torch.int32, device="cuda") * length


def calls(case: Case) -> dict[str, Call]:
    """Forward and backward."""
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    torch.manual_seed(case.sequences)
    length, tokens_a_key = TOKENS // case.sequences, BLOCK if case.kind == "compressed" else 1
    keys = length // tokens_a_key
    shapes = ((TOKENS, HQ), (TOKENS // tokens_a_key, HKV), (TOKENS // tokens_a_key, HKV), (TOKENS, HQ))
    q, k, v, do = (torch.randn(*shape, D, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    if case.kind == "layer":
        return layer_calls(q, k, v, do, starts(case.sequences, length))
    options: dict[str, Any] = dict(max_seqlen_q=length, max_seqlen_k=keys)
    options |= dict(cu_seqlens_q=starts(case.sequences, length), cu_seqlens_k=starts(case.sequences, keys))
    more: dict[str, Any] = dict(forward={}, backward={})
    if case.kind == "window":
        options |= dict(window_size_left=WINDOW - 1, window_size_right=0)
    elif case.kind.startswith("selected"):
        more = selected(q, k, v, options["cu_seqlens_q"], length, passes=1 + case.kind.endswith("passes"))
    else:
        options |= dict(causal=True)
    if case.kind == "compressed":
        options |= dict(compress_factor=BLOCK, compress_offset=BLOCK - 1)
    o, lse, *_ = _flash_attn_fwd(q, k, v, return_lse=True, **options, **more["forward"])
    return {
        "forward": lambda: _flash_attn_fwd(q, k, v, return_lse=True, **options, **more["forward"])[:1],
        "backward": lambda: _flash_attn_bwd(q, k, v, o, do, lse, **options, **more["backward"])[:3],
    }


def selected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, length: int, *, passes: int
) -> dict[str, dict[str, Any]]:
    """Options of both directions: the lists of the blocks that the layer chooses."""
    from nsa_layer import NSAConfig, nsa
    from nsa_layer.call_spec import Problem
    from nsa_layer.cute import branches

    config = NSAConfig()
    with torch.no_grad():
        chosen = nsa(q, k, v, config=config, cu_seqlens=cu_seqlens, return_aux=True)[1].block_indices
    problem = Problem(config, True, D**-0.5, (length,) * (len(q) // length))
    made = [
        branches.selected_sparsity(
            chosen, len(q), (HQ, HKV), problem=problem, tile=tile(q.device, BLOCK), backward=backward,
            cu_seqlens=cu_seqlens,
        ).options()
        for tile, backward in ((branches.forward_tile, False), (branches.backward_tile, True))
    ]  # fmt: skip
    of_queries = made[0]["block_sparse_tensors"]
    return dict(forward=made[0], backward=made[1] | dict(block_sparse_tensors_fwd=of_queries, passes=passes))


def layer_calls(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, cu_seqlens: torch.Tensor
) -> dict[str, Call]:
    from nsa_layer import nsa

    leaves = [x.requires_grad_() for x in (q, k, v)]
    call: Callable[[], torch.Tensor] = lambda: nsa(*leaves, cu_seqlens=cu_seqlens)  # noqa: E731
    o = call()

    def forward() -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return (call(),)

    return {"forward": forward, "backward": lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="folder that holds the other tree's flash_attn and nsa_layer")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--sequences", type=int, nargs="+", default=[4, 64])
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--json", type=Path, help="write every number")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("packed_ends.py measures on a GPU, and PyTorch finds none")
    if given.answer:
        return answer(lambda case: calls(Case(**case)))
    if given.before is None or not (given.before / "flash_attn" / "cute" / "interface.py").is_file():
        sys.exit("--before has to name a folder that holds flash_attn/cute/interface.py")
    rows = []
    with TemporaryDirectory() as name:
        paths = {"bounded": [], "before": [str(given.before.resolve())]}
        workers = {tree: Worker(path, Path(name) / f"{tree}.log", __file__) for tree, path in paths.items()}
        for case in tqdm([Case(kind, n) for kind in given.only for n in given.sequences], leave=False):
            rows += measure(case, workers, Path(name), given.repeats)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
    header = ["call", "sequences", "way", "before, ms", "bounded, ms", "ratio", "difference"]
    print(markdown(header, [table_row(row) for row in rows], left=1))
    sys.exit(any(row["difference"] > MOST_DIFFERENCE for row in rows))


def table_row(row: dict[str, Any]) -> list[str]:
    before, bounded = (statistics.median(row[tree]) for tree in ("before", "bounded"))
    case = Case(**row["case"])
    times = [f"{before:.3f}", f"{bounded:.3f}", f"{bounded / before:.4f}"]
    return [case.kind, str(case.sequences), row["way"], *times, f"{row['difference']:.0e}"]


if __name__ == "__main__":
    main()
