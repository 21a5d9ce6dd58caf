"""The branches' backward together: where accumulators are one, and gradients against separate calls and fp64."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_map_only

# Workers, which run functions of this file, know neither folder.
sys.path += [str(Path(__file__).parents[1] / "flash_attn"), str(Path(__file__).parent)]

import shared_calls  # noqa: E402
from fa_compile import Worker  # noqa: E402
from shared_calls import Setup  # noqa: E402


@pytest.fixture(scope="module")
def hopper() -> Iterator[Worker]:
    worker = Worker("sm_90")
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def blackwell() -> Iterator[Worker]:
    worker = Worker("sm_100")
    yield worker
    worker.close()


def fake_data(setup: Setup) -> shared_calls.Data:
    """A setup's tensors without memory; the lists of a choice of the first block by every query tile."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    from nsa_layer.cute import selected_branch

    (Hq, Hkv), config, lengths = setup.heads, setup.spec.config, setup.lengths
    lead = (setup.B, setup.T) if lengths is None else (sum(lengths),)
    blocks = sum(map(config.compressed_length, lengths or [setup.T]))

    def tensor(H: int, tokens: int = lead[-1]) -> torch.Tensor:
        return torch.empty(*lead[:-1], tokens, H, setup.D, device="cuda", dtype=setup.dtype)

    q, do, k, v, k_cmp, v_cmp = (
        tensor(Hq),
        tensor(Hq),
        tensor(Hkv),
        tensor(Hkv),
        tensor(Hkv, blocks),
        tensor(Hkv, blocks),
    )
    with unset_fake_temporarily():
        tiles = sum(map(config.num_tiles, lengths or [setup.T]))
        chosen = torch.zeros(*lead[:-1], Hkv, tiles, 1, dtype=torch.int32).expand(*lead[:-1], Hkv, tiles, 16)
        starts = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        of_queries, of_keys = (
            selected_branch.selected_sparsity(
                chosen, lead[-1], setup.heads, spec=setup.spec, cu_seqlens=starts, backward=backward,
                tile=tile(torch.device("cuda", 0), setup.block_size), ordered=backward and setup.deterministic,
            )
            for backward, tile in enumerate((selected_branch.forward_tile, selected_branch.backward_tile))
        )  # fmt: skip
    cu_seqlens = None if lengths is None else torch.empty(len(lengths) + 1, dtype=torch.int32, device="cuda")
    both = map(on_gpu, (of_keys, of_queries))
    return shared_calls.Data(setup, q, k, v, k_cmp, v_cmp, do, (q, k, v), chosen, cu_seqlens, *both)


def on_gpu(sparsity):
    """Lists of the same shapes on a GPU, with nothing in them: enough to compile."""
    like = partial(tree_map_only, torch.Tensor, lambda x: torch.empty(x.shape, dtype=x.dtype, device="cuda"))
    return replace(sparsity, tensors=like(sparsity.tensors), aux_tensors=like(sparsity.aux_tensors))


def agreement(options: dict) -> tuple[int, int, int]:
    """The counts of accumulators of dq and of dk, and the rows of a tile of row sums; in a worker."""
    from nsa_layer.cute.grad_accum import backward_layouts

    setup = Setup(**options)
    data = fake_data(setup)
    of_calls, key = shared_calls.calls(data, two_passes=setup.two_passes), (setup.spec, setup.two_passes)
    layouts = backward_layouts(data.q, of_calls, key=key)
    assert layouts is backward_layouts(data.q, of_calls, key=key)
    of_tokens = {x.dk and x.dk.place for x in layouts.calls[-2:]} - {None}
    return len({x.dq.place for x in layouts.calls}), len(of_tokens), layouts.tile_m


PACKED = (300, 1, 0, 513, 64, 129)


@pytest.mark.xdist_group("sm_90")
@pytest.mark.parametrize(
    "setup,expected",
    [
        (Setup(), (1, 1, 64)),
        (Setup(block_size=128), (1, 1, 64)),
        (Setup(D=64), (1, 1, 128)),
        (Setup(two_passes=True), (1, 1, 64)),
        (Setup(two_passes=True, D=64), (1, 1, 128)),
        (Setup(two_passes=True, block_size=128, deterministic=True), (1, 1, 64)),
        (Setup(two_passes=True, lengths=PACKED), (1, 1, 64)),
        (Setup(lengths=PACKED), (1, 1, 64)),
        (Setup(D=64, lengths=PACKED), (1, 1, 128)),
        (Setup(deterministic=True), (1, 1, 64)),
        (Setup(heads=(4, 4)), (1, 0, 64)),
        # The compressed branch's kernel has tiles of 80 queries, with registers the other way round.
        (Setup(causal=False), (2, 1, 320)),
        (Setup(T=40), (1, 1, 64)),
    ],
    ids=str,
)
def test_branches_share_accumulators_on_hopper(hopper: Worker, setup: Setup, expected: tuple[int, ...]) -> None:
    assert hopper.run(agreement, asdict(setup)) == expected


