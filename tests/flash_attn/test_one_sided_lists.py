"""Lists in one direction: a mask has to stand for the other one, which then runs dense under it."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fa_catalogue import PACK
from fa_compile import in_order
from test_list_validation import BLOCK, PACKED, packed_call, qk, refusal
from torch._subclasses.fake_tensor import unset_fake_temporarily

from flash_attn.cute import flash_attn_func, flash_attn_varlen_func
from flash_attn.cute.block_lists import lists_from_blocks
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.lists.validate_calls import validate_call
from fuzz.attention import Inputs, attended, make_inputs
from fuzz.attention_lists import block, blocks, lists_of, on_gpu
from fuzz.blocks import tiles_of
from fuzz.case import Attention as Case
from fuzz.oracle import assert_right, visible

FIXED = dict(T_q=700, T_k=900)
CASES = [
    Case(D=128, mask_mod="halves", **FIXED),
    Case(D=64, causal=True, Hkv=4, deterministic=True, **FIXED),
    Case(D=128, window=(200, 50), Hkv=1, **FIXED),
    Case(D=128, mask_mod="halves", form="stacked", packed=PACK),
    Case(D=64, causal=True, form="compact", Hkv=4, packed=PACK),
    Case(D=128, window=(200, 0), form="ragged", deterministic=True, packed=PACK),
]
# Deterministic backward in one pass wants an order with its lists.
EACH = pytest.mark.parametrize(("case", "side"), in_order(CASES, "backward", "forward"), ids=str)


def lists_of_the_mask(case: Case, x: Inputs, side: str) -> Any:
    """Lists of the blocks in which the case's mask lets something through; full where it lets everything through."""
    found = []
    with unset_fake_temporarily():
        for batch, shape in enumerate(zip(blocks(case, 0), blocks(case, 1))):
            seen = visible(case, batch, x, torch.device("cpu"))[0]
            some, whole = tiles_of(seen, block(case)) if min(shape) else torch.zeros(2, *shape).bool()
            found.append((some[None], whole[None]))
        lists = lists_of(replace(case, lists="both"), found, side == "backward")
    return on_gpu(lists)


@pytest.mark.gpu
@EACH
def test_gradients(case: Case, side: str) -> None:
    x = make_inputs(case)
    argument = "block_sparse_tensors" if side == "forward" else "block_sparse_tensors_bwd"
    assert_right(case, x, attended(case, x, **{argument: lists_of_the_mask(case, x, side)}), floor=1e-6)


WINDOWS = [(None, 0), (200, 0), (130, 50), (None, 70), (90, None), (-20, 150), (5, -9)]


def seen_blocks(T_q: int, T_k: int, window: tuple[int | None, int | None]) -> torch.Tensor:
    """The key blocks that a query block sees something of, bool [M, N]: by a look at every pair."""
    at, key = torch.arange(T_q)[:, None] + T_k - T_q, torch.arange(T_k)[None]
    left, right = (T_q + T_k if side is None else side for side in window)
    seen = (key >= at - left) & (key <= at + right)
    return tiles_of(seen, (BLOCK, BLOCK))[0]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("lengths", [(700, 640), (640, 900), (900, 300)], ids=str)
def test_lists_of_one_direction_name_what_the_mask_shows(
    lengths: tuple[int, int], backward: bool, window: tuple[int | None, int | None]
) -> None:
    """All of it is enough; each block that is left out is found, and none that the mask hides."""
    seen = seen_blocks(*lengths, window)
    seen = seen.T if backward else seen
    q, k = qk(2, lengths[0], keys=lengths[1])

    def check(listed: torch.Tensor) -> None:
        full = torch.zeros_like(listed)
        full[:, 1::2] = listed[:, 1::2]
        lists = lists_from_blocks(listed, full, block_size=(BLOCK, BLOCK))
        sides = (None, lists) if backward else (lists, None)
        validate_call(True, *sides, q, k, window=window)

    check(seen)
    check(torch.ones_like(seen))
    for row, at in seen.nonzero().tolist():
        less = seen.clone()
        less[row, at] = False
        word = "key block" if backward else "query block"
        with pytest.raises(ValueError, match=f"sequence 0: .* lists name .* {word} {row} of head 0"):
            check(less)


@pytest.mark.parametrize("used", [(640, 640), (300, 640)], ids=str)
def test_lists_of_one_direction_for_each_sequence_of_a_batch(used: tuple[int, int]) -> None:
    """Positions count from the ends of the keys in use."""
    seen = [seen_blocks(700, keys, (None, 0)) for keys in used]
    listed = torch.stack([torch.nn.functional.pad(own, (0, 5 - own.shape[1])) for own in seen]).unsqueeze(1)
    call, options = qk(2, 700, keys=640), dict(seqused_k=torch.tensor(used).int(), window=(None, 0))
    validate_call(True, lists_from_blocks(listed, block_size=(BLOCK, BLOCK)), None, *call, **options)
    listed[1, 0, 4, 2] = False
    less = lists_from_blocks(listed, block_size=(BLOCK, BLOCK))
    assert "sequence 1: forward lists name 4 of the key blocks 0 .. 4" in refusal(less, None, *call, **options)


