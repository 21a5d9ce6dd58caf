"""Arguments and outputs of the operators: schemas, specs made of flat arguments, starts, and room for any lengths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch

from nsa_layer.call_spec import SELECTED_ALONE, CallSpec, CallTensors
from nsa_layer.checks import check_list_count, check_lists
from nsa_layer.config import ListConfig, NSAConfig

Tensor = torch.Tensor
Tensors = Sequence[Tensor | None]
Lengths = tuple[tuple[int, ...] | None, tuple[int, ...] | None]
OF_LAYER = CallTensors._fields
CONFIG = (
    "int block_size, int compress_size, int compress_stride, int block_counts, int q_tile, int window_size, "
    "int compress_offset, int init_blocks, int local_blocks, bool deterministic, str rule, bool causal, "
    "float softmax_scale, str branches"
)
NAMES = tuple(each.split()[-1] for each in CONFIG.split(", "))


def schema_of(names: Sequence[str]) -> str:
    """The part of a schema that is tensors of a call."""
    return ", ".join(f"Tensor{'?' * (name in CallTensors._field_defaults)} {name}" for name in names)


def static_arguments(spec: CallSpec) -> dict[str, Any]:
    """The arguments of the operators that are no tensors, in their order."""
    sizes = dict(compress_size=spec.config.span, compress_stride=spec.config.stride, compress_offset=spec.config.offset)
    more = dict(causal=spec.causal, softmax_scale=spec.softmax_scale, branches=" ".join(spec.branches))
    return {name: sizes.get(name, getattr(spec.config, name)) for name in NAMES[:-3]} | more


def spec_of(static: Iterable[Any], tensors: CallTensors, lengths: Lengths = (None, None)) -> CallSpec:
    """The static side of a call from values of `static_arguments`; lengths are of queries and of keys."""
    return _call_spec(tuple(static), lengths, tensors.block_indices is not None)


@lru_cache(maxsize=256)
def _call_spec(static: tuple[Any, ...], lengths: Lengths, listed: bool) -> CallSpec:
    *of_config, causal, softmax_scale, branches = static
    of, branches = dict(zip(NAMES, of_config)), tuple(branches.split())
    config = (ListConfig if branches == SELECTED_ALONE else NSAConfig)(**of)
    return CallSpec(config, causal, softmax_scale, *lengths, listed=listed, branches=branches)


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
    block_indices: Tensor, q: Tensor, k: Tensor, spec: CallSpec, cu_seqlens: Tensor | None = None
) -> None:
    """`check_lists`, as far as the host knows lengths."""
    if spec.bound is not None:
        check_list_count(block_indices, q, cu_seqlens, spec.q_tile)
    else:
        check_lists(block_indices, q, k.shape[-2], spec.num_lists(q), packed=spec.lengths is not None)


def lengths_of(starts: Tensor) -> tuple[int, ...] | None:
    """Lengths of the sequences that start there; None where there are no starts, or they are left on a GPU."""
    if not starts.numel() or stay_on_gpu(starts):
        return None
    numbers = starts.tolist()
    return tuple(end - start for start, end in zip(numbers, numbers[1:])) or None


def stay_on_gpu(starts: Tensor | None) -> bool:
    """True for starts that were left on the GPU, where the kernels alone read them."""
    return starts is not None and starts.numel() > 0 and starts.device.type == "cuda"


def copied(starts: Tensor | None, q: Tensor, *, left: bool) -> Tensor:
    """A copy of starts, since a caller may refill its own, on the CPU unless they are left on the GPU; empty where
    there are none, on q's device, since a graph with anything on the CPU is no CUDA graph."""
    if starts is None:
        return q.new_empty(0, dtype=torch.int32)
    return starts.clone() if left else starts.to("cpu", copy=True)


def copied_fake(starts: Tensor | None, q: Tensor, *, left: bool) -> Tensor:
    if starts is None:
        return q.new_empty(0, dtype=torch.int32)
    return starts.new_empty(starts.shape, device=starts.device if left else "cpu")


def apart(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Outputs as an operator promises them: contiguous, and no views of anything."""
    return (x.contiguous() if x._base is None else x.clone(memory_format=torch.contiguous_format) for x in tensors)