@pytest.mark.xdist_group("sm_100")
def test_blackwell_shares_where_kernels_pair_ctas_alike(blackwell: Worker) -> None:
    assert blackwell.run(agreement, asdict(Setup(D=64))) == (1, 1, 128)
    assert blackwell.run(agreement, asdict(Setup())) == (2, 1, 128)
    assert blackwell.run(agreement, asdict(Setup(lengths=PACKED))) == (2, 2, 128)


def compile_together(options: dict) -> list[tuple[int, ...]]:
    """Compile all of it; in a worker."""
    from nsa_layer.cute.grad_accum import backward_layouts

    setup = Setup(**options)
    data = fake_data(setup)
    of_calls = shared_calls.calls(data, two_passes=setup.two_passes)
    layouts = backward_layouts(data.q, of_calls, key=(setup.spec, setup.two_passes))
    rows = [tuple(torch.empty(x.row_shape, device="cuda") for _ in range(2)) for x in layouts.calls]
    return [tuple(x.shape) for x in shared_calls.together(data, rows).values()]


@pytest.mark.sweep
@pytest.mark.xdist_group("sm_100")
@pytest.mark.parametrize("setup", [Setup(), Setup(D=64, lengths=PACKED)], ids=str)
def test_it_compiles_for_blackwell(blackwell: Worker, setup: Setup) -> None:
    assert len(blackwell.run(compile_together, asdict(setup))) == len(shared_calls.NAMES)


@pytest.mark.sweep
@pytest.mark.xdist_group("sm_90")
@pytest.mark.parametrize(
    "setup",
    [
        Setup(causal=False),
        Setup(D=64, lengths=PACKED, block_size=256),
        Setup(two_passes=True),
        Setup(two_passes=True, causal=False, lengths=PACKED),
    ],
    ids=str,
)
def test_it_compiles_for_hopper(hopper: Worker, setup: Setup) -> None:
    assert len(hopper.run(compile_together, asdict(setup))) == len(shared_calls.NAMES)


ON_A_GPU = [
    Setup(),
    Setup(block_size=128),
    Setup(D=64, T=777),
    Setup(lengths=PACKED),
    Setup(D=64, lengths=PACKED),
    Setup(lengths=(700, 333), block_size=256),
    Setup(deterministic=True),
    Setup(deterministic=True, lengths=PACKED),
    Setup(causal=False, T=600),
    Setup(causal=False, lengths=PACKED),
    Setup(heads=(4, 4)),
    Setup(D=64, heads=(4, 4), lengths=PACKED),
    Setup(T=40),
    Setup(T=1),
    Setup(heads=(8, 1), T=1500, dtype=torch.float16),
    Setup(two_passes=True),
    Setup(two_passes=True, D=64, T=777),
    Setup(two_passes=True, lengths=PACKED),
    Setup(two_passes=True, D=64, lengths=PACKED, deterministic=True),
    Setup(two_passes=True, block_size=128, deterministic=True),
    Setup(two_passes=True, block_size=256, lengths=(700, 333), deterministic=True),
    Setup(two_passes=True, causal=False, T=600),
    Setup(two_passes=True, causal=False, lengths=PACKED),
    Setup(two_passes=True, heads=(4, 4)),
    Setup(two_passes=True, T=1),
]


@pytest.mark.gpu
@pytest.mark.parametrize("setup", ON_A_GPU, ids=str)
def test_gradients_are_no_worse_than_separate_calls(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    data = shared_calls.make(setup)
    true, alone = shared_calls.exact(data), shared_calls.apart(data)
    empty = torch.empty
    with monkeypatch.context() as patch:
        # Memory that nobody has written holds NaN.
        patch.setattr(torch, "empty", lambda *args, **more: _poisoned(empty(*args, **more)))
        got = shared_calls.together(data)
    mine, separate = shared_calls.errors(got, true), shared_calls.errors(alone, true)
    for name, error in mine.items():
        assert error <= 1.2 * separate[name] + 2e-3, f"{name} of {setup}: {mine}, by separate calls {separate}"
    if setup.deterministic:
        again = shared_calls.together(data)
        assert all(x is None or torch.equal(x, again[name]) for name, x in got.items()), setup


def _poisoned(x: torch.Tensor) -> torch.Tensor:
    return x.fill_(torch.nan) if x.is_cuda and x.is_floating_point() else x
