"""Wrong calls of nsa_layer: the operator, its configuration, the module and the position embedding."""

from __future__ import annotations

from typing import Any

import torch

from fuzz.wrong_calls import NOT_A_BOOL, NOT_A_SCALE, NOT_A_SIZE, NOT_A_TENSOR, Changed, Spec
from nsa_layer import MemoryPolicy, NSAConfig, NSAttention, nsa
from nsa_layer.rope import RotaryEmbedding
from nsa_tools.testing.cases import Case

B, T, HQ, HKV, D, DV = 2, 20, 4, 2, 8, 6
CONFIG = NSAConfig(block_size=4, q_tile=8, window_size=4)


def batch(device: str) -> dict[str, Any]:
    shapes = dict(q=(B, T, HQ, D), k=(B, T, HKV, D), v=(B, T, HKV, DV))
    return {name: torch.randn(shape, device=device) for name, shape in shapes.items()} | dict(config=CONFIG)


def packed(device: str) -> dict[str, Any]:
    given = {name: x[0] if isinstance(x, torch.Tensor) else x for name, x in batch(device).items()}
    return given | dict(cu_seqlens=torch.tensor([0, 5, T], dtype=torch.int32, device=device))


def tensor(**shapes: tuple[int, ...]) -> dict[str, Any]:
    """Of a shape each, made on the device of the other arguments."""
    return {label: torch.zeros(shape) for label, shape in shapes.items()}


FLOATS = NOT_A_TENSOR | {
    "None": None,
    "int32": Changed(lambda x: x.int()),
    "bool": Changed(lambda x: x.bool()),
    "complex": Changed(lambda x: x.to(torch.complex64)),
    "a dimension less": Changed(lambda x: x[0]),
    "a dimension more": Changed(lambda x: x[None]),
    "empty": Changed(lambda x: x[:, :0]),
    "strided in the last dimension": Changed(lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2)),
}
OTHERS = {
    "another dtype": Changed(lambda x: x.double()),
    "another device": Changed(lambda x: x.to("meta")),
    "a token less": Changed(lambda x: x[:, :-1]),
    "a sequence less": Changed(lambda x: x[:-1]),
}
WEIGHTS = NOT_A_TENSOR | {
    "int32": Changed(lambda x: torch.ones(HQ, 3, D, dtype=torch.int32)),
    "a wrong shape": torch.zeros(HQ, D, 3),
    "a wrong number of dimensions": torch.zeros(D, D),
    "on another device": torch.zeros(HQ, 3, D, device="meta"),
}
STARTS = {
    "a list": [0, T],
    "int64": Changed(lambda x: x.long()),
    "two dimensions": Changed(lambda x: x[None]),
    "one start": Changed(lambda x: x[:1]),
    "not from 0": Changed(lambda x: x + 1),
    "falling": Changed(lambda x: x.flip(0) * 0 + torch.tensor([0, 12, T - 9], dtype=torch.int32)),
    "one short": Changed(lambda x: x.clamp(max=T - 1)),
    "on another device": Changed(lambda x: x.to("meta")),
}

