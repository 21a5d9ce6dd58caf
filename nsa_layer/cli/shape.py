"""The shape that a command works on: its options, and inputs for it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

from nsa_layer import support
from nsa_layer.config import NSAConfig

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
DEFAULTS = NSAConfig()


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A call of `nsa`, but for its values."""

    B: int
    T: int
    Hq: int
    Hkv: int
    D: int
    Dv: int
    dtype: torch.dtype
    device: str
    config: NSAConfig

    def describe(self) -> str:
        """The shape in one line."""
        dtype = next(name for name, dtype in DTYPES.items() if dtype is self.dtype)
        return f"B={self.B} T={self.T:,} Hq={self.Hq} Hkv={self.Hkv} D={self.D} Dv={self.Dv} {dtype}"

    def inputs(self) -> dict[str, torch.Tensor]:
        """q, k, v and gate_weight, drawn from a fixed seed, all with gradients."""
        generator = torch.Generator(self.device).manual_seed(0)
        shapes = {
            "q": (self.B, self.T, self.Hq, self.D),
            "k": (self.B, self.T, self.Hkv, self.D),
            "v": (self.B, self.T, self.Hkv, self.Dv),
            "gate_weight": (self.Hq, 3, self.D),
        }
        options = dict(generator=generator, device=self.device, dtype=self.dtype, requires_grad=True)
        return {name: torch.randn(shape, **options) for name, shape in shapes.items()}


def add_shape_options(parser: argparse.ArgumentParser, *, seqlen: list[int]) -> None:
    """The options that `shapes` reads; sizes are counts, lengths are in tokens."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument(
        "--seqlen", type=int, nargs="+", default=seqlen, help="lengths, in tokens (default: %(default)s)"
    )
    parser.add_argument("--batch", type=int, default=1, help="sequences (default: 1)")
    parser.add_argument("--heads", type=int, default=32, help="query heads (default: 32)")
    parser.add_argument("--kv-heads", type=int, default=8, help="key/value heads (default: 8)")
    parser.add_argument("--head-dim", type=int, default=128, help="of q and k (default: 128)")
    parser.add_argument("--head-dim-v", type=int, help="of v (default: --head-dim)")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bf16 on a GPU, else fp32")
    parser.add_argument("--device", default=device, help="default: %(default)s")
    parser.add_argument("--backend", help="cute, eager or reference (default: what `nsa` takes)")
    for name in ("block_size", "block_counts", "q_tile", "window_size"):
        flag, default = "--" + name.replace("_", "-"), getattr(DEFAULTS, name)
        parser.add_argument(flag, type=int, default=default, help=f"of NSAConfig (default: {default})")


def shapes(given: argparse.Namespace) -> list[Shape]:
    """A shape for each length.

    Raises:
        ValueError: a size does not fit.
    """
    names = ("block_size", "block_counts", "q_tile", "window_size")
    config = NSAConfig(**{name: getattr(given, name) for name in names})
    dtype = DTYPES[given.dtype or ("fp32" if torch.device(given.device).type == "cpu" else "bf16")]
    sizes = dict(B=given.batch, Hq=given.heads, Hkv=given.kv_heads, D=given.head_dim)
    sizes["Dv"] = given.head_dim if given.head_dim_v is None else given.head_dim_v
    for name, size in sizes.items() | {("T", T) for T in given.seqlen}:
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if given.heads % given.kv_heads:
        raise ValueError(f"--kv-heads must divide --heads, got {given.kv_heads} and {given.heads}")
    return [Shape(T=T, dtype=dtype, device=given.device, config=config, **sizes) for T in given.seqlen]


def backend_of(shape: Shape, backend: str | None) -> str:
    """The backend that runs a training step of this shape.

    Raises:
        ValueError, NotImplementedError: it cannot run; the message says why.
    """
    device = torch.device(shape.device)
    options = dict(dtype=shape.dtype, D=shape.D, Dv=shape.Dv, config=shape.config, needs_grad=True)
    return support.choose_backend(backend, device=device, **options)
