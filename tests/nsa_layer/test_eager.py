"""The eager backend against the reference, its memory, and its bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from fuzz import query_shards
from nsa_layer import NSAConfig
from nsa_layer.call import Aux, Call
from nsa_layer.eager import chunk_attention, list_attention, select_blocks
from nsa_tools.measure.peak_memory import peak_bytes
from nsa_tools.testing.assertions import assert_close_to_reference
from nsa_tools.testing.cases import OWN_KEYS, Case, make_inputs, run

SMALL = NSAConfig(block_size=16, block_counts=4, q_tile=64, window_size=40)
TOKENS = NSAConfig(block_size=8, block_counts=4, q_tile=1, window_size=8)
OVERLAP = TOKENS.replace(compress_size=4, compress_stride=2)  # the sizes of `NSAConfig.paper` over 8
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
TINY = NSAConfig(block_size=1, block_counts=1, q_tile=8, window_size=19)
# Gradients and scores of few numbers, of which the straight implementation's error says little; found by fuzzing.
FEW = Case(B=2, T=83, Hq=12, Hkv=3, D=3, Dv=4, config=TINY, causal=False, compress_weights=True)
FEW_NUMBERS = [
    replace(FEW, config=TINY.replace(compress_offset=-6), seed=428),
    Case(B=3, T=1, D=2, dtype=torch.float16, config=TINY.replace(block_counts=6), causal=False, compress_weights=True,
         seed=2),
    Case(T=4, Hq=3, Hkv=1, D=5, dtype=torch.float16, config=NSAConfig(block_size=4, q_tile=16, window_size=33),
         gate="cmp", compress_weights=True, seed=759),
]  # fmt: skip


def cases() -> Iterator[Case]:
    """Sizes beyond those of the fuzzer's property, whose the options are."""
    for n, T in enumerate((63, 64, 65, 127, 300, 700)):
        yield Case(T=T, Hq=4, Hkv=2, D=32, dtype=DTYPES[n % 3], compress_weights=True)
    for dtype, config in zip(DTYPES, (SMALL, OVERLAP, TOKENS, SMALL)):
        yield Case(T=127, Hq=32, Hkv=2, D=16, dtype=dtype, config=config, compress_weights=True)
        yield Case(lengths=(129, 0, 1, 70), Hq=8, D=16, dtype=dtype, config=config, own_keys=OWN_KEYS, gate="given")
    yield Case(T=129, Hq=6, config=NSAConfig.paper(block_counts=2), compress_weights=True)
    yield Case(T=40, gate="given")  # in fp32: what is saved is an argument
    yield Case(T=600, config=NSAConfig.seed(block_size=32, block_counts=4, window_size=64))
    yield from FEW_NUMBERS


@pytest.mark.parametrize("case", list(cases()), ids=repr)
def test_close_to_reference(case: Case) -> None:
    assert_close_to_reference(case, "eager")


@pytest.mark.parametrize("name", ["compress_k_weight", "q", "v"])
def test_a_small_error_shows_in_few_numbers(name: str) -> None:
    """A gradient that is too large by a part of 20,000."""

    def wrong(call: Call) -> tuple[torch.Tensor, Aux]:
        leaf = getattr(call, name).view_as(getattr(call, name))
        leaf.register_hook(lambda grad: grad * (1 + 5e-5))
        return query_shards.attend(call._replace(**{name: leaf}), backend="eager")

    with pytest.raises(AssertionError, match=f"d{name}"):
        assert_close_to_reference(FEW_NUMBERS[0], wrong)


def shrink_chunks(patch: pytest.MonkeyPatch, attention: int, scores: int, pairs: int) -> None:
    """Eager computes at most so many numbers at once."""
    patch.setattr(chunk_attention, "CPU_CHUNK", attention)
    patch.setattr(select_blocks, "CPU_SCORE_BUDGET", scores)
    patch.setattr(list_attention, "CPU_PAIRS", pairs)


CHUNKED = Case(B=2, T=70, dtype=torch.float64, config=SMALL, compress_weights=True)
OF_INDEX = dict(config=TOKENS.replace(rule="index"), index_dim=16, lengths=(40, 0, 1, 129))


@pytest.mark.parametrize("changes", [{}, dict(causal=False), dict(config=OVERLAP), OF_INDEX], ids=str)
def test_chunks_of_one_query(monkeypatch: pytest.MonkeyPatch, changes: dict) -> None:
    """A budget that nothing fits still gives the same operator."""
    shrink_chunks(monkeypatch, 1, 1, 1)
    monkeypatch.setattr(list_attention, "TILE", 3)
    assert_close_to_reference(replace(CHUNKED, **changes), "eager")


@pytest.mark.parametrize(("q_tile", "share"), [(64, 16), (1, 3)])
@pytest.mark.parametrize("packed", [False, True])
def test_memory_is_linear(monkeypatch: pytest.MonkeyPatch, packed: bool, q_tile: int, share: int) -> None:
    """Far from one score for each pair of tokens, in any branch; packed, there are more sequences, not longer ones."""
    shrink_chunks(monkeypatch, 1 << 12, 1 << 12, 1 << 7)  # small against T, so that what grows is seen
    peaks = []
    for T in (512, 2048):
        lengths = (64,) * (T // 64) if packed else None
        config = SMALL.replace(q_tile=q_tile)
        inputs = make_inputs(Case(T=T, Hq=2, Hkv=1, D=4, lengths=lengths, config=config, compress_weights=True))
        peaks.append(peak_bytes(lambda: run("eager", inputs), "cpu"))
    assert peaks[1] <= 4.1 * peaks[0] and peaks[1] < 2048 * 2048 * 4 // share


@pytest.mark.gpu
@pytest.mark.parametrize("config", [NSAConfig, NSAConfig.seed, NSAConfig.paper])
def test_same_bits_twice(config: Callable[..., NSAConfig]) -> None:
    case = Case(B=2, T=3000, Hq=8, D=64, dtype=torch.bfloat16, config=config(deterministic=True))
    inputs = make_inputs(case, "cuda")
    first, second = (run("eager", inputs) for _ in range(2))
    assert first.aux.block_indices.equal(second.aux.block_indices)
    for name, x in first.tensors().items():
        assert torch.equal(x, second.tensors()[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [1, 65, 1000, 4096, 8193])
def test_on_a_gpu(dtype: torch.dtype, T: int) -> None:
    case = Case(T=T, Hq=2, Hkv=1, D=64, dtype=dtype, compress_weights=True)
    configs = [NSAConfig(), NSAConfig.paper()] if T < 8193 else [NSAConfig()]
    if T == 1000:
        configs += [NSAConfig.seed(), NSAConfig(compress_stride=16), NSAConfig(q_tile=32)]
        assert_close_to_reference(replace(case, causal=False, Hq=8, B=2), "eager", "cuda")
        for config in configs[:2]:
            assert_close_to_reference(replace(case, lengths=(300, 0, 1, 699), Hq=8, config=config), "eager", "cuda")
    for config in configs:
        assert_close_to_reference(replace(case, config=config), "eager", "cuda")
