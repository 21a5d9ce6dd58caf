"""Options of a call that are no tensors: cut, or handed on as they are. Refused ones: `fuzz/wrong_calls`."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fa_compile import Worker

from flash_attn.cute import flash_attn_func, flash_attn_varlen_func, interface
from flash_attn.cute.mma.host import with_plain_strides
from flash_attn.cute.runtime import call_options
from fuzz.attention import forward, make_inputs
from fuzz.attention_lists import backward_lists, forward_lists
from fuzz.case import Attention as Case

EACH = pytest.mark.parametrize("attend", [flash_attn_func, flash_attn_varlen_func])
LISTED = Case(D=128, causal=True, T_q=900, T_k=900, lists="both")
NO_LIMIT = (2**31 - 1, 2**31, 2**40)


def inputs() -> list[torch.Tensor]:
    return [torch.zeros(1, 512, 2, 64) for _ in "qkv"]


# softmax_scale


@EACH
@pytest.mark.parametrize("scale", [None, 1, 3, 0.125, 1e-30])
def test_scales(monkeypatch: pytest.MonkeyPatch, attend: Any, scale: float | None) -> None:
    """An integer is the float: a kernel compiled for an int takes no float afterwards."""
    stand_in = SimpleNamespace(apply=lambda *args: args)
    monkeypatch.setattr(interface, "FlashAttnFunc", stand_in)
    monkeypatch.setattr(interface, "FlashAttnVarlenFunc", stand_in)
    given = attend(*inputs(), softmax_scale=scale)
    found = [type(x) for x in given if type(x) in (int, float) and x == scale]
    assert scale is None or float in found and (scale != 3 or found == [float])


# window_size


@pytest.mark.parametrize("wide", NO_LIMIT)
def test_wide_windows_stay_in_32_bits(wide: int) -> None:
    """With the positions of the longest sequences added or taken away; and they are as wide as any."""
    longest = 1 << 29
    for given in [(wide, 3), (3, wide), (wide, wide), (-wide, 3)]:
        *_, left, right = interface._resolve_causal_local_window(False, *given)
        assert call_options.edges(False, given) == (left, right)
        for side, was in zip((left, right), given, strict=True):
            assert abs(side) + longest < 2**31
            assert side == was or (abs(side) >= longest and (side < 0) == (was < 0))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, -1), (-7, 3), (None, -1), (0, 0), (None, None), (100, None)])
def test_other_windows_are_left_alone(window: tuple[int | None, int | None], causal: bool) -> None:
    """Both sides below 0 are no limit; one of them alone is a place before, or behind, the query's own."""
    *_, left, right = interface._resolve_causal_local_window(causal, *window)
    expected = (None, None) if window == (-1, -1) else window
    if causal:
        expected = expected[0], None if expected[0] is None else 0
    assert (left, right) == expected or (window == (None, -1) and (left, right) == (None, None))


# Strides of one element


def odd(x: torch.Tensor) -> torch.Tensor:
    """The same tensor with a stride of 1 for its dimensions of one element, as some views have it."""
    return x.as_strided(x.shape, [1 if size == 1 else stride for size, stride in zip(x.shape, x.stride())])


def plain_strides() -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shapes and strides that the kernel of dq is launched with for tensors that are `odd`; in a worker."""
    from unittest.mock import patch

    from flash_attn.cute.bwd_dq import interface as bwd_dq_interface

    seen: list[torch.Tensor] = []
    case = Case(D=128, B=1, Hq=1, Hkv=1, T_q=1, T_k=1, lists="full")
    x = make_inputs(case)
    rows = [odd(torch.empty(1, 1, 128, dtype=torch.float32, device=x.q.device)) for _ in range(2)]
    lse = odd(torch.empty(1, 1, 1, dtype=torch.float32, device=x.q.device))
    used = torch.empty(1, dtype=torch.int32, device=x.q.device).as_strided((1,), (3,))
    kernel = lambda *args: seen.extend(t for t in args if isinstance(t, torch.Tensor))  # noqa: E731
    with (
        patch.object(bwd_dq_interface, "_compiled", lambda *args: kernel),
        patch.object(bwd_dq_interface, "is_fake_mode", lambda: False),
    ):
        bwd_dq_interface.backward_dq(
            *map(odd, (x.q, x.k, x.v, x.do)), *rows, forward_lists(case), dq=odd(torch.empty_like(x.q)),
            accum=odd(torch.empty(1, 1, 64 * 128, dtype=torch.float32, device=x.q.device)),
            out=odd(torch.empty_like(x.q)), lse=lse, seqused_k=used,
        )  # fmt: skip
    return [(tuple(t.shape), t.stride()) for t in seen]


def test_strides_of_one_element_may_be_anything(compiler_sm90: Worker) -> None:
    seen = compiler_sm90.trace(plain_strides)
    assert len(seen) == 11  # q, k, v, do, two row sums, o, lse, dq, the accumulator, seqused_k
    for shape, strides in seen:
        contiguous = torch.empty(shape, device="meta").stride()
        assert strides == contiguous


def test_other_strides_are_kept() -> None:
    fused = torch.empty(1, 64, 3, 4, 128)[:, :, 1]
    for x in (fused, torch.empty(2, 64, 1, 128), torch.empty(2, 1, 4, 128).expand(2, 64, 4, 128)):
        assert with_plain_strides(x) is x
    for x in (fused, torch.empty(3, 7, 1)[:, ::2]):
        plain = with_plain_strides(odd(x))
        assert plain.stride() == x.stride() and plain.data_ptr() == x.data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("block_k", [64, 128])
def test_gradients_of_tensors_with_odd_strides(block_k: int) -> None:
    from flash_attn.cute.interface import _flash_attn_bwd

    case = Case(D=128, B=1, Hq=1, Hkv=1, causal=True, T_q=300, T_k=300, lists="both", block=(128, block_k))
    x = make_inputs(case)
    o, lse = forward(case, x)
    lists = dict(block_sparse_tensors=backward_lists(case), block_sparse_tensors_fwd=forward_lists(case))
    tensors = [x.q, x.k, x.v, o, x.do, lse]
    both = (tensors, map(odd, tensors))
    expected, got = (_flash_attn_bwd(*given, causal=True, passes=2, **lists) for given in both)
    assert all(map(torch.equal, expected, got)) and all(t.isfinite().all() for t in got)
