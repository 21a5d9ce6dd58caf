"""The calls that `bench` times: dense attention and the layer, forward, backward and both, or replayed from a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch

from nsa_layer.api import nsa
from nsa_tools.measure.timing import captured, lap_times, rotating
from nsa_tools.shape import Shape

FORWARD, BACKWARD, BOTH = "forward", "backward", "forward+backward"
VARIANTS = ("dense", "nsa", "gated")

Attend = Callable[..., torch.Tensor]


def gradients(
    outputs: torch.Tensor | tuple[torch.Tensor, torch.Tensor], inputs: dict[str, torch.Tensor], do: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of inputs: of o, weighted by do, and of an index' loss beside it; None for an input of neither."""
    o, *loss = outputs if isinstance(outputs, tuple) else (outputs,)
    return torch.autograd.grad([o, *loss], list(inputs.values()), [do, *[None] * len(loss)], allow_unused=True)


class Step:
    """Forward and backward as in training, on sets of inputs in turn; without do forward alone."""

    def __init__(self, attend: Attend, sets: list[dict[str, torch.Tensor]], do: torch.Tensor | None) -> None:
        self.attend, self.sets, self.do = attend, sets, do
        self.rotation = cycle(sets)

    def forward(self) -> None:
        self.inputs, self.outputs = next(self.rotation), None
        with torch.set_grad_enabled(self.do is not None):
            self.outputs = self.attend(**self.inputs)

    def backward(self) -> None:
        outputs, self.outputs = self.outputs, None
        gradients(outputs, self.inputs, self.do)

    def __call__(self, lap: Callable[[], None] = lambda: None) -> None:
        self.forward()
        if self.do is not None:
            lap()
            self.backward()
        self.outputs = None


@dataclass(frozen=True)
class Timer:
    """A call, which may lap between forward and backward, and the directions whose times it gives."""

    call: Callable[..., object]
    ways: tuple[str, ...]

    def take(self, device: str) -> dict[str, float]:
        """Milliseconds by direction."""
        laps = lap_times(self.call, device)
        times = dict(zip((FORWARD, BACKWARD), laps)) | {BOTH: sum(laps)}
        return {way: times[way] for way in self.ways}


def step_of(shape: Shape, backend: str, *, sets: int = 1) -> Step:
    """The layer's step of a shape."""
    attend = partial(nsa, **shape.options(), backend=backend)
    return Step(attend, [shape.inputs() for _ in range(sets)], shape.output_gradient())


def variants(shape: Shape, backend: str, *, sets: int) -> dict[str, Step]:
    """The step of every variant by its name, on the same tensors."""
    gated = step_of(shape, backend, sets=sets)
    alone = [{name: given[name] for name in ("q", "k", "v")} for given in gated.sets]
    plain = [{name: x for name, x in given.items() if name != "gate_weight"} for given in gated.sets]
    dense = Step(dense_attention(shape.device, shape.packing()), alone, gated.do)
    return dict(zip(VARIANTS, (dense, Step(gated.attend, plain, gated.do), gated), strict=True))


def timers(step: Step, *, graph: bool, once: bool = False) -> Iterator[tuple[tuple[str, ...], Callable[[], Timer]]]:
    """Directions, and how to make the timer that gives them; a failure of the timer is a row of each of them.

    Args:
        graph: replay CUDA graphs, one for each set of inputs.
        once: take forward from the step that is timed for backward, because each timing takes long.
    """

    def timer(call: Step, ways: tuple[str, ...]) -> tuple[tuple[str, ...], Callable[[], Timer]]:
        replays = (captured(call, warm_ups=0 if i else 2) for i in range(len(step.sets)))
        return ways, lambda: Timer(rotating(list(replays)) if graph else call, ways)

    if step.do is not None and once and not graph:
        yield timer(step, (FORWARD, BACKWARD, BOTH))
        return
    yield timer(Step(step.attend, step.sets, None), (FORWARD,))
    if step.do is not None:
        yield timer(Step(step.attend, step.sets, step.do), (BOTH,) if graph else (BACKWARD, BOTH))


def dense_attention(device: str, packing: dict) -> Attend:
    """Dense causal attention [B, T, H, D] or packed: the fork's own kernels on a GPU, PyTorch's on a CPU."""
    if not device.startswith("cuda"):
        return _dense_on_cpu(packing)
    from flash_attn.cute.interface import flash_attn_func, flash_attn_varlen_func

    if not packing:
        return lambda q, k, v: flash_attn_func(q, k, v, causal=True)[0]
    starts, longest = packing["cu_seqlens"].to(device), packing["max_seqlen"]
    where = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=longest, max_seqlen_k=longest)
    return lambda q, k, v: flash_attn_varlen_func(q, k, v, **where, causal=True)[0]


def _dense_on_cpu(packing: dict) -> Attend:
    def one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return o.transpose(-3, -2)

    def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        lengths = packing["cu_seqlens"].diff().tolist()
        parts = (one(*(x[None] for x in part))[0] for part in zip(*(x.split(lengths) for x in (q, k, v)), strict=True))
        return torch.cat(list(parts))

    return packed if packing else one
