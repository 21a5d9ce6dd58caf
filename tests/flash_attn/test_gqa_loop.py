"""SM90 backward under a window: how many query heads a CTA loops, and that the numbers hold."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import pytest
from fa_cases import Case, backward, compile_case, forward, make_inputs
from fa_compile import Worker, built_kernels
from fa_reference import assert_bits_repeat, assert_case

from flash_attn.cute.bwd_sm90 import two_pass

# A case on one multiprocessor, and how many heads a CTA loops.
CASES = [
    (Case(D=128, T_q=1000, T_k=1000, Hq=8, window=(511, 0)), 4),
    (Case(D=128, T_q=1000, T_k=1000, Hq=8, window=(511, 0), deterministic=True), 4),
    (Case(D=128, T_q=777, T_k=777, Hq=4, window=(76, 0)), 2),
    (Case(D=64, T_q=500, T_k=1200, Hq=8, window=(299, 0), deterministic=True), 4),
    (Case(D=128, T_q=1200, T_k=500, Hq=6, window=(299, 0)), 3),
    (Case(D=128, T_q=1000, T_k=1000, Hq=8, window=(100, 0), mask_mod="thirds"), 4),
    (Case(D=128, packed=((0, 0), (300, 300), (1, 1), (700, 650)), Hq=8, window=(200, 0)), 4),
    (Case(D=128, packed=((300, 300), (90, 0), (700, 650)), Hq=8, window=(200, 0), deterministic=True), 4),
    (Case(D=256, T_q=600, T_k=600, Hq=4, window=(200, 0)), 2),
    (Case(D=128, T_q=600, T_k=600, Hq=2, window=(200, 0)), 1),
    (Case(D=128, T_q=600, T_k=600, Hq=8, causal=True), 1),
    (Case(D=128, T_q=600, T_k=600, Hq=8, causal=True, lists="both"), 1),
]


@contextmanager
def one_multiprocessor() -> Iterator[None]:
    """A GPU on which nothing is gained by many CTAs, however short the sequences."""
    rule = two_pass.window_heads_per_cta
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(two_pass, "window_heads_per_cta", lambda *args, **named: rule(*args, **named | {"sms": 1}))
        yield


def compiled_heads(case: Case) -> int:
    """The number of heads that a CTA of the backward kernel loops; in a worker."""
    with one_multiprocessor(), built_kernels("FlashAttentionBackwardSm90") as kernels:
        compile_case(case)
    return kernels[0].heads_per_cta


@pytest.mark.parametrize("case,heads", CASES, ids=str)
def test_what_is_compiled(case: Case, heads: int, compiler_sm90: Worker) -> None:
    assert compiler_sm90.trace(compiled_heads, case) == heads


@pytest.mark.parametrize(
    "tokens,window,heads,expected",
    [
        (65536, (511, 0), (32, 8), 4),
        (65536, (511, 0), (64, 4), 16),
        (65536, (2047, 0), (32, 8), 4),
        (65536, (511, 0), (8, 8), 1),
        # Half of the multiprocessors would have nothing to do.
        (1024, (511, 0), (32, 8), 2),
        (128, (511, 0), (32, 8), 1),
        # Nothing to save in a long loop, ...
        (65536, (32767, 0), (32, 8), 1),
        (65536, (511, None), (32, 8), 1),
        # ... unless the sequence is short.
        (1024, (511, None), (32, 8), 2),
    ],
)
def test_how_many_heads(
    tokens: int, window: tuple[int | None, int | None], heads: tuple[int, int], expected: int
) -> None:
    shape = dict(batch=1, heads=heads, tile=(64, 128), sms=132)
    assert two_pass.window_heads_per_cta(window, (tokens, tokens), **shape) == expected


def test_heads_divide_the_group_and_never_take_longer() -> None:
    for tokens, (Hq, Hkv), left in product((1, 300, 4000, 50000), ((1, 1), (6, 2), (12, 1), (64, 4)), (0, 511, 4095)):
        shape = dict(batch=2, heads=(Hq, Hkv), tile=(64, 128), sms=132)
        n = two_pass.window_heads_per_cta((left, 0), (tokens, tokens), **shape)
        walks, tiles = -(-tokens // 128) * Hq * 2, -(-min(tokens, left + 128) // 64)
        assert Hq // Hkv % n == 0
        assert two_pass.window_time(walks // n, n * tiles, 132) <= two_pass.window_time(walks, tiles, 132)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case, heads in CASES if heads > 1], ids=str)
def test_numbers(case: Case) -> None:
    with one_multiprocessor():
        assert_case(case)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [2, 4])
def test_bits_repeat(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_pass, "window_heads_per_cta", lambda *_, **__: heads)
    for case in [case for case, _ in CASES if case.deterministic][::2]:
        assert_bits_repeat(case, 30)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case, _ in CASES if case.deterministic][::2], ids=str)
def test_a_part_of_the_heads_adds_to_the_same_gradients(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two CTAs to a key tile dk and dv take their turns, and come out as with one."""
    x = make_inputs(case)
    o, lse = forward(case, x)
    with one_multiprocessor():
        whole = backward(case, x, o, lse)
    monkeypatch.setattr(two_pass, "window_heads_per_cta", lambda *_, **__: 2)
    for one, two in zip(whole, backward(case, x, o, lse), strict=True):
        assert (one - two).abs().max() <= 2**-6 * one.abs().max()
