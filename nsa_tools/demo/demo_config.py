"""`DemoConfig`: every option of the demo, with defaults for a CPU and for a GPU."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields

import torch

from nsa_layer.config import NSAConfig, require_int, require_one_of
from nsa_tools.shape import usable_device

DTYPES = ("float32", "bfloat16")

# A step takes about a second of one core for each model, so that both learn visibly within the budget.
CPU = dict(
    dtype="float32", seqlen=4096, batch=1, steps=300, minutes=2.5, dim=128, layers=2, heads=4, kv_heads=2,
    block_size=32, block_counts=8, q_tile=1, window_size=128, eval_every=25, eval_windows=4, sample_bytes=160,
    lr=3e-3, index_steps=100,
)  # fmt: skip
# The kernels take bf16 and a head dimension of 64; 32,768 tokens is where dense attention costs several times more.
GPU = dict(
    dtype="bfloat16", seqlen=32768, batch=1, steps=600, minutes=10.0, dim=512, layers=6, heads=8, kv_heads=2,
    block_size=64, block_counts=16, q_tile=1, window_size=512, eval_every=50, eval_windows=4, sample_bytes=400,
    lr=1e-3, index_steps=0,
)  # fmt: skip
EVERYWHERE = dict(warmup=60, threads=1, seed=0)
# What may differ between a run and its continuation: how long, not what.
MAY_CHANGE = ("steps", "minutes", "sample_bytes", "index_steps")


class DemoError(ValueError):
    """An argument, a file or a folder that the demo cannot use; the message says which and why."""


def _option(help: str) -> object:
    return field(metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Static options of a demo run; the values are checked at once.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field is out of range, or two do not fit each other.
    """

    text: tuple[str, ...] = _option("files to train on, instead of the standard library's source of this interpreter")
    device: str = _option('where to train, such as "cpu" or "cuda:0"; by default a GPU where there is one')
    dtype: str = _option("of the matrix products: " + ", ".join(DTYPES) + "; parameters are float32")
    seqlen: int = _option("length of a sequence, in tokens (a token is a byte)")
    batch: int = _option("sequences in a step")
    steps: int = _option("optimizer steps of each model")
    minutes: float = _option("stop training this many minutes after the start of the command; 0: no limit")
    dim: int = _option("width of the model")
    layers: int = _option("number of layers")
    heads: int = _option("query heads; the head dimension is dim / heads (64 and 128 are fastest)")
    kv_heads: int = _option("key/value heads")
    block_size: int = _option("tokens in a block of compression and selection")
    block_counts: int = _option("blocks selected for each query, or tile of queries")
    q_tile: int = _option("queries that share one choice of blocks; 1: each has its own")
    window_size: int = _option("tokens that the sliding window sees")
    eval_every: int = _option("steps between two evaluations on held-out text; each also writes the checkpoint")
    eval_windows: int = _option("held-out sequences in an evaluation")
    sample_bytes: int = _option("bytes of text that each model writes at the end; 0: none")
    index_steps: int = _option("steps that train an index of tokens for the dense model at the end; 0: none")
    lr: float = _option("largest learning rate of AdamW")
    warmup: int = _option("steps over which the learning rate rises; it falls as 1 / sqrt(step) afterwards")
    threads: int = _option("threads of each model on a CPU, where both train at the same time")
    seed: int = _option("of the initial parameters, the order of the data and the sampling")

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", tuple(str(path) for path in self.text))
        names = ("batch", "steps", "dim", "layers", "heads", "kv_heads", "warmup", "threads", "eval_every")
        least = dict.fromkeys((*names, "eval_windows"), 1) | dict(seqlen=2, sample_bytes=0, index_steps=0, seed=0)
        for name, smallest in least.items():
            require_int(name, getattr(self, name), least=smallest)
        for name in ("minutes", "lr"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name} must be a number, got {value!r}")
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be finite and not negative, got {value}")
        require_one_of("dtype", self.dtype, DTYPES)
        if self.dim % self.heads or self.dim // self.heads % 2:
            raise ValueError(f"dim / heads must be an even integer, got dim={self.dim}, heads={self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads, got kv_heads={self.kv_heads}, heads={self.heads}")
        self.nsa()

    @classmethod
    def for_device(cls, device: str | None = None, **given: object) -> DemoConfig:
        """The defaults for a device (None: a GPU where there is one), with some fields given.

        Raises:
            ValueError: there is no such device here.
        """
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        own = GPU if usable_device(device).type == "cuda" else CPU
        return cls(**(dict(text=(), **EVERYWHERE) | own | given), device=device)

    def nsa(self) -> NSAConfig:
        """The operator's options."""
        return NSAConfig(
            block_size=self.block_size, block_counts=self.block_counts, q_tile=self.q_tile, window_size=self.window_size
        )

    def chosen(self, rule: str) -> NSAConfig:
        """Options of attention to the blocks alone that a rule chooses."""
        return self.nsa() if rule == "nsa" else self.nsa().replace(rule="index", q_tile=1, branches=("selected",))

    def differences(self, saved: dict[str, object]) -> list[str]:
        """The options in which this differs from a saved one, those aside that a continuation may change."""
        mine = asdict(self) | {"text": list(self.text)}
        names = [f.name for f in fields(self) if f.name not in MAY_CHANGE]
        return [f"{name}: {saved.get(name)!r} -> {mine[name]!r}" for name in names if saved.get(name) != mine[name]]
