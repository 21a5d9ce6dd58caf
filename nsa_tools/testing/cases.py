"""Cases of the operator, their inputs, and what a backend gives for them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch

from nsa_layer.api import nsa
from nsa_layer.call import DIFFERENTIABLE, OWN_KEYS, Aux, Call, loss_of_sums
from nsa_layer.config import NSAConfig
from nsa_tools.shape import Shape
from nsa_tools.testing.pasteable import Pasteable

BRANCHES = ("cmp", "slc", "swa")
LSES = ("lse_cmp", "lse_slc", "lse_swa")
WEIGHTS = ("gate_weight", "gates", "compress_k_weight", "compress_v_weight")
DRAWN = (*WEIGHTS, "q", "k", "v", "do", *OWN_KEYS, "q_index", "k_index")  # in this order from a seed

# The name of one, or a function like `reference.attend`.
Backend = str | Callable[..., tuple[torch.Tensor, Aux]]


@dataclass(frozen=True, kw_only=True, repr=False)
class Case(Pasteable, Shape):
    """One call of the operator, inputs included; its repr is an expression that makes it again.

    Attributes:
        gate: as in `Shape`, or the branch that alone counts: "cmp", "slc" or "swa".
        seed: the inputs are drawn from it alone.
        integers: inputs are small integers, so that scores of blocks are exact in fp32.
    """

    B: int = 1
    T: int = 128
    Hq: int = 4
    Hkv: int = 2
    D: int = 16
    Dv: int | None = None
    dtype: torch.dtype = torch.float32
    config: NSAConfig = NSAConfig()
    index_loss: bool = True
    seed: int = 0
    integers: bool = False

    def __post_init__(self) -> None:
        if self.gate not in ("weight", "given", "none", *BRANCHES):
            raise ValueError(f"gate must be 'weight', 'given', 'none' or a branch, got {self.gate!r}")


@dataclass(frozen=True)
class Inputs:
    """The tensors of a call, and the gradient ``do`` of its output."""

    case: Case
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor
    gate_weight: torch.Tensor | None = None
    gates: torch.Tensor | None = None
    compress_k_weight: torch.Tensor | None = None
    compress_v_weight: torch.Tensor | None = None
    k_cmp: torch.Tensor | None = None
    v_cmp: torch.Tensor | None = None
    k_win: torch.Tensor | None = None
    v_win: torch.Tensor | None = None
    q_index: torch.Tensor | None = None
    k_index: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None

    def tensors(self, *others: str) -> dict[str, torch.Tensor]:
        """The differentiable inputs, and others, that there are, by name."""
        named = {name: getattr(self, name) for name in (*DIFFERENTIABLE, *others)}
        return {name: x for name, x in named.items() if x is not None}

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same values in another dtype."""
        return replace(self, **{name: x.to(dtype) for name, x in self.tensors("do").items()})

    def call(self, block_indices: torch.Tensor | None = None) -> Call:
        """The call, by lists or by a choice."""
        return Call(**self.tensors(), block_indices=block_indices, spec=self.case.spec)


@dataclass(frozen=True)
class Result:
    """A backend's results for some inputs: the output, `Aux`, a gradient of o and of the index' loss for every
    differentiable input, and that loss."""

    o: torch.Tensor
    aux: Aux
    grads: dict[str, torch.Tensor]
    index_loss: torch.Tensor | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that is compared in value, by name."""
        grads = {f"d{name}": grad for name, grad in self.grads.items()}
        found = {"o": self.o, "gates": self.aux.gates, **{name: getattr(self.aux, name) for name in LSES}, **grads}
        found |= {"index_loss": self.index_loss, "index_scores": self.aux.index_scores}
        return {name: x for name, x in found.items() if x is not None}


def make_inputs(case: Case, device: torch.device | str = "cpu") -> Inputs:
    """The inputs of a case: the same values on every device."""
    generator = torch.Generator().manual_seed(case.seed)

    def draw(shape: tuple[int, ...], scale: float) -> torch.Tensor:
        if case.integers:
            return torch.randint(-3, 4, shape, generator=generator).to(device, case.dtype)
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(device, case.dtype)

    sizes = dict(Dv=case.D if case.Dv is None else case.Dv, gate="given" if case.gate in BRANCHES else case.gate)
    shapes = replace(case, **sizes).tensor_shapes()
    shapes["do"] = (*shapes["q"][:-1], shapes["v"][-1])
    tensors: dict[str, torch.Tensor] = {}
    for name in (name for name in DRAWN if name in shapes):
        if name == "gates" and case.gate in BRANCHES:
            one = torch.tensor([float(branch == case.gate) for branch in BRANCHES])
            tensors[name] = one.expand(shapes[name]).contiguous().to(device, case.dtype)
        else:
            tensors[name] = draw(shapes[name], shapes[name][-1] ** -0.5 if name.endswith("weight") else 1.0)
    if case.lengths is not None:
        tensors["cu_seqlens"] = case.packing()["cu_seqlens"].to(device)
    return Inputs(case, **tensors)


def spoilt(inputs: Inputs, value: float, kept: Collection[int]) -> Inputs:
    """Packed sequences hold nothing but `value` in q, k, v and do, all but those `kept`."""
    tensors = {name: getattr(inputs, name).clone() for name in ("q", "k", "v", "do")}
    for x in tensors.values():
        for at, part in enumerate(x.split(inputs.case.lengths)):
            if at not in kept:
                part.fill_(value)
    return replace(inputs, **tensors)


def run(backend: Backend, inputs: Inputs, block_indices: torch.Tensor | None = None, **options: object) -> Result:
    """Forward and backward, through `nsa` for the name of a backend, or through an ``attend`` function."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.tensors().items()}
    case, tensors = inputs.case, dict(leaves, cu_seqlens=inputs.cu_seqlens, block_indices=block_indices)
    if isinstance(backend, str):
        static = dict(config=case.config, causal=case.causal, backend=backend, return_aux=True)
        o, aux, *loss = nsa(**tensors, **static, return_index_loss=case.index_dim > 0 and case.index_loss, **options)
    else:
        o, aux, *sums = backend(Call(**tensors, spec=case.spec), **options)
        loss = [loss_of_sums(x) for x in sums if x is not None]
    if (
        case.lengths is not None and block_indices is None and aux.block_indices is not None
    ):  # without the capacity for other lengths
        rows, width = sum(map(case.config.num_tiles, case.lengths)), case.config.list_width(max(case.lengths))
        of_lists = {name: getattr(aux, name) for name in ("block_indices", "index_scores")}
        aux = replace(aux, **{name: x if x is None else x[:rows, :, :width] for name, x in of_lists.items()})
    results, of_results = [o, *loss], [inputs.do, *map(torch.ones_like, loss)]
    grads = torch.autograd.grad(results, list(leaves.values()), of_results, materialize_grads=True)
    return Result(o.detach(), aux, dict(zip(leaves, grads, strict=True)), *(x.detach() for x in loss))