@pytest.mark.parametrize("form", PACKED)
@pytest.mark.parametrize("backward", [False, True])
def test_lists_of_one_direction_in_a_pack(form: str, backward: bool) -> None:
    """Positions count from the ends of each sequence."""
    call, options = packed_call(form)
    lists = [None, None]
    lists[backward] = call[backward]
    validate_call(True, *lists, *call[2:], **options, window=(5, -9))
    with pytest.raises(ValueError, match="sequence 0: (forward|backward) lists name"):
        validate_call(True, *lists, *call[2:], **options, window=(None, 0))


def test_padded_lists_of_one_direction_in_a_pack() -> None:
    """One list for all sequences, with blocks past the end of some."""
    every = lists_from_blocks(torch.ones(5, 4, dtype=torch.bool), block_size=(BLOCK, BLOCK))
    _, options = packed_call("compact")
    tensors = qk(989, keys=1057)
    validate_call(True, every, None, *tensors, **options, window=(None, 0))
    every.mask_block_cnt[0, 0, 2] = 3
    assert "sequence 0: forward lists name 3 of the key blocks 0 .. 3" in refusal(
        every, None, *tensors, **options, window=(None, None)
    )


@pytest.mark.parametrize("attend", ["flash_attn_func", "flash_attn_varlen_func"])
def test_attention_functions_say_what_the_mask_is(attend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_attn.cute import interface

    said = []
    monkeypatch.setattr(interface, "validate_call", lambda *args, window, **more: said.append(window))
    for name in ("FlashAttnFunc", "FlashAttnVarlenFunc"):
        monkeypatch.setattr(interface, name, SimpleNamespace(apply=lambda *args: None))
    q = torch.zeros(1, 512, 2, 64, requires_grad=True)
    lists = lists_from_blocks(torch.ones(4, 4, dtype=torch.bool), block_size=(BLOCK, BLOCK))
    one, both = dict(block_sparse_tensors=lists), dict(block_sparse_tensors=lists, block_sparse_tensors_bwd=lists)
    call = partial(getattr(interface, attend), q, q, q)
    call(**one, causal=True)
    call(**one, window_size=(100, -5))
    call(**one, mask_mod=lambda *args: True, causal=True)
    call(**one, causal=True, compress_factor=4)
    call(**both, causal=True)
    with torch.no_grad():
        call(**one, causal=True)
    assert said == [(None, 0), (100, -5), None, None, None, None]


LISTS = BlockSparseTensorsTorch(torch.ones(1, 1, 4, dtype=torch.int32), torch.zeros(1, 1, 4, 4, dtype=torch.int32))
PUBLIC = pytest.mark.parametrize("attend", [flash_attn_func, flash_attn_varlen_func])


def inputs(wanted: str = "") -> list[torch.Tensor]:
    return [torch.zeros(1, 512, 2, 64).requires_grad_(name == wanted or wanted == "qkv") for name in "qkv"]


@pytest.mark.usefixtures("launched")
@PUBLIC
@pytest.mark.parametrize("wanted", ["k", "v", "learnable_sink"])
def test_any_input_may_want_a_gradient(attend: Any, wanted: str) -> None:
    """Beside what the catalogue of wrong calls has: q wants one there."""
    sink = torch.zeros(2, requires_grad=wanted == "learnable_sink")
    with pytest.raises(ValueError, match="block_sparse_tensors_bwd is None"):
        attend(*inputs(wanted), learnable_sink=sink, block_sparse_tensors=LISTS)


def see_all(*args: Any) -> bool:
    return True


MASKS = [dict(mask_mod=see_all), dict(causal=True), *(dict(window_size=w) for w in [(100, 0), (None, 5), (0, None)])]


@pytest.mark.usefixtures("launched")
@PUBLIC
@pytest.mark.parametrize("given", ["block_sparse_tensors", "block_sparse_tensors_bwd"])
def test_a_mask_stands_for_the_other_direction(attend: Any, given: str) -> None:
    for mask in MASKS:
        assert attend(*inputs("qkv"), **{given: LISTS}, **mask) == "launched"
    for window in ((None, None), (-1, -1)):
        with pytest.raises(ValueError, match="nothing is masked"):
            attend(*inputs("q"), **{given: LISTS}, window_size=window)


@pytest.mark.usefixtures("launched")
@PUBLIC
def test_calls_that_need_no_mask(attend: Any) -> None:
    """Without lists, with both, and without gradients with forward lists alone."""
    one, both = dict(block_sparse_tensors=LISTS), dict(block_sparse_tensors=LISTS, block_sparse_tensors_bwd=LISTS)
    assert attend(*inputs("qkv")) == attend(*inputs("qkv"), **both) == attend(*inputs(), **one) == "launched"
    with torch.no_grad():
        assert attend(*inputs("qkv"), **one) == "launched"
