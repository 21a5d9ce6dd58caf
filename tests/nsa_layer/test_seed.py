"""`NSAConfig.seed()` against the seed's rule in a few lines of its own."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from nsa_layer import NSAConfig
from nsa_layer.testing import Case, make_inputs, run

CONFIG = NSAConfig.seed(block_size=64, block_counts=3, window_size=100)


def seed_branches(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """One query head, q, k, v [T, D] -> three outputs [T, D]: blocks of 64, tiles of 256, n = 3, window 100."""
    T, D = q.shape
    t = torch.arange(T)[:, None]
    blocks = T // 64
    k_cmp, v_cmp = (x[: blocks * 64].view(blocks, 64, D).mean(1) for x in (k, v))
    selected = torch.zeros(T, T, dtype=torch.bool)
    for t0 in range(0, T, 256):
        logits = k_cmp @ q[t0 : t0 + 256].mean(0)
        complete = (t0 + 1) // 64
        for j in logits[:complete].topk(min(3, complete)).indices.tolist():
            selected[t0 : t0 + 256, j * 64 : (j + 1) * 64] = True
    window = (torch.arange(T) <= t) & (torch.arange(T) > t - 100)
    outputs = []
    masks = (torch.arange(blocks) <= t // 64, selected & (torch.arange(T) <= t), window)
    for keys, values, mask in zip((k_cmp, k, k), (v_cmp, v, v), masks):
        p = ((q @ keys.T) * D**-0.5).masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0)
        outputs.append(p @ values)
    return outputs


def test_what_it_says() -> None:
    assert asdict(NSAConfig.seed()) == asdict(NSAConfig()) | {
        "compress_offset": 0,
        "tile_query": "mean",
        "importance": "logit",
        "per_head": True,
        "q_tile": 256,
        "force_blocks": False,
    }


@pytest.mark.parametrize("backend", ["eager", "reference"])
@pytest.mark.parametrize("T", [1, 63, 300, 1000])
def test_against_the_rule(backend: str, T: int) -> None:
    case = Case(T=T, Hq=4, Hkv=2, D=8, dtype=torch.float64, config=CONFIG)
    inputs = make_inputs(case)
    got = run(backend, inputs)
    for h in range(case.Hq):
        outputs = seed_branches(inputs.q[0, :, h], inputs.k[0, :, h // 2], inputs.v[0, :, h // 2])
        gates = (inputs.q[0, :, h] @ inputs.gate_weight[h].T).sigmoid()
        expected = sum(gates[:, i, None] * outputs[i] for i in range(3))
        torch.testing.assert_close(got.o[0, :, h], expected, rtol=1e-11, atol=1e-11)
