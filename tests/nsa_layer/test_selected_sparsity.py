"""Which passes and lists the selected branch's kernels take."""

from __future__ import annotations

import pytest
import torch

from nsa_layer.call_spec import CallSpec
from nsa_layer.config import NSAConfig


@pytest.mark.parametrize("Hq", [2, 8])
@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("q_tile", [128, 256])
@pytest.mark.parametrize("deterministic", [False, True])
def test_passes_are_known_before_lists_are(Hq: int, block_size: int, q_tile: int, deterministic: bool) -> None:
    """By the block size and the mode alone: deterministic backward takes two, so that its lists need no order."""
    from nsa_layer.cute import selected_branch

    q, v = (torch.empty(1, 300, heads, 64, dtype=torch.bfloat16) for heads in (Hq, 2))
    config = NSAConfig(block_size=block_size, q_tile=q_tile, deterministic=deterministic)
    two = selected_branch.use_split_dq(q, v, CallSpec(config, True, 1.0, None))
    assert two == (block_size == 64 or deterministic)
