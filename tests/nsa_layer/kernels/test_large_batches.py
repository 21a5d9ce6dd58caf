"""A batch is as large as memory allows: no kernel of the layer launches sequences but in a grid's first dimension."""

# What runs in a worker is imported there, so nothing up here may ask for the kernels.
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fa_compile import Worker, recorded_grids

from nsa_layer import NSAConfig, nsa
from nsa_layer.kernel_cases import compile_case, covering_cases

# The layer's own kernels, among them those that make block lists; attention's are in tests/flash_attn.
CASES = {i: case for i, case in enumerate(covering_cases()) if case.branch in ("own", "slc") and not case.packed}


def grids_of_case(index: int) -> list[tuple[int | None, ...]]:
    with recorded_grids() as grids:
        compile_case(covering_cases()[index])
    return grids


@pytest.mark.parametrize("index", CASES)
def test_only_the_first_dimension_of_a_grid_grows(_kernel_workers: Callable[[str], Worker], index: int) -> None:
    grids = _kernel_workers(f"sm_{CASES[index].arch}").trace(grids_of_case, index)
    assert all(None not in grid[1:] for grid in grids), CASES[index]


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
        (8_192, 130, (8, 8), SHORT),
        (8_192, 130, (16, 8), DETERMINISTIC),
    ],
    ids=str,
)
def test_sequences_of_a_large_batch_get_what_eager_gives_them(
    B: int, T: int, heads: tuple[int, int], config: NSAConfig
) -> None:
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
    del got
    torch.cuda.empty_cache()  # other processes of a test run have the GPU too
