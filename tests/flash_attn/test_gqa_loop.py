"""SM90 backward whose CTAs loop over several query heads: under a window, and over block lists."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import pytest
import torch
from fa_compile import Worker, compile_backward, in_order, kernel_fields, only_hosts
from fa_dq import LISTED
from fa_reference import assert_bits_repeat, assert_case
from test_two_passes import PLANNED, RAGGED, tables

from flash_attn.cute.bwd_sm90 import two_pass
from fuzz.attention import backward, compile_case, forward, make_inputs
from fuzz.case import Attention as Case

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


def compile_alone(case: Case) -> None:
    with one_multiprocessor():
        compile_case(case)


@pytest.mark.parametrize("case,heads", CASES, ids=str)
def test_what_is_compiled(case: Case, heads: int, compiler_sm90: Worker) -> None:
    kind = "FlashAttentionBackwardSm90"
    assert compiler_sm90.trace(kernel_fields, "heads_per_cta", compile_alone, case, kind=kind) == [(heads,)]


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
def test_heads_a_cta(tokens: int, window: tuple[int | None, int | None], heads: tuple[int, int], expected: int) -> None:
    shape = dict(batch=1, heads=heads, tile=(64, 128), sms=132)
    assert two_pass.window_heads_per_cta(window, (tokens, tokens), **shape) == expected


def test_heads_divide_the_group_and_never_take_longer() -> None:
    for tokens, (Hq, Hkv), left in product((1, 300, 4000, 50000), ((1, 1), (6, 2), (12, 1), (64, 4)), (0, 511, 4095)):
        shape = dict(batch=2, heads=(Hq, Hkv), tile=(64, 128), sms=132)
        n = two_pass.window_heads_per_cta((left, 0), (tokens, tokens), **shape)
        loops, tiles = -(-tokens // 128) * Hq * 2, -(-min(tokens, left + 128) // 64)
        assert Hq // Hkv % n == 0
        assert two_pass.window_time(loops // n, n * tiles, 132) <= two_pass.window_time(loops, tiles, 132)


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
    """With two CTAs to a key tile dk and dv are added in order, and come out as with one."""
    x = make_inputs(case)
    o, lse = forward(case, x)
    with one_multiprocessor():
        whole = backward(case, x, o, lse)
    monkeypatch.setattr(two_pass, "window_heads_per_cta", lambda *_, **__: 2)
    for one, two in zip(whole, backward(case, x, o, lse), strict=True):
        assert (one - two).abs().max() <= 2**-6 * one.abs().max()


# A CTA for each head: heads with lists of their own, a plan for each head, nobody to share with.
ALONE = [
    Case(D=128, list_heads=4, **LISTED),
    Case(D=128, plan=2, **LISTED),
    Case(D=128, Hkv=4, **LISTED),
    Case(D=128, Hkv=4, plan=2, per_group=True, **LISTED),
]


def compile_groups(case: Case, deterministic: bool) -> None:
    """Calls without a plan loop groups where they can."""
    with pytest.MonkeyPatch.context() as patch, only_hosts():
        patch.setattr(two_pass, "LOOPS_OVER_GROUP", True)
        compile_backward(case, without_dq=True, deterministic=deterministic)


@pytest.mark.parametrize(
    ("case", "deterministic"),
    in_order([replace(PLANNED[1], plan=0, per_group=False), RAGGED, PLANNED[3], PLANNED[0], *ALONE], True, False),
    ids=str,
)
def test_what_is_compiled_over_lists(case: Case, deterministic: bool, compiler_sm90: Worker) -> None:
    """Heads of a CTA, whether it stores dk and dv, and whether it adds them in order."""
    group = case.Hq // case.Hkv
    stores = group == 1 or case not in ALONE and not case.plan
    expected = (1 if case in ALONE else group, stores, deterministic and not stores)
    names, kind = "heads_per_cta stores_dkv adds_in_order", "FlashAttentionBackwardSm90"
    call = (compile_groups, case, deterministic)
    assert compiler_sm90.trace(kernel_fields, names, *call, kind=kind, traced=True) == [expected]


@pytest.mark.parametrize(
    ("widths", "tokens", "heads", "expected"),
    [
        ((16, 50), 65536, (32, 8, 8), True),
        ((16, 50), 65536, (32, 8, 1), True),
        ((16, 50), 65536, (32, 8, 32), False),  # query heads have lists of their own
        ((16, 50), 65536, (8, 8, 8), False),
        ((16, 512), 65536, (32, 8, 8), False),  # all queries list one block
        ((16, 50), 8192, (32, 8, 8), False),  # one such list is as much as a multiprocessor gets to do
        ((16, 100), 65536, (64, 4, 4), False),  # sixteen heads make it long
    ],
)
def test_groups_are_looped_over_where_no_list_is_long(
    widths: tuple[int, int], tokens: int, heads: tuple[int, int, int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASH_ATTENTION_NUM_SMS", "132")
    Hq, Hkv, of_lists = heads
    q, v = (torch.empty(1, tokens, H, 128, dtype=torch.bfloat16, device="meta") for H in (Hq, Hkv))
    forward, backward = (tables(capacity=(width,), rows=(1, of_lists, tokens // 128)) for width in widths)
    assert two_pass.loops_over_group(forward, backward, q, v) is expected
    call = dict(arch=90, q=q, v=v, deterministic=False)
    # Else one pass is faster.
    assert two_pass.use_split_dq(None, forward=forward, backward=backward, **call) is expected
    wide = tables(capacity=(widths[0], 17), rows=(1, of_lists, tokens // 128))
    assert not two_pass.use_split_dq(None, forward=wide, backward=backward, **call)  # it has less to wait for
    planned = backward._replace(plan=torch.empty(1, 6, device="meta"))
    assert not two_pass.use_split_dq(None, forward=forward, backward=planned, **call)
    ragged = backward._replace(mask_block_idx=torch.empty(1, dtype=torch.int32, device="meta"))
    for sides in ((forward, planned), (None, backward), (forward, ragged)):
        assert not two_pass.loops_over_group(*sides, q, v)
