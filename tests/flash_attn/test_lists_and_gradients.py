"""Block lists in one direction only, where a gradient is needed: a mask stands for the other one, or it is an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flash_attn.cute import flash_attn_func, flash_attn_varlen_func
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

LISTS = BlockSparseTensorsTorch(torch.ones(1, 1, 4, dtype=torch.int32), torch.zeros(1, 1, 4, 4, dtype=torch.int32))
pytestmark = pytest.mark.usefixtures("launched")
EACH = pytest.mark.parametrize("attend", [flash_attn_func, flash_attn_varlen_func])


def inputs(wanted: str = "") -> list[torch.Tensor]:
    return [torch.zeros(1, 512, 2, 64).requires_grad_(name == wanted or wanted == "qkv") for name in "qkv"]


@EACH
@pytest.mark.parametrize("wanted", ["k", "v", "learnable_sink"])
def test_any_input_may_want_a_gradient(attend: Any, wanted: str) -> None:
    """Beside what the catalogue of wrong calls has: q wants one there."""
    sink = torch.zeros(2, requires_grad=wanted == "learnable_sink")
    with pytest.raises(ValueError, match="block_sparse_tensors_bwd is None"):
        attend(*inputs(wanted), learnable_sink=sink, block_sparse_tensors=LISTS)


def see_all(*args: Any) -> bool:
    return True


MASKS = [dict(mask_mod=see_all), dict(causal=True), *(dict(window_size=w) for w in [(100, 0), (None, 5), (0, None)])]


@EACH
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("given", ["block_sparse_tensors", "block_sparse_tensors_bwd"])
def test_a_mask_stands_for_the_other_direction(attend: Any, given: str, mask: dict[str, Any]) -> None:
    assert attend(*inputs("qkv"), **{given: LISTS}, **mask) == "launched"


@EACH
@pytest.mark.parametrize("window", [(None, None), (-1, -1)])
@pytest.mark.parametrize("given", ["block_sparse_tensors", "block_sparse_tensors_bwd"])
def test_a_window_without_limits_is_no_mask(attend: Any, given: str, window: tuple) -> None:
    with pytest.raises(ValueError, match="nothing is masked"):
        attend(*inputs("q"), **{given: LISTS}, window_size=window)


@EACH
def test_both_lists(attend: Any) -> None:
    assert attend(*inputs("qkv"), block_sparse_tensors=LISTS, block_sparse_tensors_bwd=LISTS) == "launched"


@EACH
def test_inference_needs_forward_lists_alone(attend: Any) -> None:
    assert attend(*inputs(), block_sparse_tensors=LISTS) == "launched"
    with torch.no_grad():
        assert attend(*inputs("qkv"), block_sparse_tensors=LISTS) == "launched"


@EACH
def test_no_lists(attend: Any) -> None:
    assert attend(*inputs("qkv")) == "launched"
