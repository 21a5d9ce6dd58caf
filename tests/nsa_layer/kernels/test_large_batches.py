"""A batch is as large as memory allows: no kernel of the layer launches sequences but in a grid's first dimension."""

# What runs in a worker is imported there, so nothing up here may ask for the kernels.
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fa_compile import only_hosts, shared_worker

from nsa_layer import NSAConfig, nsa
from nsa_layer.warm_up.lookup import make_call
from nsa_tools.testing.covering_calls import covering_calls


def grids_of_calls() -> list[tuple[str, list[list[object]]]]:
    """Grids of calls of equal lengths, of the layer's kernels and of attention's; None for what each call decides."""
    found = []
    for call in covering_calls(strength=1):
        with only_hosts() as launches:
            make_call(replace(call, lengths=None, lengths_k=None).signature())
        grids = [[getattr(size, "value", size) for size in launch.grid] for launch in launches]
        found.append((repr(call), [[size if isinstance(size, int) else None for size in grid] for grid in grids]))
    return found


@pytest.mark.xdist_group("sm_90")
@pytest.mark.parametrize("arch", [90, pytest.param(100, marks=pytest.mark.sweep)])
def test_only_the_first_dimension_of_a_grid_grows(arch: int) -> None:
    found = shared_worker(f"sm_{arch}").trace(grids_of_calls)
    assert sum(len(grids) for _, grids in found) > 30
    for call, grids in found:
        assert all(None not in grid[1:] for grid in grids), call


SHORT = NSAConfig(block_size=32, q_tile=128, block_counts=4, window_size=64)
DETERMINISTIC = SHORT.replace(block_size=64, deterministic=True)


@pytest.mark.gpu
@pytest.mark.xdist_group("large batches")  # one at a time: each takes up to 30 GiB
@pytest.mark.parametrize(
    "B,T,heads,config",
    [
        (70_000, 64, (2, 1), SHORT),
        (70_000, 66, (1, 1), DETERMINISTIC),
        (70_000, 100, (2, 1), DETERMINISTIC.replace(block_size=128)),
        (8_192, 130, (16, 8), SHORT),
        (8_192, 130, (16, 8), DETERMINISTIC),
    ],
    ids=str,
)
def test_large_batches_get_what_eager_gives(B: int, T: int, heads: tuple[int, int], config: NSAConfig) -> None:
    torch.manual_seed(0)
    (Hq, Hkv), new = heads, dict(dtype=torch.bfloat16, device="cuda")
    qkv = [torch.randn(B, T, H, 64, **new) for H in (Hq, Hkv, Hkv)]
    gate_weight, do = torch.randn(Hq, 3, 64, **new) * 0.1, torch.randn(B, T, Hq, 64, **new)

    def results(backend: str, of: slice) -> tuple[torch.Tensor, ...]:
        given = [x[of].clone().requires_grad_() for x in qkv]
        o = nsa(*given, config=config, gate_weight=gate_weight, backend=backend)
        return o.detach(), *torch.autograd.grad(o, given, do[of])

    got = results("cute", slice(None))
    assert all(bool(x.isfinite().all()) for x in got)
    middle = 65_536 if B > 65_536 else B // 2
    for at in (slice(0, 2), slice(middle - 2, middle + 2), slice(B - 2, B)):
        for mine, expected in zip(got, results("eager", at), strict=True):
            torch.testing.assert_close(mine[at], expected, rtol=2e-2, atol=3e-2)
