"""`NSAConfig`: its lengths in blocks, its defaults, and round trips. What it refuses: `fuzz/wrong_calls/layer.py`."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, asdict, replace

import pytest
import torch

from nsa_layer import NSAConfig, nsa
from nsa_layer.config import LARGEST, LONGEST_BLOCK


@pytest.mark.parametrize("backend", ["eager", "reference"])
@pytest.mark.parametrize("field", ["block_counts", "window_size", "compress_offset"])
def test_the_largest_integers_are_no_limit(field: str, backend: str) -> None:
    q, few = torch.randn(1, 40, 2, 8), dict(block_size=4, q_tile=4, block_counts=2, window_size=4)
    largest, all_of_it = (nsa(q, q, q, config=NSAConfig(**few | {field: n}), backend=backend) for n in (LARGEST, 40))
    torch.testing.assert_close(largest, all_of_it)


@pytest.mark.parametrize("q_tile", [1, 64])
def test_blocks_longer_than_the_sequence_take_no_more_memory_than_it(q_tile: int) -> None:
    """2**20 tokens of each head in fp64 would be 2 GiB and more."""
    q, k = (torch.randn(1, 40, H, 64, dtype=torch.float64) for H in (4, 2))
    found = []
    for backend, size in (("eager", LONGEST_BLOCK), ("reference", LONGEST_BLOCK), ("eager", 64)):
        config = NSAConfig(block_size=size, compress_size=64 if q_tile == 1 else None, q_tile=q_tile, window_size=4)
        with torch.profiler.profile(profile_memory=True) as profile:
            found.append(nsa(q, k, k, config=config, backend=backend))
        assert max(event.cpu_memory_usage for event in profile.key_averages()) < 1 << 26
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[0], found[2])


def test_frozen_hashable_and_round_trip() -> None:
    config = NSAConfig(block_size=32, compress_size=48, compress_stride=16, compress_offset=-5, q_tile=1)
    with pytest.raises(FrozenInstanceError):
        config.block_size = 64
    assert NSAConfig.from_dict(asdict(config)) == config
    assert NSAConfig.from_dict(asdict(NSAConfig.seed())) == NSAConfig.seed()
    assert hash(NSAConfig.from_dict(asdict(config))) == hash(config)
    assert len({NSAConfig(), NSAConfig(block_size=64), config}) == 2


def test_defaults_that_follow_the_block_size() -> None:
    assert (NSAConfig(block_size=32).stride, NSAConfig(block_size=32).offset) == (32, 31)
    assert (NSAConfig(compress_stride=16).stride, NSAConfig(compress_offset=0).offset) == (16, 0)
    paper = NSAConfig.paper()
    assert (paper.span, paper.stride, paper.offset, paper.block_size, paper.by_token) == (32, 16, 31, 64, True)
    assert (paper.block_counts, paper.window_size, paper.init_blocks, paper.local_blocks) == (16, 512, 1, 2)
    seed = dict(rule="seed", compress_offset=0, q_tile=256, init_blocks=0, local_blocks=0)
    assert asdict(NSAConfig.seed()) == asdict(NSAConfig()) | seed
    assert NSAConfig(compress_size=32, q_tile=1).stride == 32 and not NSAConfig.seed(q_tile=1).by_token


def test_dictionaries_of_before_compression_had_a_size_are_read() -> None:
    old = dict(block_size=32, block_stride=16, block_counts=8, q_tile=64, window_size=128, compress_offset=None)
    old |= dict(force_blocks=True, deterministic=False, rule="nsa")
    config = NSAConfig.from_dict(old)
    assert (config.span, config.stride, config.compress_size) == (32, 16, None)
    assert config == NSAConfig(block_size=32, compress_stride=16, block_counts=8, q_tile=64, window_size=128)
    del old["q_tile"]  # tiles of 128 were the default
    assert NSAConfig.from_dict(old) == config.replace(q_tile=128)
    assert NSAConfig.from_dict(dict(compress_size=None)) == NSAConfig() == NSAConfig(q_tile=1)


@pytest.mark.parametrize("old, sizes", [(True, (1, 2)), (False, (0, 0))])
def test_the_old_field_of_forced_blocks_is_read_from_dictionaries(old: bool, sizes: tuple[int, int]) -> None:
    config = NSAConfig.from_dict(dict(compress_size=None, force_blocks=old))
    assert config == NSAConfig(init_blocks=sizes[0], local_blocks=sizes[1])
    assert config.replace() == replace(config) == pickle.loads(pickle.dumps(config)) == config
    assert "force_blocks" not in asdict(config)
    with pytest.raises(ValueError, match="got it beside local_blocks"):
        NSAConfig.from_dict(dict(force_blocks=old, local_blocks=2))


@pytest.mark.parametrize("size, stride", [(1, 1), (4, 1), (4, 2), (4, 4), (16, 1), (16, 2), (16, 4), (16, 16)])
def test_counts(size: int, stride: int) -> None:
    """Lengths in blocks, counted rather than computed."""
    config = NSAConfig(block_size=size, compress_stride=stride, q_tile=4, block_counts=2)
    apart = config.replace(compress_size=3 * stride, q_tile=1)
    for T in range(1, 70):
        assert config.compressed_length(T) == len([s for s in range(0, T, stride) if s + size <= T])
        assert apart.compressed_length(T) == len([s for s in range(0, T, stride) if s + 3 * stride <= T])
        assert apart.num_tiles(T) == T
        assert config.num_blocks(T) == len(range(0, T, size))
        assert config.num_tiles(T) == len(range(0, T, 4))
        assert config.list_width(T) <= config.num_blocks(T)
    assert config.list_width(10**6) == apart.list_width(10**6) == 2
    assert config.forces_too_many and not config.replace(block_counts=6, local_blocks=0).forces_too_many
