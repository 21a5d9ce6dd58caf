"""Forced and candidate blocks as the kernels that choose number them, in Python's integers, for every place of a token.

What a kernel does with these numbers is tested where it runs.
"""

from __future__ import annotations

from itertools import product
from types import ModuleType, SimpleNamespace

import pytest
from layer_calls import forced_blocks

from nsa_layer import NSAConfig

LENGTHS, SIZE = (7, 50), 8
FORCED = [*product((0, 1, 2, 5), (0, 1, 2, 9))]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The kernels' modules, whose arithmetic is Python's."""
    pytest.importorskip("cutlass")
    from nsa_layer.kernels.decode import topk as decode_topk
    from nsa_layer.kernels.select_by_tile import epilogue, query_tiles
    from nsa_layer.kernels.select_by_token import epilogue as token_epilogue
    from nsa_layer.kernels.select_by_token import tiles

    found = dict(query_tiles=query_tiles, epilogue=epilogue, decode_topk=decode_topk)
    found |= dict(token_epilogue=token_epilogue, tiles=tiles)
    integers = dict(
        cutlass=SimpleNamespace(max=max, min=min, select_=lambda condition, a, b: a if condition else b),
        cute=SimpleNamespace(ceil_div=lambda a, b: -(-a // b)),
        Int32=int,
        const_expr=lambda x: x,
    )
    for module in found.values():
        assert isinstance(module, ModuleType)
        for name, value in integers.items():
            monkeypatch.setattr(module, name, value)
    return SimpleNamespace(**found)


def roles(config: NSAConfig, first: int, last: int, T: int, *, causal: bool) -> tuple[list[int], list[int]]:
    """Blocks that a tile of tokens lists in any case, and complete ones that it may choose beside them."""
    own, blocks = range(first // SIZE, last // SIZE + 1), config.num_blocks(T)
    complete = range((first + 1) // SIZE if causal else T // SIZE)
    forced = forced_blocks(own, blocks, config.replace(block_counts=10**6), causal=causal)
    return forced_blocks(own, blocks, config, causal=causal), [j for j in complete if j not in forced]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("n", [1, 3, 4, 7, 30])
def test_of_tokens(n: int, causal: bool, modules: SimpleNamespace) -> None:
    from nsa_layer.kernels.decode.spec import DecodeSpec
    from nsa_layer.kernels.select_by_token.spec import TokenTopKSpec

    for (init, local), T in product(FORCED, LENGTHS):
        config = NSAConfig(block_size=SIZE, block_counts=n, init_blocks=init, local_blocks=local)
        spec = TokenTopKSpec(64, 4, n, causal, init, local, False, SIZE, SIZE, SIZE, SIZE - 1, False)
        of_decode = DecodeSpec(64, 64, 4, 1, SIZE, SIZE, SIZE - 1, SIZE, n, 8, init, local, True)
        place = modules.tiles.Tile(spec, 0, 0, 0, T, T, 0, 0)
        for t in range(T):
            own, where = t // SIZE, f"{config}, T={T}, t={t}"
            forced, candidates = roles(config, t, t, T, causal=causal)
            if causal and config.chooses_own and own not in candidates:
                candidates.append(own)
            count = place.forced_blocks(own) if spec.forced else 0
            listed = [modules.token_epilogue.forced_block_of_token(spec, i, own, count) for i in range(min(count, n))]
            assert listed == sorted(forced), where
            if len(forced) < n and candidates:
                assert [j for j in range(config.num_blocks(T)) if place.is_candidate(j, t)] == candidates, where
                assert n - len(forced) <= spec.most_wanted, where
                if causal:
                    assert [*range(*modules.decode_topk.candidate_range(of_decode, t))] == candidates, where
                    assert n - len(forced) <= of_decode.most_wanted, where


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("q_tile", [2, 8, 32])
def test_of_tiles(q_tile: int, causal: bool, modules: SimpleNamespace) -> None:
    from nsa_layer.kernels.select_by_tile.spec import TopKSpec

    for (init, local), n, T in product(FORCED, (1, 3, 7, 30), LENGTHS):
        config = NSAConfig(block_size=SIZE, block_counts=n, init_blocks=init, local_blocks=local, q_tile=q_tile)
        spec = TopKSpec(64, 4, 4, causal, init, local, config.forces_too_many, False)
        for tile in range(config.num_tiles(T)):
            t0, place, where = tile * q_tile, (T, 0, SIZE, q_tile, n), f"{config}, T={T}, tile={tile}"
            forced, candidates = roles(config, t0, min(t0 + q_tile, T) - 1, T, causal=causal)
            reach = modules.query_tiles.local_range(t0, place, spec)
            count = modules.epilogue.forced_count(*reach, place, spec) if init or local or causal else 0
            if spec.crowded:
                count = min(count, n)
            own = causal and config.chooses_own
            if own:  # behind all complete blocks, while the list has capacity
                begun = range(t0 // SIZE, (min(t0 + q_tile, T) - 1) // SIZE + 1)
                forced = [j for j in begun if j not in candidates][: max(0, n - len(candidates))]
            listed = [modules.epilogue.forced_block_of_tile(i, *reach, place, spec) for i in range(count)]
            assert listed == sorted(forced), where
            wanted = modules.epilogue.num_wanted(tile, place, spec)
            assert own or max(0, wanted) == n - len(forced), where
            end = modules.query_tiles.blocks_end(t0, T, SIZE, causal)
            if wanted > 0:
                assert [j for j in range(end) if modules.query_tiles.eligible(j, end, reach, spec)] == candidates, where
