"""Memory of a call of `nsa`, predicted from its plan and measured, and the longest call that fits."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from itertools import compress

import torch

from nsa_layer.api import nsa
from nsa_layer.config import BRANCHES
from nsa_layer.cute.memory_plan import RESERVE, MemoryPlan, MemoryPolicy, plan_memory, predict
from nsa_tools.measure.peak_memory import is_out_of_memory, peak_bytes
from nsa_tools.measure.timed_calls import gradients
from nsa_tools.report.results import MEASURED, NO_MEMORY
from nsa_tools.shape import Shape

STEP = 1 << 16  # tokens to which the longest call is found


def input_bytes(shape: Shape) -> int:
    """Bytes of the caller's tensors."""
    return sum(map(math.prod, shape.tensor_shapes().values())) * shape.dtype.itemsize


def planned(shape: Shape, total: int | None = None) -> MemoryPlan:
    """The call's groups of heads and saved outputs; with `total` on a GPU of so many bytes with nothing else on it."""
    sizes = shape.sizes()
    if total is None or shape.policy.budget is not None:
        return plan_memory(sizes, shape.policy, torch.device(shape.device))
    parts = predict(sizes, sizes.Hkv, (shape.backward,) * 3)
    left = int(total * (1 - RESERVE)) - input_bytes(shape) - parts["outputs"] - parts["gradients"]
    return plan_memory(sizes, MemoryPolicy(budget=max(0, left), recompute=shape.policy.recompute), torch.device("cpu"))


def predicted(shape: Shape, plan: MemoryPlan) -> dict[str, int]:
    """Bytes by component of `memory_plan.predict`, and "peak", above the inputs."""
    first, end = plan.groups[0]
    parts = predict(shape.sizes(), end - first, plan.kept)
    work = max(parts["forward"], parts["backward"] + parts["gradients"])
    return parts | {"peak": parts["outputs"] + parts["saved"] + work}


def repeated_call(shape: Shape, backend: str) -> Callable[[], None]:
    """Forward, and backward with a do that counts, on the same inputs whenever it is called."""
    inputs, attend = shape.inputs(), partial(nsa, **shape.options(), backend=backend)

    def call() -> None:
        with torch.set_grad_enabled(shape.backward):
            outputs = attend(**inputs)
        if shape.backward:
            gradients(outputs, inputs, shape.output_gradient())

    return call


def outputs_kept(shape: Shape, plan: MemoryPlan) -> int | None:
    """Outputs of branches that are kept for backward; None without one."""
    return sum(compress(plan.kept, map(shape.config.computes, BRANCHES))) if shape.backward else None


def measurement(shape: Shape, backend: str | None, total: int | None = None) -> dict:
    """The plan, bytes that are predicted by component, and the measured peak, unless `backend` is None.

    Returns:
        "T", "groups", "kept" (outputs that are saved, None without backward), "inputs", "predicted" (by component,
        with "peak"), "peak" (None: not measured, or out of memory) and "status".
    """
    plan = planned(shape, total)
    result = dict(T=shape.T, groups=len(plan.groups), kept=outputs_kept(shape, plan))
    result |= dict(inputs=input_bytes(shape), predicted=predicted(shape, plan))
    if backend is None:
        return result | dict(peak=None, status="not measured")
    try:
        call = repeated_call(shape, backend)
        call()  # which compiles
        peak = peak_bytes(call, shape.device)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return result | dict(peak=None, status=NO_MEMORY)
    return result | dict(peak=peak, status=MEASURED)


def find_longest(shape: Shape, backend: str | None, total: int) -> dict:
    """The longest call that fits: "predicted", its "groups" and "kept", and "measured", unless `backend` is None."""

    def fits(T: int) -> bool:
        one = shape.at(T)
        return input_bytes(one) + predicted(one, planned(one, total))["peak"] <= total * (1 - RESERVE)

    def runs(T: int) -> bool:
        try:
            repeated_call(shape.at(T), backend)()
            torch.cuda.synchronize()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            error.__traceback__ = None
            return False
        finally:
            torch.cuda.empty_cache()
        return True

    expected = longest(fits, guess=STEP, step=STEP)
    plan = planned(shape.at(max(expected, STEP)), total)
    tried = None if backend is None else longest(runs, guess=max(expected, STEP), step=STEP)
    kept = outputs_kept(shape, plan)
    return dict(total=total, predicted=expected, groups=len(plan.groups), kept=kept, measured=tried)


def longest(fits: Callable[[int], bool], *, guess: int, step: int) -> int:
    """The largest multiple of `step` that fits, or 0; a guess doubles until it does not fit."""
    high = max(step, guess // step * step)
    while fits(high):
        high *= 2
    return step * bisect_left(range(step, high, step), True, key=lambda T: not fits(T))
