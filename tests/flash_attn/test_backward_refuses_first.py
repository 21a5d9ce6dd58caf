"""Backward looks at its lists before it launches or even makes anything, the preprocess included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fa_cases import Case, backward, backward_lists, make_inputs
from fa_compile import Worker, built_kernels

CASE = Case(D=64, lists="both", deterministic=True)
CHANGES = {
    "dq_write_order": dict(dq_write_order=None),
    "spt": dict(spt=None),
    "mask_block": dict(mask_block_cnt=torch.int64),
    "lists for 3 heads": dict(mask_block_cnt=3, mask_block_idx=3),
}


def refused(named: str) -> tuple[str, str, int]:
    """What backward raises for lists with one thing wrong, and how many kernels it asked for before; in a worker."""
    x, lists = make_inputs(CASE), backward_lists(CASE)
    changed = {name: _changed(getattr(lists, name), value) for name, value in CHANGES[named].items()}
    lse = torch.empty(CASE.B, CASE.Hq, CASE.T_q, device="cuda")
    with built_kernels() as kernels:
        with pytest.raises(Exception) as error:
            backward(CASE, x, x.do, lse, lists._replace(**changed))
    return error.type.__name__, str(error.value), len(kernels)


def _changed(tensor: torch.Tensor, value: Any) -> torch.Tensor | None:
    """In another type, or with so many heads."""
    if value is None:
        return None
    if isinstance(value, torch.dtype):
        return tensor.to(value)
    return torch.empty(tensor.shape[0], value, *tensor.shape[2:], dtype=tensor.dtype, device="cuda")


@pytest.mark.parametrize("named", CHANGES)
def test_wrong_lists_are_refused_before_any_kernel(compiler_sm90: Worker, named: str) -> None:
    kind, said, compiled = compiler_sm90.trace(refused, named)
    assert kind == "ValueError" and named in said
    assert compiled == 0
