"""Arguments and outputs of the operators: schemas, specs made of flat arguments, starts, and room for any lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch

from nsa_layer.call_spec import CallSpec, CallTensors, ListSpec
from nsa_layer.config import NSAConfig
from nsa_layer.inputs import check_list_count, check_lists

Tensor = torch.Tensor
Tensors = Sequence[Tensor | None]
OF_LAYER = CallTensors._fields[:-1]
OF_BRANCHES = tuple(name for name in OF_LAYER if name not in ("gate_weight", "gates"))
CONFIG = (
    "int block_size, int compress_size, int compress_stride, int block_counts, int q_tile, int window_size, "
    "int compress_offset, int init_blocks, int local_blocks, bool deterministic, str rule, bool causal, "
    "float softmax_scale"
)
NAMES = tuple(each.split()[-1] for each in CONFIG.split(", "))
LISTS = "Tensor q, Tensor k, Tensor v, Tensor block_indices, Tensor? q_offset, Tensor? cu_seqlens, Tensor? cu_seqlens_k"
LIST_CONFIG = "int block_size, int q_tile, bool causal, float softmax_scale"


def schema_of(names: Sequence[str]) -> str:
    """The part of a schema that is tensors of a call."""
    return ", ".join(f"Tensor{'?' * (name in CallTensors._field_defaults)} {name}" for name in names)


def static_arguments(spec: CallSpec) -> dict[str, Any]:
    """The arguments of the operators that are no tensors, in their order."""
    sizes = dict(compress_size=spec.config.span, compress_stride=spec.config.stride, compress_offset=spec.config.offset)
    more = dict(causal=spec.causal, softmax_scale=spec.softmax_scale)
    return {name: sizes.get(name, getattr(spec.config, name)) for name in NAMES[:-2]} | more


def spec_of(static: dict[str, Any], lengths: tuple[int, ...] | None, *, listed: bool = False) -> CallSpec:
    return _call_spec(tuple(map(static.__getitem__, NAMES)), lengths, listed)


@lru_cache(maxsize=256)
def _call_spec(static: tuple[Any, ...], lengths: tuple[int, ...] | None, listed: bool) -> CallSpec:
    *of_config, causal, softmax_scale = static
    return CallSpec(NSAConfig(**dict(zip(NAMES, of_config))), causal, softmax_scale, lengths, listed=listed)


def without_room(tensors: CallTensors, spec: CallSpec) -> CallTensors:
    """The tensors without the room that k_cmp and v_cmp of packed sequences have in a graph."""
    if spec.lengths is None:
        return tensors
    blocks, compressed = sum(map(spec.config.compressed_length, spec.lengths)), (tensors.k_cmp, tensors.v_cmp)
    for x in compressed:
        if x is not None and x.shape[0] < blocks:
            raise ValueError(f"k_cmp and v_cmp must have {blocks} rows for these cu_seqlens, got {x.shape[0]}")
    return tensors.map(lambda x: x[:blocks], ("k_cmp", "v_cmp"))


def check_lists_of(
    block_indices: Tensor, q: Tensor, k: Tensor, spec: CallSpec | ListSpec, cu_seqlens: Tensor | None = None
) -> None:
    """`check_lists`, as far as the host knows lengths."""
    if spec.bound is not None:
        check_list_count(block_indices, q, cu_seqlens, spec.q_tile)
    else:
        check_lists(block_indices, q, k.shape[-2], spec.num_lists(q), packed=spec.lengths is not None)


def choice_shape(q: Tensor, k: Tensor, cu_seqlens: Tensor | None, config: NSAConfig) -> tuple[int, ...]:
    """Room for the chosen blocks, whatever the lengths."""
    heads = q.shape[-2] if config.rule == "seed" else k.shape[-2]
    width, tiles = config.list_room(q.shape[-3]), config.num_tiles(q.shape[-3])
    if cu_seqlens is None:
        return q.shape[0], tiles, heads, width
    return tiles if config.q_tile == 1 else tiles + cu_seqlens.shape[0] - 1, heads, width


def lengths_of(starts: Tensor) -> tuple[int, ...] | None:
    """Lengths of the sequences that start there; None where there are no starts, or they are left on a GPU."""
    if not starts.numel() or stay_on_gpu(starts):
        return None
    numbers = starts.tolist()
    return tuple(end - start for start, end in zip(numbers, numbers[1:])) or None


def stay_on_gpu(starts: Tensor | None) -> bool:
    """True for starts that were left on the GPU, where the kernels alone read them."""
    return starts is not None and starts.numel() > 0 and starts.device.type == "cuda"


def copied(cu_seqlens: Tensor | None, q: Tensor | None = None, *, left: bool = False) -> Tensor:
    """A copy of starts, since a caller may refill its own; empty where there are none.

    On the CPU, unless starts are left on the GPU; an empty one on q's device where q is given, since a graph with
    anything on the CPU is no CUDA graph.
    """
    if cu_seqlens is None:
        return torch.empty(0, dtype=torch.int32, device="cpu" if q is None else q.device)
    return cu_seqlens.clone() if left else cu_seqlens.to("cpu", copy=True)


def copied_fake(like: Tensor, cu_seqlens: Tensor | None, *, on_kernels: bool = False, left: bool = False) -> Tensor:
    if cu_seqlens is None:
        return like.new_empty(0, dtype=torch.int32, device=like.device if on_kernels else "cpu")
    return cu_seqlens.new_empty(cu_seqlens.shape, device=cu_seqlens.device if left else "cpu")


def apart(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Outputs as an operator promises them: contiguous, and no views of anything."""
    return (x.contiguous() if x._base is None else x.clone(memory_format=torch.contiguous_format) for x in tensors)
