"""The reference against the definition written out query by query, and its gradients against finite differences."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from nsa_layer import NSAConfig, reference
from nsa_layer.call import Call
from nsa_tools.testing.cases import OWN_KEYS, Case, Inputs, make_inputs, run

TINY = NSAConfig(block_size=4, block_counts=3, q_tile=8, window_size=5)


def literal_keys(case: Case, blocks: torch.Tensor, t: int) -> dict[str, list[int]]:
    """The keys that query t sees in each branch, by the words of the definition; blocks: the list of its tile."""
    config, T = case.config, case.T
    tokens = [s for j in blocks.tolist() if j >= 0 for s in range(j * config.block_size, (j + 1) * config.block_size)]
    compressed = range((T - config.span) // config.stride + 1) if T >= config.span else range(0)
    w = config.window_size
    if case.causal:
        return {
            "cmp": [j for j in compressed if j * config.stride + config.offset <= t],
            "slc": [s for s in tokens if s <= t],
            "swa": [s for s in range(t - w + 1, t + 1) if s >= 0],
        }
    return {
        "cmp": list(compressed),
        "slc": [s for s in tokens if s < T],
        "swa": [s for s in range(t - w + 1, t + w) if 0 <= s < T],
    }


def literal_rows(inputs: Inputs, name: str, kv: int) -> dict[str, torch.Tensor]:
    """The rows of k or v that each branch reads: of a key/value head, their blocks' means, or the branch's own."""
    x, config = getattr(inputs, name)[0, :, kv], inputs.case.config
    compressed, in_window = (getattr(inputs, f"{name}_{branch}") for branch in ("cmp", "win"))
    if compressed is None:
        starts, weight = range(0, len(x) - config.span + 1, config.stride), getattr(inputs, f"compress_{name}_weight")
        means = [x[s : s + config.span].sum(0) / config.span for s in starts]
        compressed = torch.stack([mean @ weight[kv] for mean in means])
    else:
        compressed = compressed[0, :, kv]
    return {"cmp": compressed, "slc": x, "swa": x if in_window is None else in_window[0, :, kv]}


@pytest.mark.parametrize("causal, own", [(True, ()), (False, ()), (True, OWN_KEYS)])
@pytest.mark.parametrize(
    "config",
    [
        TINY,
        TINY.replace(compress_stride=2),
        TINY.replace(q_tile=2),
        TINY.replace(q_tile=1),
        TINY.replace(q_tile=1, compress_size=6, compress_stride=2),
        NSAConfig.seed(block_size=4, block_counts=3, q_tile=8, window_size=5),
        TINY.replace(compress_offset=-6, init_blocks=0, local_blocks=0),
        TINY.replace(window_size=1),
        TINY.replace(window_size=0),
    ],
)
def test_each_query_by_itself(config: NSAConfig, causal: bool, own: tuple[str, ...]) -> None:
    case = Case(T=23, Hq=4, Hkv=2, D=3, Dv=2, dtype=torch.float64, config=config, causal=causal, compress_weights=True)
    case = replace(case, own_keys=own if config.window_size else own[:2])
    inputs = make_inputs(case)
    o, aux, _ = reference.attend(Call(**inputs.tensors(), spec=case.spec))
    for h in range(case.Hq):
        kv = h // 2
        k, v = (literal_rows(inputs, name, kv) for name in "kv")
        for t in range(case.T):
            q = inputs.q[0, t, h]
            blocks = aux.block_indices[0, t // config.q_tile, h if config.rule == "seed" else kv]
            total = torch.zeros(case.Dv, dtype=torch.float64)
            for i, (branch, seen) in enumerate(literal_keys(case, blocks, t).items()):
                weights = [math.exp(float(q @ k[branch][s]) * 3**-0.5) for s in seen]
                lse = float(getattr(aux, f"lse_{branch}")[0, h, t])
                assert lse == pytest.approx(math.log(sum(weights)) if seen else -math.inf, abs=1e-12)
                gate = 1 / (1 + math.exp(-float(q @ inputs.gate_weight[h, i])))
                for weight, s in zip(weights, seen, strict=True):
                    total += gate * weight / sum(weights) * v[branch][s]
            torch.testing.assert_close(o[0, t, h], total, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "case",
    [
        Case(T=11, Hq=2, Hkv=1, D=3, Dv=2, compress_weights=True),
        Case(T=11, Hq=2, Hkv=1, D=3, Dv=2, compress_weights=True, gate="given", causal=False),
        Case(T=10, Hq=2, Hkv=2, D=2, config=TINY.replace(compress_stride=2), compress_weights=True),
        Case(lengths=(3, 0, 6), Hq=2, Hkv=1, D=2, compress_weights=True, gate="none"),
        Case(T=9, Hq=2, Hkv=1, D=2, config=NSAConfig.seed(block_size=2, q_tile=4, block_counts=2, window_size=3)),
    ],
    ids=repr,
)
def test_gradcheck(case: Case) -> None:
    case = replace(case, dtype=torch.float64, config=TINY if case.config == NSAConfig() else case.config)
    inputs = make_inputs(case)
    choice = run("reference", inputs).aux.block_indices
    leaves = inputs.tensors()

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        given = dict(zip(leaves, tensors, strict=True))
        return reference.attend(Call(**given, block_indices=choice, spec=case.spec))[0]

    assert torch.autograd.gradcheck(call, [x.requires_grad_() for x in leaves.values()], fast_mode=False)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_rows_that_see_nothing() -> None:
    config = NSAConfig(block_size=8, q_tile=8, block_counts=1, init_blocks=0, local_blocks=0, window_size=2)
    for branch, lse in (("cmp", "lse_cmp"), ("slc", "lse_slc")):
        # No block is complete in 7 tokens, and none is a candidate: a causal tile would choose its own.
        shape = dict(T=7, D=4, dtype=torch.float64, causal=branch == "cmp")
        case = Case(**shape, config=config, gate=branch, compress_weights=True)
        with torch.autograd.detect_anomaly(check_nan=True):  # no NaN on the way either, that a mask then hides
            got = run("reference", make_inputs(case))
        assert (getattr(got.aux, lse) == -torch.inf).all()
        assert not got.o.any()
        for name, grad in got.grads.items():
            assert name == "gates" or not grad.any(), name
            assert grad.isfinite().all(), name
