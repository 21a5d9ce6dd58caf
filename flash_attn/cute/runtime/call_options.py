"""Checks of scalar options, q_offset and head dimensions of an attention call, before any launch."""

from numbers import Real
from typing import Any, Optional

import torch

# Longer than any sequence, so clamping a wider window to it changes nothing, and a position plus or minus a window fits
# the kernels' 32 bits.
WIDEST_WINDOW = 1 << 30

# The least normal fp32 number; 1 / LEAST_SCALE * log2(e) is finite too.
LEAST_SCALE = 2.0**-126

# CUDA's limit for the second and third dimension of a grid.
MOST_IN_GRID_YZ = 65_535


def check_scale(softmax_scale: Any) -> Optional[float]:
    """softmax_scale as a float; positive and finite in float32, since masked scores have to stay -inf."""
    if softmax_scale is None:
        return None
    if not isinstance(softmax_scale, Real):
        raise TypeError(f"softmax_scale is {softmax_scale!r}, expected a number or None")
    if not LEAST_SCALE <= softmax_scale <= 1 / LEAST_SCALE:
        raise ValueError(f"softmax_scale is {softmax_scale!r}, expected a positive and finite number in float32")
    return float(softmax_scale)


def check_switch(name: str, value: Any) -> None:
    """Raise TypeError for an option that is not a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, expected a bool")


def bounded_window(left: Optional[int], right: Optional[int]) -> tuple[Optional[int], Optional[int]]:
    """The window clamped to +-`WIDEST_WINDOW`, so that kernels can add it to a position. None: no limit."""
    return tuple(side if side is None else max(-WIDEST_WINDOW, min(WIDEST_WINDOW, side)) for side in (left, right))


def edges(causal: bool, window_size: tuple[Optional[int], Optional[int]]) -> tuple[Optional[int], Optional[int]]:
    """(left, right): keys that a query sees before and after its own position; None for all."""
    left, right = bounded_window(*window_size)
    if left is not None and right is not None and left < 0 and right < 0:
        left, right = None, None
    return left, 0 if causal else right


def check_query_offset(
    q_offset: Optional[torch.Tensor],
    arch: int,
    sequences: int,
    device: torch.device,
    *,
    causal: bool,
    local: bool,
    lists: bool,
    qv: bool = False,
) -> None:
    """Refuse q_offset if it is not int32 [sequences] on the device, or the call does not support it."""
    if q_offset is None:
        return
    if q_offset.dtype != torch.int32:
        raise TypeError(f"q_offset must be int32, got {q_offset.dtype}")
    if q_offset.shape != (sequences,) or q_offset.device != device or not q_offset.is_contiguous():
        raise ValueError(
            f"q_offset must be [{sequences}], contiguous, on {device}, got {tuple(q_offset.shape)}, strides "
            f"{q_offset.stride()}, on {q_offset.device}"
        )
    if not (causal or local):
        raise ValueError("q_offset needs causal=True or a window: it says which keys those are of")
    for feature, asked in dict(block_sparse_tensors=lists, qv=qv).items():
        if asked:
            raise NotImplementedError(f"q_offset together with {feature} (sm_{arch}); pass seqused_k")
    if arch // 10 not in (9, 10, 11):
        raise NotImplementedError(f"q_offset on sm_{arch}: only SM90 and SM100 kernels implement it")


ACCUMULATED = 32  # backward's accumulators round head dimensions up to a multiple of this


def refuse_padded_accumulators(arch: int, head_dim: int, head_dim_v: int, packed: bool) -> None:
    """Refuse packed SM90 backward with a padded head dimension: dq, and under GQA dk and dv, are wrong there.

    Seen on an H200 with head dimensions 72 and 80, plain causal, errors of the size of the gradients; 64 and 96 are
    right. `docs/upstream-findings.md` has the measurement.
    """
    if arch // 10 == 9 and packed and (head_dim % ACCUMULATED or head_dim_v % ACCUMULATED):
        raise NotImplementedError(
            f"sm_{arch}: backward of packed sequences (cu_seqlens_q, cu_seqlens_k) needs head dimensions that are "
            f"multiples of {ACCUMULATED}, got head_dim={head_dim}, head_dim_v={head_dim_v}; pad q, k and v with zeros"
        )
