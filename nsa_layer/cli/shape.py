"""The shape that a command works on: its options, and inputs for it."""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, replace

import torch

from nsa_layer import support
from nsa_layer.cli.arguments import DTYPES, tokens
from nsa_layer.config import NSAConfig
from nsa_layer.devices import usable_device
from nsa_layer.policy import RECOMPUTE, MemoryPolicy

DEFAULTS = NSAConfig()
# (query heads, key/value heads) of the documented measurements.
PRESETS = {"A": (32, 8), "B": (64, 4)}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A call of `nsa`, but for its values.

    Attributes:
        T: tokens of a sequence; of all of them where they are packed.
        lengths: lengths of packed sequences, or None for a batch.
        policy: what the call may take of the GPU's memory.
    """

    B: int
    T: int
    Hq: int
    Hkv: int
    D: int
    Dv: int
    dtype: torch.dtype
    device: str
    config: NSAConfig
    lengths: tuple[int, ...] | None = None
    policy: MemoryPolicy = MemoryPolicy()

    def describe(self) -> str:
        """The shape in one line."""
        packed = "" if self.lengths is None else f" in {len(self.lengths)} packed sequences"
        return (
            f"B={self.B} T={self.T:,}{packed} Hq={self.Hq} Hkv={self.Hkv} D={self.D} Dv={self.Dv} {self.dtype_name()}"
        )

    def dtype_name(self) -> str:
        return next(name for name, full in DTYPES.items() if getattr(torch, full) is self.dtype)

    def tokens(self) -> tuple[int, ...]:
        """The leading dimensions: (B, T), or (total,) where packed."""
        return (self.B, self.T) if self.lengths is None else (self.T,)

    def inputs(self) -> dict[str, torch.Tensor]:
        """q, k, v and gate_weight, drawn from a fixed seed, all with gradients."""
        shapes = {
            "q": (*self.tokens(), self.Hq, self.D),
            "k": (*self.tokens(), self.Hkv, self.D),
            "v": (*self.tokens(), self.Hkv, self.Dv),
            "gate_weight": (self.Hq, 3, self.D),
        }
        generator = torch.Generator(self.device).manual_seed(0)
        return {name: self._draw(shape, generator).requires_grad_() for name, shape in shapes.items()}

    def output_gradient(self) -> torch.Tensor:
        """do, drawn from a fixed seed."""
        return self._draw((*self.tokens(), self.Hq, self.Dv), torch.Generator(self.device).manual_seed(1))

    def packing(self) -> dict[str, object]:
        """What `nsa` and dense attention have to be told about packed sequences; the starts on the CPU."""
        if self.lengths is None:
            return {}
        starts = torch.tensor([0, *self.lengths]).cumsum(0, dtype=torch.int32)
        return dict(cu_seqlens=starts, max_seqlen=max(self.lengths))

    def options(self) -> dict[str, object]:
        """The keyword arguments of `nsa` beside tensors and backend."""
        policy = {} if self.policy == MemoryPolicy() else {"memory": self.policy}
        return dict(config=self.config, **self.packing(), **policy)

    def dense_pairs(self) -> int:
        """Pairs of a query and a key, by which the time of dense attention grows."""
        return self.B * self.T**2 if self.lengths is None else sum(length**2 for length in self.lengths)

    def at(self, T: int) -> Shape:
        """The same with another number of tokens."""
        return replace(self, T=T, lengths=None if self.lengths is None else long_tailed(T, len(self.lengths)))

    def _draw(self, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)


def long_tailed(total: int, sequences: int, *, seed: int = 0) -> tuple[int, ...]:
    """Lengths of packed sequences that add up to `total`: most are short, a few hold most of the tokens."""
    if not 1 <= sequences <= total:
        raise ValueError(f"packed sequences must be at least 1 and at most the {total} tokens, got {sequences}")
    draw = random.Random(seed)
    weights = [draw.lognormvariate(0, 1.5) for _ in range(sequences)]
    lengths = [1 + int((total - sequences) * weight / sum(weights)) for weight in weights]
    lengths[lengths.index(max(lengths))] += total - sum(lengths)
    return tuple(lengths)


def add_shape_options(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, *, seqlen: list[int] | None, runs: bool = True
) -> None:
    """The options that `shapes` reads; sizes are counts, lengths are in tokens.

    runs: the command makes calls. Otherwise they are those of a GPU, wherever the command runs.
    """
    device = "cuda" if runs and torch.cuda.is_available() else "cpu"
    default = "" if seqlen is None else " (default: %(default)s)"
    parser.add_argument(
        "--seqlen", type=tokens, nargs="+", default=seqlen, help=f"lengths, in tokens, such as 64K{default}"
    )
    parser.add_argument("--batch", type=int, default=1, help="sequences (default: 1)")
    parser.add_argument(
        "--packed", type=int, metavar="N", help="N packed sequences of uneven lengths instead of a batch"
    )
    parser.add_argument("--shape", choices=PRESETS, default="A", help="heads: A 32 and 8, B 64 and 4 (default: A)")
    parser.add_argument("--heads", type=int, help="query heads (default: those of --shape)")
    parser.add_argument("--kv-heads", type=int, help="key/value heads (default: those of --shape)")
    parser.add_argument("--head-dim", type=int, default=128, help="of q and k (default: 128)")
    parser.add_argument("--head-dim-v", type=int, help="of v (default: --head-dim)")
    if runs:
        parser.add_argument("--dtype", choices=DTYPES, help="default: bf16 on a GPU, else fp32")
        parser.add_argument("--device", default=device, help="default: %(default)s")
        parser.add_argument("--backend", help="cute, eager or reference (default: what `nsa` takes)")
    else:
        parser.add_argument("--dtype", choices=("fp16", "bf16"), default="bf16", help="default: bf16")
        parser.set_defaults(device=device)
    parser.add_argument("--deterministic", action="store_true", help="of NSAConfig")
    for name in ("block_size", "block_counts", "q_tile", "window_size"):
        flag, default = "--" + name.replace("_", "-"), getattr(DEFAULTS, name)
        parser.add_argument(flag, type=int, default=default, help=f"of NSAConfig (default: {default})")
    parser.add_argument("--block-stride", type=int, help="of NSAConfig (default: --block-size)")
    parser.add_argument("--budget", type=float, metavar="GIB", help="of MemoryPolicy, in GiB (default: what is free)")
    parser.add_argument("--recompute", choices=RECOMPUTE, default="auto", help="of MemoryPolicy (default: auto)")


def shapes(given: argparse.Namespace) -> list[Shape]:
    """A shape for each length.

    Raises:
        ValueError: a size does not fit, or there is no such device.
    """
    names = ("block_size", "block_stride", "block_counts", "q_tile", "window_size", "deterministic")
    config = NSAConfig(**{name: getattr(given, name) for name in names})
    device = usable_device(given.device)
    dtype = getattr(torch, DTYPES[given.dtype or ("fp32" if device.type == "cpu" else "bf16")])
    Hq, Hkv = PRESETS[given.shape]
    Hq, Hkv = given.heads if given.heads is not None else Hq, given.kv_heads if given.kv_heads is not None else Hkv
    sizes = dict(B=given.batch, Hq=Hq, Hkv=Hkv, D=given.head_dim)
    sizes["Dv"] = given.head_dim if given.head_dim_v is None else given.head_dim_v
    for name, size in sizes.items() | {("T", T) for T in given.seqlen}:
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if Hq % Hkv:
        raise ValueError(f"--kv-heads must divide --heads, got {Hkv} and {Hq}")
    if given.packed is not None and given.batch != 1:
        raise ValueError(f"--packed is for sequences without a batch, got --batch {given.batch}")
    budget = None if given.budget is None else int(given.budget * (1 << 30))
    policy = MemoryPolicy(budget=budget, recompute=given.recompute)
    static = dict(dtype=dtype, device=given.device, config=config, policy=policy, **sizes)
    lengths = {T: None if given.packed is None else long_tailed(T, given.packed) for T in given.seqlen}
    return [Shape(T=T, lengths=lengths[T], **static) for T in given.seqlen]


def backend_of(shape: Shape, backend: str | None) -> str:
    """The backend that runs a training step of this shape.

    Raises:
        ValueError, NotImplementedError: it cannot run; the message says why.
    """
    device = torch.device(shape.device)
    options = dict(dtype=shape.dtype, D=shape.D, Dv=shape.Dv, config=shape.config, needs_grad=True)
    return support.choose_backend(backend, device=device, **options)