OPERATOR = Spec(
    "nsa",
    lambda q, k, v, **more: nsa(q, k, v, **more),
    batch,
    {
        "q": FLOATS,
        "k": FLOATS | OTHERS | {"another head dimension": Changed(lambda x: torch.cat([x, x], -1))},
        "v": FLOATS | OTHERS | {"other heads": Changed(lambda x: torch.cat([x, x], -2))},
        "config": {"a dict": {"block_size": 4}, "None": None, "its class": NSAConfig},
        "gate_weight": WEIGHTS,
        "gates": WEIGHTS | {"a wrong shape": torch.zeros(B, T, HQ)},
        "compress_k_weight": WEIGHTS,
        "compress_v_weight": WEIGHTS,
        "softmax_scale": NOT_A_SCALE | {"True": True},
        "cu_seqlens": {"for a batch": torch.tensor([0, T], dtype=torch.int32)},
        "max_seqlen": {"without cu_seqlens": T, "a float": 20.0},
        "causal": NOT_A_BOOL,
        "backend": {"unknown": "triton", "a number": 3, "a list": ["eager"], "for another device": "cute"},
        "memory": {"None": None, "a dict": {"budget": 1}, "a number": 1 << 30, "its class": MemoryPolicy},
    },
    also={"q": ("k",), "cu_seqlens": ("packed",)},
    together={
        "both gates": ("gates", dict(gates=torch.zeros(B, T, HQ, 3), gate_weight=torch.zeros(HQ, 3, D))),
        "heads that do not divide": ("heads", dict(q=torch.zeros(B, T, 5, D))),
    },
)
PACKED = Spec(
    "nsa, packed",
    lambda q, k, v, **more: nsa(q, k, v, **more),
    packed,
    {
        "cu_seqlens": STARTS,
        "max_seqlen": {"less than the longest": 14, "a float": 20.0, "a string": "20", "True": True},
        "q": {"a batch": Changed(lambda x: x[None])},
        "k": {"fewer tokens": Changed(lambda x: x[:-1])},
    },
    also={"q": ("packed",)},
)
POLICY = Spec(
    "MemoryPolicy",
    lambda **given: MemoryPolicy(**given),
    lambda device: dict(budget=1 << 30, recompute="all"),
    {
        "budget": {"a float": 1e9, "a string": "1 GB", "True": True, "negative": -1},
        "recompute": {"unknown": "some", "None": None, "a list": ["all"], "True": True},
    },
)
GOOD_CONFIG = dict(block_size=16, block_stride=8, block_counts=4, q_tile=32, window_size=8)
NOT_A_SIZE = NOT_A_SIZE | {"too large": 10**30}
SIZES = ("block_size", "block_counts", "q_tile", "window_size")
CONFIGURATION = Spec(
    "NSAConfig",
    NSAConfig,
    lambda device: dict(GOOD_CONFIG),
    {name: NOT_A_SIZE for name in SIZES}
    | {
        "block_stride": {label: value for label, value in NOT_A_SIZE.items() if value is not None} | {"no divisor": 5},
        "compress_offset": {"a float": 1.5, "a string": "1", "True": True, "too large": 10**30, "too small": -(10**30)},
        "rule": {"unknown": "logit", "None": None, "a number": 1, "without what it needs": "seed"},
        "force_blocks": NOT_A_BOOL,
        "deterministic": NOT_A_BOOL,
        "q_tile": NOT_A_SIZE | {"neither multiple nor divisor": 24},
    },
)
REPLACED = Spec(
    "NSAConfig.replace",
    lambda **changes: CONFIG.replace(**changes),
    lambda device: {},
    {"block_size": NOT_A_SIZE, "no_such_field": {"any": 1}, "window_size": NOT_A_SIZE},
)
FROM_DICT = Spec(
    "NSAConfig.from_dict",
    lambda values: NSAConfig.from_dict(values),
    lambda device: dict(values={"block_size": 16}),
    {"values": {"an unknown field": {"blocksize": 16}, "a wrong field": {"block_size": 0}}},
    also={"values": ("blocksize", "block_size")},
)
MODULE = Spec(
    "NSAttention",
    lambda dim, **more: NSAttention(dim, **more),
    lambda device: dict(dim=32, num_heads=4, num_kv_heads=2, config=CONFIG),
    {
        "dim": NOT_A_SIZE | {"not divisible": 30},
        "num_heads": NOT_A_SIZE | {"not a multiple": 5},
        "num_kv_heads": NOT_A_SIZE | {"no divisor": 3},
        "head_dim": {label: value for label, value in NOT_A_SIZE.items() if value is not None},
        "head_dim_v": {label: value for label, value in NOT_A_SIZE.items() if value is not None},
        "config": {"a dict": {}, "None": None},
        "rope": {"a number": 3, "a string": "rope"},
        "backend": {"a number": 3, "a list": []},
    },
    also={"num_heads": ("num_kv_heads",), "dim": ("num_heads",)},
)


def layer(x: Any, layer: NSAttention, **more: Any) -> Any:
    return layer(x, **more)


def layer_arguments(device: str) -> dict[str, Any]:
    own = NSAttention(32, num_heads=4, num_kv_heads=2, config=CONFIG, rope=RotaryEmbedding(8), device=device)
    return dict(x=torch.randn(B, T, 32, device=device), layer=own)


CALLED = Spec(
    "NSAttention.forward",
    layer,
    layer_arguments,
    {
        "x": NOT_A_TENSOR
        | {"two dimensions": torch.zeros(T, 32), "another width": torch.zeros(B, T, 31), "None": None}
        | {
            "float64": Changed(lambda x: x.double()),
            "int32": Changed(lambda x: x.int()),
            "on another device": Changed(lambda x: x.to("meta")),
        },
        "positions": {
            "a list": list(range(T)),
            "floats": torch.arange(T).float(),
            "bools": torch.ones(T, dtype=torch.bool),
            "one short": torch.arange(T - 1),
            "another batch": torch.zeros(B + 1, T, dtype=torch.int64),
        },
    },
    together={
        "packed, three dimensions": ("x", dict(cu_seqlens=torch.tensor([0, T], dtype=torch.int32))),
        "packed, starts in a list": ("cu_seqlens", dict(x=torch.zeros(T, 32), cu_seqlens=[0, T])),
        "packed, int64 starts": ("cu_seqlens", dict(x=torch.zeros(T, 32), cu_seqlens=torch.tensor([0, T]))),
        "packed, one start": ("cu_seqlens", dict(x=torch.zeros(T, 32), cu_seqlens=torch.zeros(1, dtype=torch.int32))),
    },
    also={"cu_seqlens": ("x",)},
)
ROPE = Spec(
    "RotaryEmbedding",
    lambda head_dim, base: RotaryEmbedding(head_dim, base),
    lambda device: dict(head_dim=8, base=10000.0),
    {"head_dim": {"odd": 7, "zero": 0, "negative": -2}, "base": {"one": 1.0, "nan": float("nan"), "negative": -1.0}},
)
ROTATED = Spec(
    "RotaryEmbedding.forward",
    lambda **given: RotaryEmbedding(8)(**given),
    lambda device: dict(q=torch.zeros(1, 4, 2, 8), k=torch.zeros(1, 4, 1, 8), positions=torch.arange(4)),
    {"q": {"another width": torch.zeros(1, 4, 2, 6)}, "k": {"another width": torch.zeros(1, 4, 1, 10)}},
)
CASES = Spec(
    "testing.Case", lambda **given: Case(**given), lambda device: {}, {"gate": {"unknown": "sum", "None": None}}
)
SPECS = (OPERATOR, PACKED, POLICY, CONFIGURATION, REPLACED, FROM_DICT, MODULE, CALLED, ROPE, ROTATED, CASES)
