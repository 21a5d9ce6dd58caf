"""Blocks that are listed in any case."""

from __future__ import annotations

from nsa_layer.config import NSAConfig


def forced_blocks(own: range, blocks: int, config: NSAConfig, *, causal: bool) -> list[int]:
    """Blocks that a tile lists in any case, the first to be listed first; own: blocks of its tokens."""
    reach = range(own[0] - config.local_blocks + 1, own[-1] + 1) if config.local_blocks else ()
    first = range(min(config.init_blocks, blocks))
    before = {j for j in (*reach, *first) if 0 <= j <= own[-1]}
    behind = [] if causal else [j for j in first if j > own[-1]]
    return [*sorted(before, reverse=True), *behind][: config.block_counts]
