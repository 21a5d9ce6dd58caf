"""The shape of a call that a command makes, and inputs drawn for it."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import torch

from nsa_layer.call import Call, CallSpec, Signature
from nsa_layer.checks import starts_of_lengths
from nsa_layer.config import NSAConfig
from nsa_layer.cute.memory_plan import MemoryPolicy, Sizes, plan_memory
from nsa_layer.cute.padding import padded
from nsa_layer.warm_up.api import argument_shapes

DATA = ("smooth", "random")
# Tokens from one value of the slow part to the next, and the variance of the part that every token draws anew. With
# them 4, 8, 16 and 32 neighbours choose 1.3, 1.6, 2.0 and 2.8 times as many blocks together as one of them (16 of 1,024
# blocks, 16 or 4 heads a group).
SMOOTH = {"q": (40, 0.015), "k": (256, 0.02)}
SLICE = 1 << 26  # elements that are smoothed at a time
# Names on the command line, and PyTorch's.
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A call of `nsa` on a device, without its tensors.

    Attributes:
        T: tokens of a sequence; of all sequences if packed.
        lengths: of packed sequences; None for a batch.
        policy: without a budget all heads go in one group, whatever the GPU has free.
        gate: "weight" (``gate_weight``), "given" (``gates``) or "none".
        compress_weights: with ``compress_k_weight`` and ``compress_v_weight``, but for keys of a branch's own.
        own_keys: branches' own keys and values, of `OWN_KEYS`.
        backward: backward too.
        lists: (heads, blocks) of ``block_indices``.
        index_dim: of an index, for ``rule="index"``; one_key: its keys are the same for all lists; index_loss: with its
            loss.
        keys: of a sequence, packed of all, where queries have an offset among them; lengths_k: of packed sequences.
        data: "random": every element of the inputs is drawn anew; "smooth": q and k change slowly along the sequence,
            so that neighbours choose about as many blocks together as those of a trained model.
    """

    B: int
    T: int
    Hq: int
    Hkv: int
    D: int
    Dv: int
    dtype: torch.dtype
    config: NSAConfig
    lengths: tuple[int, ...] | None = None
    policy: MemoryPolicy = MemoryPolicy()
    causal: bool = True
    gate: str = "weight"
    compress_weights: bool = False
    own_keys: tuple[str, ...] = ()
    backward: bool = True
    lists: tuple[int, int] | None = None
    index_dim: int = 0
    one_key: bool = False
    index_loss: bool = False
    keys: int | None = None
    lengths_k: tuple[int, ...] | None = None
    device: str = "cuda"
    data: str = "random"

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """By argument of `nsa`: q, k and v [B, T, H, D], or [total, H, D] if packed, and the weights."""
        T = self.T if self.lengths is None else sum(self.lengths)
        S = T if self.keys is None else self.keys
        tokens, keys = ((self.B, n) if self.lengths is None else (n,) for n in (T, S))
        sizes, config = (self.Hq, self.Hkv, self.D, self.Dv), self.config
        of_gates = dict(gate=self.gate, projected=self.compress_weights, branches=len(config.branches))
        shapes = argument_shapes(tokens, keys, *sizes, **of_gates)
        if self.index_dim:
            heads = dict(q_index=self.Hkv, k_index=1 if self.one_key else self.Hkv)
            shapes |= {name: (*shapes[name[0]][:-2], of_name, self.index_dim) for name, of_name in heads.items()}
        count = config.compressed_length
        blocks = (self.B, count(S)) if self.lengths is None else (sum(map(count, self.lengths_k or self.lengths)),)
        for name in self.own_keys:
            shape = shapes[name[0]]
            shapes[name] = (*blocks, *shape[-2:]) if name.endswith("cmp") else shape
            if name.endswith("cmp"):
                shapes.pop(f"compress_{name[0]}_weight", None)
        return shapes

    @property
    def spec(self) -> CallSpec:
        """The static side of the call, as backends take it."""
        lengths = self.lengths, self.lengths_k
        by_index = dict(index_scale=self.index_dim**-0.5, index_loss=self.index_loss) if self.index_dim else {}
        return CallSpec(self.config, self.causal, self.D**-0.5, *lengths, listed=self.lists is not None, **by_index)

    def call(self) -> Call:
        """The call, without values, lists of the caller's and offsets of the queries included."""
        shapes = {name: (shape, self.dtype) for name, shape in self.tensor_shapes().items()}
        if self.lists is not None:
            tiles = [self.config.num_tiles(T) for T in self.lengths or (self.T,)]
            lead = (self.B, *tiles) if self.lengths is None else (sum(tiles),)
            shapes["block_indices"] = ((*lead, *self.lists), torch.int32)
        if self.keys is not None:
            shapes["q_offset"] = ((len(self.lengths or range(self.B)),), torch.int32)
        tensors = {name: torch.empty(of, dtype=kind, device="meta") for name, (of, kind) in shapes.items()}
        return Call(**tensors, spec=self.spec)

    def sizes(self) -> Sizes:
        """The sizes that predictions of memory depend on."""
        return Sizes.of(self.call(), needs_grad=self.backward)

    def signature(self) -> Signature:
        """The call without its numbers, as a compile job."""
        plan = plan_memory(self.sizes(), self.policy, torch.device("cpu"))
        return Signature.of(padded(self.call(), needs_grad=self.backward), plan, backward=self.backward)

    def describe(self) -> str:
        """The shape in one line."""
        packed = "" if self.lengths is None else f" in {len(self.lengths)} packed sequences"
        heads = f"Hq={self.Hq} Hkv={self.Hkv} D={self.D} Dv={self.Dv}"
        return f"B={self.B} T={self.T:,}{packed} {heads} {self.dtype_name()}"

    def dtype_name(self) -> str:
        return next(name for name, full in DTYPES.items() if getattr(torch, full) is self.dtype)

    def inputs(self) -> dict[str, torch.Tensor]:
        """Tensors and weights drawn from a fixed seed, all with gradients."""
        generator = torch.Generator(self.device).manual_seed(0)
        made = {name: self._draw(shape, generator) for name, shape in self.tensor_shapes().items()}
        if self.data == "smooth":
            for name, (period, noise) in SMOOTH.items():
                smooth_(made[name], period, noise, generator)
            if self.index_dim:  # as a model's projections start
                heads = made["k_index"].shape[-2]
                made["q_index"] = made["q"].unflatten(-2, (self.Hkv, -1)).mean(-2)[..., : self.index_dim].contiguous()
                made["k_index"] = made["k"][..., :heads, : self.index_dim].contiguous()
        return {name: x.requires_grad_() for name, x in made.items()}

    def output_gradient(self) -> torch.Tensor | None:
        """do, drawn from a fixed seed; None without backward."""
        if not self.backward:
            return None
        return self._draw((*self.tensor_shapes()["q"][:-1], self.Dv), torch.Generator(self.device).manual_seed(1))

    def packing(self) -> dict[str, object]:
        """The arguments of `nsa` and of dense attention for packed sequences, with starts on the CPU."""
        if self.lengths is None:
            return {}
        return dict(cu_seqlens=starts_of_lengths(self.lengths), max_seqlen=max(self.lengths, default=0))

    def options(self) -> dict[str, object]:
        """The arguments of `nsa` beside tensors and backend."""
        policy = {} if self.policy == MemoryPolicy() else {"memory": self.policy}
        loss = dict(return_index_loss=True) if self.index_loss else {}
        return dict(config=self.config, **self.packing(), **policy, **loss)

    def dense_pairs(self) -> int:
        """Pairs of a query and a key, by which the time of dense attention grows."""
        return self.B * self.T**2 if self.lengths is None else sum(length**2 for length in self.lengths)

    def at(self, T: int) -> Shape:
        """The same with another number of tokens."""
        return replace(self, T=T, lengths=None if self.lengths is None else long_tailed(T, len(self.lengths)))

    def _draw(self, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)


