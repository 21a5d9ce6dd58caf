"""Every mask that fuzzing draws, as lists of the benchmark's size: what deterministic backward costs on each.

The default and the deterministic call are as a user makes them, without a plan and by one. Beside them, for masks of
few blocks, both in one pass without a plan, as a ratio.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tile_lists import BLOCK, HKV, HQ, Case

from nsa_tools.report.tables import markdown

TOKENS = 65536
SHARES = {  # of the blocks that a pattern leaves to chance; a window's width
    "random": (0.02, 0.1, 0.4), "causal": (0.0,), "window": (0.03, 0.2), "full": (0.0,), "diagonal": (0.02, 0.4),
    "anti-diagonal": (0.0,), "comb": (0.0,), "one long column": (0.0,), "one long row": (0.02, 0.4),
    "documents": (0.0,), "prefix": (0.0,), "empty rows": (0.1, 0.4), "empty columns": (0.1, 0.4),
}  # fmt: skip
NOTHING = ("empty",)  # lists no block: there is nothing to time
FEW = 600_000  # blocks of all heads, at most
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Pattern(Case):
    """A mask of fuzzing's as lists of full blocks, drawn for each key/value head.

    Attributes:
        share: of the blocks that the pattern leaves to chance.
    """

    share: float = 0.0

    @property
    def name(self) -> str:
        return f"mask, {self.kind}"

    @property
    def mask(self) -> dict[str, Any]:
        return dict(causal=False)

    def lists(self) -> tuple[Any, Any]:
        return lists_of(self.table())

    def table(self) -> torch.Tensor:
        return drawn(self).cuda()


def patterns(T: int = TOKENS) -> list[Pattern]:
    """All that fuzzing draws but `NOTHING`."""
    names = _fuzzed().case.PATTERNS
    missing = set(names) - set(SHARES) - set(NOTHING)
    if missing:
        raise ValueError(f"patterns of fuzzing without shares here: {sorted(missing)}")
    return [Pattern(name, T, 0, share=share) for name in SHARES for share in SHARES[name]]


def _fuzzed() -> Any:
    sys.path[:] = [*dict.fromkeys([*sys.path, str(ROOT)])]
    import fuzz.blocks
    import fuzz.case

    return fuzz


def drawn(pattern: Pattern) -> torch.Tensor:
    """bool [key/value heads, query blocks, key blocks], on the CPU."""
    draw, M = random.Random(1), pattern.T // BLOCK
    rule = _fuzzed().blocks.pattern_table
    return torch.stack([rule(pattern.kind, M, M, pattern.share, draw) for _ in range(HKV)])


def lists_of(table: torch.Tensor) -> tuple[Any, Any]:
    from flash_attn.cute.block_lists import lists_from_blocks, transpose_lists

    forward = lists_from_blocks(table[None], table[None], block_size=(BLOCK, BLOCK))
    return forward, transpose_lists(forward, table.shape[2])


def ways(pattern: Pattern) -> tuple[str, ...]:
    """The ways that are timed."""
    few = int(drawn(pattern).sum()) * (HQ // HKV) <= FEW
    return (*(way for pair in PAIRS for way in pair), *(IN_ONE_PASS if few else ()))


PAIRS = (("deterministic", "backward"), ("deterministic, planned", "planned"))
IN_ONE_PASS = ("one pass, locks", "one pass")
HEADER = [
    "lists, T 65,536", "share", "blocks a row", "backward, ms", "det., ms", "det. / backward", "planned, ms",
    "det., planned, ms", "det., planned / planned", "in one pass: det. / default",
]  # fmt: skip


def report(rows: dict[str, dict[str, float]]) -> str:
    """The table, and which mask is the worst. rows: by the pattern's repr."""
    ratios = {
        (name, pair): row[pair[0]] / row[pair[1]] for name, row in rows.items() for pair in PAIRS if has(row, pair)
    }
    worst = max(ratios, key=ratios.__getitem__, default=None)
    table = [_cells(row, worst == (name, PAIRS[0]), worst == (name, PAIRS[1])) for name, row in rows.items()]
    text = ""
    if worst is not None:
        name, (slow, fast) = worst
        text = f"\n\nworst: {name}: {slow} takes {ratios[worst]:.2f} times the time of {fast}"
    return markdown(HEADER, table) + text


def has(row: dict[str, float], pair: tuple[str, str]) -> bool:
    return row.keys() >= {*pair}


def _cells(row: dict[str, Any], worst: bool, worst_planned: bool) -> list[str]:
    cells = [row["kind"], f"{row['share']:.2f}" if row["share"] else "-", f"{row['tiles'] / (row['T'] // BLOCK):.1f}"]
    for pair, marked in zip(PAIRS, (worst, worst_planned), strict=True):
        cells += [f"{row[way]:.2f}" if way in row else "-" for way in reversed(pair)]
        cells.append(_ratio(row, pair) + " (worst)" * marked)
    return [*cells, _ratio(row, IN_ONE_PASS)]


def _ratio(row: dict[str, float], pair: tuple[str, str]) -> str:
    return f"{row[pair[0]] / row[pair[1]]:.2f}" if has(row, pair) else "-"
