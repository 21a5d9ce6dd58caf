"""`NSAConfig` refuses at once what does not fit, and says what it is."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, asdict

import pytest
import torch

from nsa_layer import NSAConfig, nsa
from nsa_layer.config import LARGEST

NAN = float("nan")


@pytest.mark.parametrize("field", ["block_size", "block_counts", "q_tile", "window_size", "compress_offset"])
@pytest.mark.parametrize("value", [2**31, 10**30, -(10**30)])
def test_integers_beyond_int32(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{field} must be at (most 2147483647|least .*), got {value}"):
        NSAConfig(**{field: value})


@pytest.mark.parametrize("backend", ["eager", "reference"])
@pytest.mark.parametrize("field", ["block_counts", "window_size", "compress_offset"])
def test_the_largest_integers_are_no_limit(field: str, backend: str) -> None:
    q, few = torch.randn(1, 40, 2, 8), dict(block_size=4, q_tile=4, block_counts=2, window_size=4)
    largest, all_of_it = (nsa(q, q, q, config=NSAConfig(**few | {field: n}), backend=backend) for n in (LARGEST, 40))
    torch.testing.assert_close(largest, all_of_it)


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("block_size", NAN, TypeError, "block_size must be an int, got nan"),
        ("block_size", 64.0, TypeError, "block_size must be an int, got 64.0"),
        ("block_size", True, TypeError, "block_size must be an int, got True"),
        ("block_size", None, TypeError, "block_size must be an int, got None"),
        ("block_size", 0, ValueError, "block_size must be at least 1, got 0"),
        ("block_size", -64, ValueError, "block_size must be at least 1, got -64"),
        ("block_stride", NAN, TypeError, "block_stride must be an int, got nan"),
        ("block_stride", 0, ValueError, "block_stride must be at least 1, got 0"),
        ("block_stride", 48, ValueError, "block_stride must divide block_size, got block_stride=48, block_size=64"),
        ("block_stride", 128, ValueError, "block_stride must divide block_size"),
        ("block_counts", NAN, TypeError, "block_counts must be an int, got nan"),
        ("block_counts", 0, ValueError, "block_counts must be at least 1, got 0"),
        ("q_tile", NAN, TypeError, "q_tile must be an int, got nan"),
        ("q_tile", 0, ValueError, "q_tile must be at least 1, got 0"),
        (
            "q_tile",
            96,
            ValueError,
            "q_tile must be a multiple or a divisor of block_size, got q_tile=96, block_size=64",
        ),
        ("window_size", NAN, TypeError, "window_size must be an int, got nan"),
        ("window_size", math.inf, TypeError, "window_size must be an int, got inf"),
        ("window_size", 0, ValueError, "window_size must be at least 1, got 0"),
        ("compress_offset", NAN, TypeError, "compress_offset must be an int, got nan"),
        ("compress_offset", 63.0, TypeError, "compress_offset must be an int, got 63.0"),
        ("force_blocks", NAN, TypeError, "force_blocks must be a bool, got nan"),
        ("deterministic", "yes", TypeError, "deterministic must be a bool, got 'yes'"),
        ("rule", "logit", ValueError, "rule must be one of 'nsa', 'seed', got 'logit'"),
        ("rule", NAN, ValueError, "rule must be one of .*, got nan"),
        ("rule", "seed", ValueError, "rule='seed' needs .* force_blocks=False, got .* True"),
    ],
)
def test_bad_values(field: str, value: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        NSAConfig(**{field: value})
    with pytest.raises(error, match=message):
        NSAConfig().replace(**{field: value})


@pytest.mark.parametrize("changes", [{"block_stride": 32}, {"compress_offset": None}, {"force_blocks": True}], ids=str)
def test_what_the_seeds_rule_fixes(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="rule='seed' needs block_stride=block_size, compress_offset=0 and force_bl"):
        NSAConfig.seed(**changes)


def test_unknown_fields() -> None:
    with pytest.raises(TypeError, match="block_sizes"):
        NSAConfig(block_sizes=64)
    with pytest.raises(ValueError, match="unknown NSAConfig fields: a, block_sizes"):
        NSAConfig.from_dict({"block_sizes": 64, "a": 1, "q_tile": 64})
    dropped = {"tile_query": "before", "importance": "softmax", "per_head": False}
    with pytest.raises(ValueError, match="unknown NSAConfig fields: importance, per_head, tile_query"):
        NSAConfig.from_dict(asdict(NSAConfig()) | dropped)


def test_positions_are_refused() -> None:
    with pytest.raises(TypeError):
        NSAConfig(64)


def test_frozen_hashable_and_round_trip() -> None:
    config = NSAConfig(block_size=32, block_stride=16, compress_offset=-5)
    with pytest.raises(FrozenInstanceError):
        config.block_size = 64
    assert NSAConfig.from_dict(asdict(config)) == config
    assert NSAConfig.from_dict(asdict(NSAConfig.seed())) == NSAConfig.seed()
    assert hash(NSAConfig.from_dict(asdict(config))) == hash(config)
    assert len({NSAConfig(), NSAConfig(block_size=64), config}) == 2


def test_defaults_that_follow_the_block_size() -> None:
    assert (NSAConfig(block_size=32).stride, NSAConfig(block_size=32).offset) == (32, 31)
    assert (NSAConfig(block_stride=16).stride, NSAConfig(compress_offset=0).offset) == (16, 0)


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("stride", [1, 2, 4, 16])
def test_counts(size: int, stride: int) -> None:
    """Lengths in blocks, counted rather than computed."""
    if size % stride:
        return
    config = NSAConfig(block_size=size, block_stride=stride, q_tile=4, block_counts=2)
    for T in range(1, 70):
        assert config.compressed_length(T) == len([s for s in range(0, T, stride) if s + size <= T])
        assert config.num_blocks(T) == len(range(0, T, size))
        assert config.num_tiles(T) == len(range(0, T, 4))
        assert config.list_width(T) <= config.num_blocks(T)
    assert config.list_width(10**6) == max(2, max(1, 4 // size) + 2)
    assert config.replace(force_blocks=False).list_width(10**6) == 2