def smooth_(x: torch.Tensor, period: int, noise: float, generator: torch.Generator) -> None:
    """Keep `noise` of the variance of x [..., T, H, D], and let the rest pass from one draw to the next in `period`
    tokens."""
    for sequence in x.flatten(0, -4) if x.dim() > 3 else (x,):
        T, H, D = sequence.shape
        knots = torch.randn(-(-T // period) + 1, H, D, generator=generator, device=x.device, dtype=x.dtype)
        for begin in range(0, T, max(1, SLICE // (H * D))):
            part = sequence[begin : begin + max(1, SLICE // (H * D))]
            t = torch.arange(begin, begin + len(part), device=x.device)
            knot, turn = t // period, (t % period * (math.pi / 2 / period)).view(-1, 1, 1)
            slow = knots[knot] * turn.cos() + knots[knot + 1] * turn.sin()
            part.mul_(math.sqrt(noise)).add_(slow, alpha=math.sqrt(1 - noise))


def long_tailed(total: int, sequences: int, *, seed: int = 0) -> tuple[int, ...]:
    """Log-normal lengths of packed sequences that add up to `total`: most are short, a few hold most of the tokens."""
    if not 1 <= sequences <= total:
        raise ValueError(f"packed sequences must be at least 1 and at most the {total} tokens, got {sequences}")
    draw = random.Random(seed)
    weights = [draw.lognormvariate(0, 1.5) for _ in range(sequences)]
    lengths = [1 + int((total - sequences) * weight / sum(weights)) for weight in weights]
    lengths[lengths.index(max(lengths))] += total - sum(lengths)
    return tuple(lengths)


def usable_device(name: str) -> torch.device:
    """The device of this name, such as "cpu" or "cuda:0", or ValueError; nothing is allocated on a GPU."""
    try:
        device = torch.device(name)
        if device.type == "cuda":
            torch.cuda.get_device_properties(device)
        else:
            torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device must be one that PyTorch can use here, got {name!r}: {reason}") from error
    return device
