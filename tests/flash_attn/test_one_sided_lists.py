"""Lists in one direction and a mask that says the same in the other: the gradient is that of the mask."""

from __future__ import annotations

from typing import Any

import fa_packed_lists
import pytest
import torch
from fa_cases import Case, Inputs, _masks, _tensors, block, in_turn, make_inputs, transposed
from fa_compile import Worker
from fa_reference import assert_close, attention, visible
from test_upstream_programs import Context

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
            rows = [[part for part in rows.split(block_k, 1)] for rows in seen.split(block_q)] if T_k else []
            rows = rows or [[] for _ in range(-(-T_q // block_q))]
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


@EACH
def test_they_are_taken_and_compile(compiler: Worker, case: Case, side: str) -> None:
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
