"""Lists that upstream takes are taken. Those that it refuses are in the catalogue (`fuzz/wrong_calls/attention.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fa_cases import Case, backward, forward, make_inputs, outputs
from fa_compile import Worker
from fa_lists import backward_lists, forward_lists

PACKED = Case(D=128, packed=((300, 300), (1, 129), (700, 640)), lists="both", form="stacked")
ORDERED = Case(D=128, T_q=700, T_k=900, lists="both", deterministic=True)


def less(t: torch.Tensor) -> torch.Tensor:
    return t.narrow(0, 0, t.shape[0] - 1)


def twice(t: torch.Tensor) -> torch.Tensor:
    return torch.cat([t, t])


def nothing(t: torch.Tensor) -> None:
    return None


NO_FULL = dict.fromkeys(("full_block_cnt", "full_block_idx"), nothing)
FORWARD = [
    {"cu_total_m_blocks": twice, "cu_block_idx_offsets": twice},
    {"cu_total_m_blocks": less, "cu_block_idx_offsets": less},
    NO_FULL | {"dq_write_order_full": lambda _: torch.zeros(1, 1, dtype=torch.int32, device="cuda")},
]
BACKWARD = [
    NO_FULL,
    {"dq_write_order": lambda t: t.repeat(1, 4, 1, 1)},
    {"dq_write_order": lambda t: t.narrow(2, 0, 1)},
]


def changed(lists: Any, changes: dict[str, Callable[[torch.Tensor], Any]]) -> Any:
    return lists._replace(**{name: change(getattr(lists, name)) for name, change in changes.items()})


def call(case: Case, number: int) -> None:
    """A forward or a deterministic backward with lists like that; in a worker, which makes no kernel."""
    from flash_attn.cute import interface

    x = make_inputs(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interface.cute, "compile", lambda *args, **options: None)
        for function in (interface._flash_attn_fwd, interface._flash_attn_bwd, interface._bwd_preprocess):
            patch.setattr(function, "compile_cache", {})
        if case.deterministic:
            backward(case, x, *outputs(case, x), changed(backward_lists(case)._replace(passes=1), BACKWARD[number]))
        else:
            forward(case, x, changed(forward_lists(case), FORWARD[number]))


@pytest.mark.parametrize("number", range(len(FORWARD)))
def test_starts_that_upstream_takes(compiler: Worker, number: int) -> None:
    compiler.trace(call, PACKED, number)


@pytest.mark.parametrize("number", range(len(BACKWARD)))
def test_orders_that_upstream_takes(compiler_sm100: Worker, number: int) -> None:
    """SM90, whose deterministic kernel upstream does not have, merges lists first: `test_deterministic_lists.py`."""
    compiler_sm100.trace(call, ORDERED, number)
