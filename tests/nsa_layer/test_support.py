"""The table of (architecture, feature): what it refuses, and which backend it leads to."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from nsa_layer import NSAConfig, support
from nsa_layer.call import OWN_KEYS, KVCache
from nsa_tools.shape import Shape

CUDA = torch.device("cuda", 0)


@pytest.fixture(params=[90, 100])
def arch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(support, "device_arch", lambda index=None: request.param)
    return request.param


TILES = NSAConfig(q_tile=128)


def choose(
    backend: str | None = None,
    device: torch.device = CUDA,
    *,
    rows: int = 16,
    index_dim: int = 0,
    alone: bool = False,
    cached: torch.dtype | None = None,
    weighed: bool = False,
    index_loss: bool = False,
    **changes: object,
) -> str:
    """The backend of a call with `rows` query heads for each list."""
    shape = dict(B=1, T=64, Hq=rows, Hkv=1, D=128, Dv=128, dtype=torch.bfloat16, config=TILES, gate="none")
    shape |= changes
    if alone:
        shape |= dict(lists=(1, 3), config=shape["config"].replace(branches=("selected",)))
    call = Shape(**shape).call()
    if index_dim:
        call = call._replace(q_index=call.q[..., :index_dim], k_index=call.k[..., :index_dim])
    if cached is not None:
        call = call._replace(cache=KVCache(*(x.to(cached) for x in call[1:3]), 0))
    if weighed:
        call = call._replace(compress_k_weight=call.k)
    spec = replace(call.spec, index_loss=index_loss)
    return support.choose_backend(backend, call._replace(spec=spec), device)


def _alone(block_size: int) -> NSAConfig:
    return NSAConfig(block_size=block_size, q_tile=1)


INDEX = NSAConfig(rule="index", branches=("selected",), block_counts=128)
UNSUPPORTED = {
    "dtype float32": dict(dtype=torch.float32),
    "dtype float64": dict(dtype=torch.float64),
    "head dimensions other than multiples of 8 from 16 to 256, Dv <= D": dict(D=264, Dv=128),
    "any other block_size": dict(config=NSAConfig(block_size=48, q_tile=16)),
    "compress_offset 0 with compress_stride 1": dict(config=TILES.replace(compress_stride=1, compress_offset=0)),
    "rule='seed'": dict(config=NSAConfig.seed()),
    "index of other than 16, 32, 64 or 128 dimensions": dict(config=INDEX, index_dim=24),
    "block_size below 16": dict(config=TILES.replace(block_size=8)),
    "block_size 16 with G below 4, 32 with 1": dict(alone=True, config=_alone(16), rows=3),
    "block_counts above 64, of an index above 128": dict(config=TILES.replace(block_counts=65)),
    "G above 128 with q_tile 1, above 32 with others": dict(config=NSAConfig(), rows=129),
    "blocks that more than 64 compressed keys overlap": dict(
        config=NSAConfig(block_size=128, compress_size=2, compress_stride=1)
    ),
}


@pytest.mark.parametrize("backend", [None, "cute"])
@pytest.mark.parametrize("feature", UNSUPPORTED)
def test_what_the_kernels_lack_is_refused_and_named(arch: int, feature: str, backend: str | None) -> None:
    asked = UNSUPPORTED[feature]
    assert choose("eager", **asked) == "eager"
    with pytest.raises(NotImplementedError, match=re.escape(f"sm_{arch}: the kernels do not support {feature}")):
        choose(backend, **asked)


FIXED, MOST = NSAConfig(deterministic=True), NSAConfig(block_counts=64)
MANY = TILES.replace(block_counts=65)
SUPPORTED = {
    **{f"D {D}, {dtype}": dict(D=D, Dv=D, dtype=dtype) for D in (64, 128) for dtype in (torch.float16, torch.bfloat16)},
    **{f"D {D}, Dv {Dv}": dict(D=D, Dv=Dv) for D, Dv in ((16, 16), (24, 16), (96, 96), (128, 64))},
    **{f"D {D}, {Dv}": dict(D=D, Dv=Dv) for D, Dv in ((192, 128), (256, 256), (144, 136))},
    **{f"tiles of {q_tile}": dict(config=NSAConfig(q_tile=q_tile)) for q_tile in (1, 2, 64)},
    "the paper's": dict(config=NSAConfig.paper()),
    "lists for each token": dict(config=NSAConfig(), lists=(1, 3)),
    **{f"an index of {Di}": dict(config=INDEX, index_dim=Di, rows=200) for Di in (16, 32, 64, 128)},
    "caches of an index": dict(config=INDEX, cached=torch.bfloat16, index_dim=32),
    "caches in float8_e4m3fn": dict(config=NSAConfig(), cached=torch.float8_e4m3fn),
    "an index of all branches, and its loss": dict(config=NSAConfig(rule="index"), index_loss=True),
    "two branches": dict(config=NSAConfig(branches=("compressed", "selected"))),
    "lists alone": dict(config=_alone(192), alone=True),
    "keys of a branch's own": dict(own_keys=OWN_KEYS),
    "deterministic forward": dict(config=TILES.replace(deterministic=True), backward=False),
    **{f"deterministic, {q_tile}": dict(config=FIXED.replace(q_tile=q_tile)) for q_tile in (1, 64, 128)},
    "deterministic lists alone": dict(config=FIXED, alone=True),
    # At the edge of each limit; a list of the caller's has none of them.
    "64 blocks of tiles": dict(config=TILES.replace(block_counts=64), rows=32),
    "64 blocks of tokens": dict(config=MOST, rows=128),
    "short keys": dict(config=NSAConfig(compress_size=2), rows=1),
    "given lists": dict(config=MANY, rows=33, lists=(1, 3)),
    "small blocks": dict(config=NSAConfig(block_size=16, q_tile=128), rows=4),
}


@pytest.mark.parametrize("asked", SUPPORTED.values(), ids=SUPPORTED)
def test_the_kernels_are_the_default_on_their_gpus(arch: int, asked: dict) -> None:
    assert choose(**asked) == choose("cute", **asked) == "cute"


@pytest.mark.parametrize("dims", [(8, 8), (16, 8), (20, 16), (64, 72), (264, 64)])
def test_other_head_dimensions_are_refused(arch: int, dims: tuple[int, int]) -> None:
    with pytest.raises(NotImplementedError, match="head dimensions other than multiples of 8 from 16 to 256, Dv <= D"):
        choose(D=dims[0], Dv=dims[1])


def test_one_head_more_is_refused(arch: int) -> None:
    """Than the kernels of selection take, or one less than small blocks need."""
    tiles, sizes = TILES.replace(block_counts=64), ((16, 3), (32, 1))
    small = [(NSAConfig(block_size=size, q_tile=q_tile), rows) for size, rows in sizes for q_tile in (1, 128)]
    for config, rows in ((tiles, 33), (MOST, 129), *small):
        with pytest.raises(NotImplementedError, match="backend='eager' does"):
            choose(config=config, rows=rows)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 192, 256])
def test_tiles_read_unions_where_blocks_are_no_whole_key_tiles(arch: int, block_size: int) -> None:
    for q_tile, lists in ((1, False), (16, False), (64, False), (64, True)):
        if not (q_tile % block_size and block_size % q_tile):
            assert support.reads_unions(NSAConfig(block_size=block_size, q_tile=q_tile), 128, listed=lists)
    if block_size == 192:
        config = NSAConfig(block_size=192, q_tile=64)
        assert support.reads_unions(config, 128, listed=False)
        return
    config = NSAConfig(block_size=block_size, q_tile=128)
    assert support.reads_unions(config, 128, listed=False) == (arch == 100 or block_size < 64)
    assert support.reads_unions(config, 192, listed=False)


@pytest.mark.parametrize("other", [80, 89, 120])
def test_gpus_without_kernels(other: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "device_arch", lambda index=None: other)
    assert choose() == "eager"
    with pytest.raises(NotImplementedError, match=f"sm_{other}: the kernels do not support"):
        choose("cute")


def test_tensors_that_are_not_on_a_gpu() -> None:
    assert choose(None, torch.device("cpu")) == "eager"
    with pytest.raises(ValueError, match="backend='cute' needs tensors on a GPU, got cpu"):
        choose("cute", torch.device("cpu"))


def test_table_agrees_with_what_is_refused() -> None:
    assert {*support.LACKING} == set(UNSUPPORTED)


@pytest.mark.parametrize("text,expected", [("sm_90", 90), ("90", 90), ("SM_100a", 100), ("sm90a", 90)])
def test_the_environment_overrides_the_architecture(text: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ATTENTION_ARCH", text)
    assert support.device_arch() == expected
    monkeypatch.setenv("FLASH_ATTENTION_ARCH", "hopper")
    with pytest.raises(ValueError, match="FLASH_ATTENTION_ARCH must look like sm_90, got 'hopper'"):
        support.device_arch()


def test_every_gpu_is_asked_for_its_own_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    support._device_arch.cache_clear()
    monkeypatch.delenv("FLASH_ATTENTION_ARCH", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: [(9, 0), (10, 0), (8, 6)][index])
    assert [support.device_arch(index) for index in (0, 1, 2, None)] == [90, 100, 86, 100]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert support.device_arch() == 86
    monkeypatch.setenv("FLASH_ATTENTION_ARCH", "sm_90")
    assert [support.device_arch(index) for index in (0, 1, None)] == [90] * 3
    support._device_arch.cache_clear()
