"""Calls that upstream takes are taken, and what upstream refuses too is refused in words that hold upstream's.

Those of SM90 are in the catalogue of wrong calls (`fuzz/wrong_calls/attention.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fa_cases import Case, backward, forward, make_inputs
from fa_compile import Worker
from fa_lists import backward_lists, forward_lists

PACKED = Case(D=128, packed=((300, 300), (1, 129), (700, 640)), lists="both", form="stacked")
Changes = dict[str, Callable[[torch.Tensor], Any]]


def less(dim: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda t: t.narrow(dim, 0, t.shape[dim] - 1)


def of_cpu(t: torch.Tensor) -> torch.Tensor:
    return torch.zeros(t.shape, dtype=t.dtype, device="cpu")


def heads(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda t: t.repeat(*(1,) * (t.ndim != 2 and t.ndim != 1), number, *(1,) * (t.ndim - 1 - (t.ndim != 2)))


# What one mistake in lists that are right otherwise is called; None: it is none.
ORDERED = [
    ({"dq_write_order": lambda t: None, "spt": lambda t: None}, "requires dq_write_order in block_sparse_tensors"),
    ({"dq_write_order": lambda t: None}, "spt requires dq_write_order to be provided"),
    ({"dq_write_order_full": lambda t: None}, "requires dq_write_order_full when full blocks are present"),
    ({"spt": lambda t: None}, "requires block_sparse_tensors.spt to match dq_write_order direction"),
    ({"spt": lambda t: 1}, "spt must be a bool when provided"),
    ({"dq_write_order": torch.Tensor.long}, "dq_write_order must have dtype torch.int32"),
    ({"dq_write_order": of_cpu}, "dq_write_order must be on the same device as block sparse tensors"),
    ({"dq_write_order_full": less(-1)}, "cannot be expanded to expected shape"),
]
TAKEN_ORDERS: list[Changes] = [
    {"full_block_cnt": lambda t: None, "full_block_idx": lambda t: None},
    {"dq_write_order": heads(4)},
    {"dq_write_order": lambda t: t.narrow(2, 0, 1)},
]
STARTS = [
    ({"cu_total_m_blocks": lambda t: torch.cat([t, t]), "cu_block_idx_offsets": lambda t: torch.cat([t, t])}, None),
    ({"cu_total_m_blocks": less(0), "cu_block_idx_offsets": less(0)}, None),
    (
        {"dq_write_order_full": lambda _: torch.zeros(1, 1, dtype=torch.int32)},
        "must be on the same device",
    ),
    (
        dict.fromkeys(("full_block_cnt", "full_block_idx"), lambda t: None)
        | {"dq_write_order_full": lambda _: torch.zeros(1, 1, dtype=torch.int32, device="cuda")},
        None,
    ),
    ({"spt": lambda _: True}, "spt requires dq_write_order to be provided"),
]


def said(kind: str, number: int) -> str | None:
    """A call's error for one mistake; in a worker, which makes no kernel."""
    from flash_attn.cute import interface

    table, case = TABLES[kind]
    changes, x = table[number][0], make_inputs(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interface.cute, "compile", lambda *args, **options: None)
        for function in (interface._flash_attn_fwd, interface._flash_attn_bwd, interface._bwd_preprocess):
            patch.setattr(function, "compile_cache", {})
        lists = forward_lists(case)
        if "backward" in kind:
            lists = backward_lists(case)._replace(passes=1)
        lists = lists._replace(**{name: change(getattr(lists, name)) for name, change in changes.items()})
        try:
            if "forward" in kind:
                forward(case, x, lists)
            else:
                backward(case, x, x.do, torch.empty(case.B, case.Hq, case.T_q, device="cuda"), lists)
        except ValueError as error:
            return str(error)
    return None


ORDERED_CASE = Case(D=128, T_q=700, T_k=900, lists="both", deterministic=True)
TABLES = {
    "deterministic backward": (ORDERED, ORDERED_CASE),
    "backward by an order of another shape": ([(changes, None) for changes in TAKEN_ORDERS], ORDERED_CASE),
    "packed forward": (STARTS, PACKED),
}
EACH = [
    pytest.param(kind, number, expected, id=f"{kind}-{'-'.join(changes)}-{number}")
    for kind, (table, _) in TABLES.items()
    if "another shape" not in kind
    for number, (changes, expected) in enumerate(table)
]


@pytest.mark.parametrize(("kind", "number", "expected"), EACH)
def test_it_says_what_upstream_says(compiler: Worker, kind: str, number: int, expected: str | None) -> None:
    message = compiler.trace(said, kind, number)
    if expected is None:
        assert message is None
    else:
        assert message is not None and expected in message, message


@pytest.mark.parametrize("number", range(len(TAKEN_ORDERS)))
def test_orders_that_upstream_takes(compiler_sm100: Worker, number: int) -> None:
    """SM90, whose deterministic kernel upstream does not have, merges lists first: `test_deterministic_lists.py`."""
    assert compiler_sm100.trace(said, "backward by an order of another shape", number) is None
