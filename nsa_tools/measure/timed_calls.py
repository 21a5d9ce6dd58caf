"""The calls that `bench` times: dense attention and the layer, forward, backward and both, or replayed from a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle

import torch

from nsa_layer.api import nsa
from nsa_tools.measure.timing import captured, lap_times, milliseconds, rotating
from nsa_tools.shape import Shape

FORWARD, BACKWARD, BOTH = "forward", "backward", "forward+backward"
VARIANTS = ("dense", "nsa", "gated")

Attend = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Variant:
    """One of `VARIANTS`: a function of q, k, v (and gate_weight), the sets of inputs that it rotates over, and do."""

    name: str
    attend: Attend
    sets: list[dict[str, torch.Tensor]]
    do: torch.Tensor | None


def gradients(
    outputs: torch.Tensor | tuple[torch.Tensor, torch.Tensor], inputs: dict[str, torch.Tensor], do: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of inputs: of o, weighted by do, and of an index' loss beside it; None for an input of neither."""
    o, *loss = outputs if isinstance(outputs, tuple) else (outputs,)
    return torch.autograd.grad([o, *loss], list(inputs.values()), [do, *[None] * len(loss)], allow_unused=True)


def forward_of(variant: Variant) -> Callable[[], torch.Tensor]:
    """Forward alone, without a graph for backward."""
    rotation = cycle(variant.sets)

    @torch.no_grad()
    def call() -> torch.Tensor:
        return variant.attend(**next(rotation))

    return call


class Step:
    """Forward and backward as in training, with nothing in between."""

    def __init__(self, variant: Variant, *, forward_too: bool = False) -> None:
        self.variant, self.rotation, self.forward_too = variant, cycle(variant.sets), forward_too

    def __call__(self, lap: Callable[[], None] = lambda: None) -> None:
        inputs = next(self.rotation)
        outputs = self.variant.attend(**inputs)
        lap()
        gradients(outputs, inputs, self.variant.do)

    def take(self, device: str) -> dict[str, float]:
        """Milliseconds by direction; of forward only where it is not timed on its own."""
        forward, backward = lap_times(self, device)
        shown = {FORWARD: forward} if self.forward_too else {}
        return shown | {BACKWARD: backward, BOTH: forward + backward}


class Timer:
    """A call whose time is that of one direction; with ``sets`` replayed from CUDA graphs, one for each of them."""

    def __init__(self, call: Callable[[], object], direction: str, *, sets: int = 0) -> None:
        graphs = [captured(call, warm_ups=0 if i else 2) for i in range(sets)]
        self.call, self.direction = rotating(graphs) if graphs else call, direction

    def __call__(self) -> None:
        self.call()

    def take(self, device: str) -> dict[str, float]:
        """Milliseconds by direction."""
        return {self.direction: milliseconds(self.call, device)}


def variants(shape: Shape, backend: str, *, sets: int) -> dict[str, Variant]:
    """Every variant by its name, on the same tensors."""
    inputs = [shape.inputs() for _ in range(sets)]
    alone = [{name: given[name] for name in ("q", "k", "v")} for given in inputs]
    plain = [{name: x for name, x in given.items() if name != "gate_weight"} for given in inputs]
    do, options = shape.output_gradient(), shape.options()

    def sparse(**tensors: torch.Tensor) -> torch.Tensor:
        return nsa(**tensors, **options, backend=backend)

    dense = dense_attention(shape.device, shape.packing())
    made = zip(VARIANTS, (dense, sparse, sparse), (alone, plain, inputs), strict=True)
    return {name: Variant(name, attend, given, do) for name, attend, given in made}


def timers(variant: Variant, *, graph: bool, once: bool = False) -> Iterator[tuple[str, Callable[[], Timer | Step]]]:
    """(direction, how to make it) for every timer of a variant; a failure of the timer is a row of that direction.

    Args:
        once: take forward from the step that is timed for backward, because each timing takes long.
    """
    if variant.do is not None and once and not graph:
        yield BOTH, lambda: Step(variant, forward_too=True)
        return
    sets = len(variant.sets) if graph else 0
    yield FORWARD, lambda: Timer(forward_of(variant), FORWARD, sets=sets)
    if variant.do is not None:
        yield BOTH, lambda: Timer(Step(variant), BOTH, sets=sets) if graph else Step(variant)


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


def is_out_of_memory(error: BaseException) -> bool:
    """True for errors of PyTorch's allocator, and of libraries that allocate on their own."""
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "out_of_memory" in text
