"""Every bad argument of `nsa` is named, with what it was and what was expected."""

from __future__ import annotations

import math

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


BAD = {
    "q no tensor": (good(q=[1.0]), TypeError, "q must be a torch.Tensor, got list"),
    "q int": (good(q=torch.zeros(B, T, HQ, D, dtype=torch.int32)), TypeError, r"q must be float16.*got torch.int32"),
    "q 3-D": (good(q=torch.randn(T, HQ, D)), ValueError, r"q must be \[B, T, H, D\], got 3 dimensions"),
    "k dtype": (good(k=torch.randn(B, T, HKV, D).double()), TypeError, "k must have q's dtype torch.float32"),
    "v dtype": (good(v=torch.randn(B, T, HKV, DV).half()), TypeError, "v must have q's dtype torch.float32"),
    "k device": (good(k=torch.randn(B, T, HKV, D, device="meta")), ValueError, "k must be on q's device cpu, got meta"),
    "empty": (good(q=torch.randn(B, 0, HQ, D)), ValueError, "q must have no empty dimension"),
    "k length": (good(k=torch.randn(B, T - 1, HKV, D)), ValueError, r"k must have q's leading dimensions \(2, 20\)"),
    "v heads": (good(v=torch.randn(B, T, HQ, DV)), ValueError, r"v must have k's leading dimensions \(2, 20, 2\)"),
    "k head dim": (good(k=torch.randn(B, T, HKV, D + 1)), ValueError, "k must have q's head dimension 8, got 9"),
    "heads": (good(q=torch.randn(B, T, 5, D)), ValueError, "multiple of k's, got 5 and 2"),
    "q strided": (good(q=torch.randn(B, T, D, HQ).mT), ValueError, "q must be contiguous in its last dimension, got"),
    "v strided": (good(v=torch.randn(B, T, DV, HKV).mT), ValueError, "v must be contiguous in its last dimension"),
    "both gates": (
        good(gates=torch.rand(B, T, HQ, 3), gate_weight=torch.randn(HQ, 3, D)),
        ValueError,
        "gate_weight and gates exclude each other",
    ),
    "gates shape": (good(gates=torch.rand(B, T, HQ)), ValueError, r"gates must have shape \(2, 20, 4, 3\), got"),
    "gates int": (good(gates=torch.ones(B, T, HQ, 3).int()), TypeError, "gates must be of a floating-point dtype"),
    "gate_weight shape": (
        good(gate_weight=torch.rand(HQ, D, 3)),
        ValueError,
        r"gate_weight must have shape \(4, 3, 8\)",
    ),
    "gate_weight type": (good(gate_weight=1.0), TypeError, "gate_weight must be a torch.Tensor or None, got float"),
    "gate_weight device": (
        good(gate_weight=torch.rand(HQ, 3, D, device="meta")),
        ValueError,
        "gate_weight must be on q's device",
    ),
    "k weight": (
        good(compress_k_weight=torch.rand(HKV, DV, DV)),
        ValueError,
        r"compress_k_weight must have shape \(2, 8, 8\)",
    ),
    "v weight": (
        good(compress_v_weight=torch.rand(HKV, D, D)),
        ValueError,
        r"compress_v_weight must have shape \(2, 6, 6\)",
    ),
    "scale nan": (
        good(softmax_scale=math.nan),
        ValueError,
        "softmax_scale must be positive and finite in float32, got nan",
    ),
    "scale 0": (good(softmax_scale=0), ValueError, "softmax_scale must be positive and finite in float32, got 0"),
    "scale below 0": (
        good(softmax_scale=-0.5),
        ValueError,
        "softmax_scale must be positive and finite in float32, got -0.5",
    ),
    "scale huge": (good(softmax_scale=10**400), ValueError, "softmax_scale must be positive and finite in float32"),
    "scale above fp32": (good(softmax_scale=1e39), ValueError, r"finite in float32, got 1e\+39"),
    "scale below fp32": (good(softmax_scale=1e-50), ValueError, "finite in float32, got 1e-50"),
    "scale str": (good(softmax_scale="1"), TypeError, "softmax_scale must be a number or None, got '1'"),
    "causal": (good(causal=1), TypeError, "causal must be a bool, got 1"),
    "config": (good(config={"block_size": 4}), TypeError, "config must be an NSAConfig, got dict"),
    "backend": (good(backend="triton"), ValueError, "backend must be None or one of 'cute', 'eager', 'reference', got"),
    "backend cute": (good(backend="cute"), ValueError, "backend='cute' needs tensors on a GPU, got cpu"),
    "max_seqlen alone": (good(max_seqlen=20), ValueError, "max_seqlen is for packed input, got 20"),
    "packed 4-D": (good(cu_seqlens=starts(0, 20)), ValueError, r"q must be packed \[total, H, D\]"),
    "cu list": (packed([0, 20]), TypeError, "cu_seqlens must be a torch.Tensor or None, got list"),
    "cu int64": (packed(starts(0, 20).long()), TypeError, "cu_seqlens must be int32, got torch.int64"),
    "cu 2-D": (
        packed(starts(0, 20).view(1, 2)),
        ValueError,
        r"cu_seqlens must be \[sequences \+ 1\], got shape \(1, 2\)",
    ),
    "cu short": (packed(starts(0)), ValueError, r"cu_seqlens must be \[sequences \+ 1\]"),
    "cu device": (packed(starts(0, 20).to("meta")), ValueError, "cu_seqlens must be on q's device cpu or .*, got meta"),
    "cu start": (packed(starts(1, 20)), ValueError, "cu_seqlens must start at 0, got 1"),
    "cu falls": (packed(starts(0, 12, 9, 20)), ValueError, r"cu_seqlens must not fall, got \[0, 12, 9, 20\]"),
    "cu end": (packed(starts(0, 19)), ValueError, "cu_seqlens must end at the 20 tokens of q, got 19"),
    "max_seqlen small": (packed(starts(0, 5, 20), max_seqlen=14), ValueError, "longest sequence, 15, got 14"),
    "max_seqlen type": (
        packed(starts(0, 20), max_seqlen=20.0),
        TypeError,
        "max_seqlen must be an int or None, got 20.0",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_argument(name: str) -> None:
    arguments, error, message = BAD[name]
    nsa(**good())  # calls that passed the checks are remembered: this one is not one of them
    with pytest.raises(error, match=message):
        nsa(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [good(), packed(starts(0, 5, 5, 20), max_seqlen=64), packed(starts(0, 20), max_seqlen=10**30)],
    ids=["batch", "packed", "no bound"],
)
def test_what_the_bad_calls_start_from_is_good(arguments: dict) -> None:
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
