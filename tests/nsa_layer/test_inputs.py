"""Inputs that the checks of `nsa` take and have to tell apart. Refused ones are in `fuzz/wrong_calls/layer.py`."""

from __future__ import annotations

import pytest
import torch

from nsa_layer import NSAConfig, NSAttention, nsa

B, T, HQ, HKV, D, DV = 2, 20, 4, 2, 8, 6


def good(**changes: object) -> dict[str, object]:
    tensors = dict(q=torch.randn(B, T, HQ, D), k=torch.randn(B, T, HKV, D), v=torch.randn(B, T, HKV, DV))
    return tensors | dict(config=NSAConfig(block_size=4, q_tile=8, window_size=4)) | changes


def packed(cu_seqlens: object, **changes: object) -> dict[str, object]:
    tensors = dict(q=torch.randn(T, HQ, D), k=torch.randn(T, HKV, D), v=torch.randn(T, HKV, DV))
    return good(**tensors, cu_seqlens=cu_seqlens, **changes)


def starts(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    "arguments",
    [good(), packed(starts(0, 5, 5, 20), max_seqlen=64), packed(starts(0, 20), max_seqlen=10**30)],
    ids=["batch", "packed", "no bound"],
)
def test_right_calls(arguments: dict) -> None:
    o = nsa(**arguments)
    assert o.shape == (*arguments["q"].shape[:-1], DV) and o.isfinite().all()


@pytest.mark.parametrize("change", [dict(causal=1), dict(softmax_scale=True), dict(gates=1.0), dict(q=[1.0])])
def test_equal_is_not_the_same(change: dict) -> None:
    """1 == True == 1.0, so what is remembered of a good call has to tell them apart."""
    arguments = good(softmax_scale=1.0, causal=True)
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
                nsa(**good(**{name: x}))
        with pytest.raises(TypeError, match="^q must not be a nested tensor"):
            nsa(bad["q"], bad["k"], bad["v"])
        with pytest.raises(TypeError, match="^cu_seqlens must not be a nested tensor"):
            nsa(**packed(nested(dtype=torch.int32)))
        layer = NSAttention(8, num_heads=2, num_kv_heads=1)
        for x in (nested(8), torch.zeros(11, 8)):
            with pytest.raises(TypeError, match="^(x|cu_seqlens) must not be a nested tensor"):
                layer(x, cu_seqlens=None if x.is_nested else nested(dtype=torch.int32))


def test_options_are_keyword_only() -> None:
    arguments = good()
    with pytest.raises(TypeError):
        nsa(arguments["q"], arguments["k"], arguments["v"], arguments["config"])
