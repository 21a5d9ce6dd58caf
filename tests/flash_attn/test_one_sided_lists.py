"""Lists in one direction and a mask that says the same in the other: the gradient is that of the mask."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import fa_packed_lists
import pytest
import torch
from fa_cases import Case, Inputs, _masks, _tensors, block, in_turn, make_inputs, swept, transposed
from fa_compile import Worker
from fa_reference import assert_close, attention, visible
from test_upstream_programs import Context
from test_validate_calls import BLOCK, PACKED, packed_call, qk, said

from flash_attn.cute.block_lists import lists_from_blocks
from flash_attn.cute.lists.validate_calls import validate_call

FIXED = dict(T_q=700, T_k=900)
PACK = dict(packed=((300, 300), (1, 129), (0, 200), (700, 640), (130, 0), (257, 900)))
CASES = [
    Case(D=128, mask_mod="halves", **FIXED),
    Case(D=64, causal=True, Hkv=4, deterministic=True, **FIXED),
    Case(D=128, window=(200, 50), Hkv=1, **FIXED),
    Case(D=128, mask_mod="halves", form="stacked", **PACK),
    Case(D=64, causal=True, form="compact", Hkv=4, **PACK),
    Case(D=128, window=(200, 0), form="ragged", deterministic=True, **PACK),
]
# Deterministic backward in one pass wants an order with its lists.
EACH = pytest.mark.parametrize(("case", "side"), in_turn(CASES, "backward", "forward"), ids=str)


def lists_of_the_mask(case: Case, x: Inputs, side: str) -> Any:
    """Lists of the blocks in which the case's mask lets something through; full where it lets everything through."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    block_q, block_k = block(case)
    found: dict[str, list] = {"partial": [], "full": []}
    for batch, (T_q, T_k) in enumerate(case.lengths):
        with unset_fake_temporarily():
            seen = visible(case, batch, x, torch.device("cpu"))[0]
            rows = [list(rows.split(block_k, 1)) if T_k else [] for rows in seen.split(block_q)] if T_q else []
            whole = [[bool(b.all()) and b.shape[1] == block_k for b in row] for row in rows]
            some = [[bool(b.any()) for b in row] for row in rows]
        picked = {"partial": lambda m, n: some[m][n] and not whole[m][n], "full": lambda m, n: whole[m][n]}
        for kind, listed in picked.items():
            lists = [[n for n in range(len(row)) if listed(m, n)] for m, row in enumerate(rows)]
            found[kind].append([lists if side == "forward" else transposed(lists, -(-T_k // block_k))])
    own = 0 if side == "forward" else 1
    across = [-(-pair[1 - own] // (block_k, block_q)[own]) for pair in case.lengths]
    if not case.packed:
        return _tensors(case, found, across[0])
    field = ("cu_total_m_blocks", "cu_total_n_blocks")[own]
    return fa_packed_lists._tensors(case, [{kind: [b[0] for b in of] for kind, of in found.items()}], across, field)


def call(case: Case, x: Inputs, side: str, leaves: list[torch.Tensor]) -> torch.Tensor:
    """The case's public function, with lists of one direction."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    given = _masks(case, x)
    given["window_size"] = (given.pop("window_size_left"), given.pop("window_size_right"))
    argument = "block_sparse_tensors" if side == "forward" else "block_sparse_tensors_bwd"
    attend = flash_attn_varlen_func if case.packed else flash_attn_func
    given[argument] = lists_of_the_mask(case, x, side)
    return attend(*leaves, **given, deterministic=case.deterministic)[0]


def compiled(case: Case, side: str) -> list[tuple[int, ...]]:
    """Shapes of the gradients; in a worker, whose PyTorch has no autograd of tensors on a GPU."""
    from flash_attn.cute import interface

    name = "FlashAttnVarlenFunc" if case.packed else "FlashAttnFunc"
    function, context, x = getattr(interface, name), Context(), make_inputs(case)

    class Applied:
        @staticmethod
        def apply(*args: Any) -> Any:
            with torch.no_grad():
                return function.forward(context, *args)

    setattr(interface, name, Applied)
    try:
        o = call(case, x, side, [t.requires_grad_() for t in (x.q, x.k, x.v)])
    finally:
        setattr(interface, name, function)
    with torch.no_grad():
        return [tuple(t.shape) for t in function.backward(context, torch.empty_like(o), None)[:3]]


@pytest.mark.parametrize("of", swept(in_turn(CASES, "backward", "forward"), 2), ids=str)
def test_they_are_taken_and_compile(compiler: Worker, of: tuple[Case, str]) -> None:
    case, side = of
    q, k, v = compiler.trace(compiled, case, side)
    assert (q[-2:], k[-2:]) == ((case.Hq, case.D), (case.Hkv, case.D)) and k == v


def test_the_lists_say_what_the_mask_says() -> None:
    """Causal: below the diagonal everything is full, on it nothing, and backward lists are the transpose."""
    case = Case(causal=True, T_q=512, T_k=512, B=1, block=(128, 128))
    x = Inputs(*(None,) * 6)
    forward, backward = (_rows(lists_of_the_mask_on_cpu(case, x, side)) for side in ("forward", "backward"))
    assert forward == {"mask": [[0], [1], [2], [3]], "full": [[], [0], [0, 1], [0, 1, 2]]}
    assert backward == {"mask": [[0], [1], [2], [3]], "full": [[1, 2, 3], [2, 3], [3], []]}


def lists_of_the_mask_on_cpu(case: Case, x: Inputs, side: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(_tensors.__globals__, "_int32", lambda values, device: torch.tensor(values, dtype=torch.int32))
        return lists_of_the_mask(case, x, side)


def _rows(lists: Any) -> dict[str, list[list[int]]]:
    pairs = {
        kind: (getattr(lists, f"{kind}_block_cnt"), getattr(lists, f"{kind}_block_idx")) for kind in ("mask", "full")
    }
    return {kind: [row[:n] for n, row in zip(c[0, 0].tolist(), i[0, 0].tolist())] for kind, (c, i) in pairs.items()}


@pytest.mark.gpu
@EACH
def test_gradients(case: Case, side: str) -> None:
    x = make_inputs(case)
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    o = call(case, x, side, leaves)
    got = (o.detach(), *torch.autograd.grad(o, leaves, x.do))
    exact, plain = attention(case, x, torch.float64), attention(case, x, torch.bfloat16)
    for name, mine, true, rough in zip(("o", "dq", "dk", "dv"), got, exact, plain, strict=True):
        assert_close(f"{name} of {case}, lists {side}", mine, true, rough)


WINDOWS = [(None, 0), (200, 0), (130, 50), (None, 70), (90, None), (-20, 150), (5, -9)]


def seen_blocks(T_q: int, T_k: int, window: tuple[int | None, int | None]) -> torch.Tensor:
    """Which blocks of keys a block of queries sees something of, bool [M, N]: by a look at every pair."""
    at, key = torch.arange(T_q)[:, None] + T_k - T_q, torch.arange(T_k)[None]
    left, right = (T_q + T_k if side is None else side for side in window)
    seen = (key >= at - left) & (key <= at + right)
    tiled = torch.nn.functional.pad(seen, (0, -T_k % BLOCK, 0, -T_q % BLOCK))
    return tiled.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).any(3).any(1)


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
    assert "sequence 0: forward lists name 3 of the key blocks 0 .. 3" in said(
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
