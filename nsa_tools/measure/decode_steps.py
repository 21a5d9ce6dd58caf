"""Times of a decode step, one new token for each sequence: `nsa_with_kvcache`, and dense attention to the same caches.

On a GPU steps are replayed from a CUDA graph that rotates over sets of caches, so that none is found in the L2. The
layer's are as many as a block has tokens, one of which completes it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from nsa_layer.kvcache.api import nsa_with_kvcache
from nsa_tools.measure.timing import captured, interleaved
from nsa_tools.shape import Shape

ROTATED_BYTES = 200 << 20  # that the steps of a graph read, at least
LEAST_STEPS = 4  # of dense attention's graph
MOST_OF_MEMORY = 0.7  # of a GPU's, for sets of caches

Step = Callable[[dict], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class DecodeRow:
    """Microseconds of one step by variant, None where it failed; bytes that the layer's step has to read.

    "nsa fp8" has the same caches in FP8, "dense" is the fork's FlashAttention, which has no splits on Hopper, "sdpa"
    PyTorch's.
    """

    T: int
    B: int
    Hq: int
    Hkv: int
    D: int
    Dv: int
    dtype: str
    us: dict[str, float | None]
    bytes: int
    sets: int
    failed: dict[str, str]


def step_bytes(shape: Shape) -> int:
    """Bytes of keys and values that a step of the layer reads: its branches', and all keys of an index."""
    config, index_heads = shape.config, 1 if shape.one_key else shape.Hkv
    of_branches = dict(
        compressed=config.compressed_length(shape.T),
        selected=min(shape.T, config.block_counts * config.block_size),
        window=min(shape.T, config.window_size),
    )
    keys = sum(of_branches[branch] for branch in config.branches)
    return (
        shape.B
        * (shape.Hkv * keys * (shape.D + shape.Dv) + shape.T * index_heads * shape.index_dim)
        * shape.dtype.itemsize
    )


def in_fp8(inputs: dict) -> dict:
    """The same with caches in FP8."""
    return inputs | {name: x.to(torch.float8_e4m3fn) for name, x in inputs.items() if name.endswith("_cache")}


def make_set(shape: Shape) -> dict:
    """Arguments of `nsa_with_kvcache` for a step to `shape.T` tokens."""
    B, T, Hq, Hkv, D = shape.B, shape.T, shape.Hq, shape.Hkv, shape.D
    of_kv = dict(k=D, v=shape.Dv)

    def draw(*size: int, scale: float = 1.0) -> torch.Tensor:
        return torch.empty(*size, dtype=shape.dtype, device=shape.device).normal_(std=scale)

    tensors = dict(q=draw(B, 1, Hq, D))
    tensors |= {f"{name}_cache": draw(B, T, Hkv, size) for name, size in of_kv.items()}
    tensors |= {name: draw(B, 1, Hkv, size) for name, size in of_kv.items()}
    tensors["cache_seqlens"] = torch.full((B,), T - 1, dtype=torch.int32, device=shape.device)
    if shape.index_dim:
        heads, Di = 1 if shape.one_key else Hkv, shape.index_dim
        tensors |= dict(q_index=draw(B, 1, Hkv, Di), k_index=draw(B, 1, heads, Di), k_index_cache=draw(B, T, heads, Di))
        return tensors | dict(config=shape.config)
    count, smaller = shape.config.compressed_length(T), shape.config.span**-0.5
    tensors |= {f"{name}_cmp_cache": draw(B, count, Hkv, size, scale=smaller) for name, size in of_kv.items()}
    return tensors | dict(gate_weight=draw(Hq, 3, D, scale=D**-0.5), config=shape.config)


def decode_variants(shape: Shape, backend: str | None) -> dict[str, Step]:
    """A step by each variant's name."""

    def sdpa(inputs: dict) -> torch.Tensor:
        q, k, v = (inputs[name].transpose(1, 2) for name in ("q", "k_cache", "v_cache"))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)

    def dense(inputs: dict) -> torch.Tensor:
        from flash_attn.cute.interface import flash_attn_func

        return flash_attn_func(inputs["q"], inputs["k_cache"], inputs["v_cache"], causal=True)[0]

    on_gpu = {"dense": dense} if shape.device.startswith("cuda") else {}
    return {"nsa": lambda inputs: nsa_with_kvcache(**inputs, backend=backend), **on_gpu, "sdpa": sdpa}


def measure(shape: Shape, backend: str | None, *, repeats: int, fp8: bool = False) -> DecodeRow:
    """The row of a shape; a variant that fails is part of it; fp8: with caches in FP8 too."""
    on_gpu, needed = shape.device.startswith("cuda"), step_bytes(shape)
    sets, steps = 1, dict.fromkeys(("nsa", *["nsa fp8"] * fp8, *decode_variants(shape, backend)), 1)
    if on_gpu:
        whole = shape.B * shape.T * shape.Hkv * (shape.D + shape.Dv) * (shape.dtype.itemsize + fp8)
        most = int(MOST_OF_MEMORY * torch.cuda.mem_get_info(shape.device)[0]) // whole
        sets = max(1, min(-(-ROTATED_BYTES // needed), most))
        block = min(shape.T, shape.config.block_size)
        of_layer = {name: -(-sets // block) * block for name in steps if name.startswith("nsa")}
        steps |= dict.fromkeys(steps, max(LEAST_STEPS, sets)) | of_layer
    inputs = [make_set(shape) for _ in range(sets)]
    rounded = [in_fp8(each) for each in inputs] if fp8 else []
    calls, failed, us = {}, {}, {}
    for name in steps:
        us[name], step = None, decode_variants(shape, backend)[name.removesuffix(" fp8")]
        rotated = rounded if name.endswith("fp8") else inputs
        try:
            calls[name] = captured_steps(step, rotated, steps[name]) if on_gpu else partial(step, rotated[0])
            calls[name]()
        except Exception as error:  # its row says so, and the others go on
            calls.pop(name, None)
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    label = f"decode {shape.describe()}"
    with torch.no_grad():
        timings = interleaved(calls, repeats=repeats, device=shape.device, label=label, warm_ups=1)
    us |= {name: statistics.median(taken) * 1e3 / steps[name] for name, taken in timings.items()}
    sizes = {name: getattr(shape, name) for name in ("T", "B", "Hq", "Hkv", "D", "Dv")}
    return DecodeRow(**sizes, dtype=shape.dtype_name(), us=us, bytes=needed, sets=sets, failed=failed)


def captured_steps(step: Step, inputs: list[dict], count: int) -> Callable[[], object]:
    """A replay of so many steps, the last to all tokens of the caches, on each set of them in turn."""
    lengths = [inputs[0]["cache_seqlens"] - (count - 1 - i) for i in range(count)]

    @torch.no_grad()
    def steps() -> None:
        for i, cache_seqlens in enumerate(lengths):
            step(inputs[i % len(inputs)] | dict(cache_seqlens=cache_seqlens))

    return captured(steps)
