"""Inputs that the checks of `nsa` take and have to tell apart. Refused ones are in `fuzz/wrong_calls/layer.py`."""

from __future__ import annotations

import pytest
import torch

from fuzz.wrong_calls.layer import HKV, HQ, D, batch, packed
from nsa_layer import NSAttention, nsa


def test_a_bound_of_lengths_may_be_any_int() -> None:
    arguments = packed("cpu")
    o = nsa(**arguments | dict(max_seqlen=10**30))
    assert o.equal(nsa(**arguments)) and o.isfinite().all()


@pytest.mark.parametrize("change", [dict(causal=1), dict(softmax_scale=True), dict(gates=1.0), dict(q=[1.0])])
def test_equal_is_not_the_same(change: dict) -> None:
    """1 == True == 1.0, so what is remembered of a good call has to tell them apart."""
    arguments = batch("cpu") | dict(softmax_scale=1.0, causal=True)
    nsa(**arguments)
    with pytest.raises(TypeError):
        nsa(**arguments | change)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_nested_tensors_are_named(layout: torch.layout, autocast: bool) -> None:
    def nested(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.nested.nested_tensor([torch.zeros(n, *shape, dtype=dtype) for n in (5, 6)], layout=layout)

    bad = {name: nested(H, 8) for name, H in (("q", HQ), ("k", HKV), ("v", HKV), ("gates", HQ), ("gate_weight", 3))}
    bad |= dict(compress_k_weight=nested(D), compress_v_weight=nested(D))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        for name, x in bad.items():
            with pytest.raises(TypeError, match=f"^{name} must not be a nested tensor; .* cu_seqlens"):
                nsa(**batch("cpu") | {name: x})
        with pytest.raises(TypeError, match="^q must not be a nested tensor"):
            nsa(bad["q"], bad["k"], bad["v"])
        with pytest.raises(TypeError, match="^cu_seqlens must not be a nested tensor"):
            nsa(**packed("cpu") | dict(cu_seqlens=nested(dtype=torch.int32)))
        layer = NSAttention(8, num_heads=2, num_kv_heads=1)
        for x in (nested(8), torch.zeros(11, 8)):
            with pytest.raises(TypeError, match="^(x|cu_seqlens) must not be a nested tensor"):
                layer(x, cu_seqlens=None if x.is_nested else nested(dtype=torch.int32))


def test_options_are_keyword_only() -> None:
    arguments = batch("cpu")
    with pytest.raises(TypeError):
        nsa(arguments["q"], arguments["k"], arguments["v"], arguments["config"])
