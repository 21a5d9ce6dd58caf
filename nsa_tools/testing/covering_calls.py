"""Calls that together launch the layer's kernels in every option that they are compiled for."""

from __future__ import annotations

import itertools

import torch

from nsa_layer.config import NSAConfig
from nsa_tools.shape import Shape

OPTIONS = {
    "dtype": (torch.bfloat16, torch.float16),
    "D": (128, 64),
    "heads": ((8, 2), (2, 2), (4, 1)),
    "causal": (True, False),
    "packed": (False, True),
    "T": (1000, 100),  # short sequences take other code paths
    "block_size": (64, 256),
    "deterministic": (False, True),
    "gate": ("weight", "given", "none"),
    "compress_weights": (False, True),
    "q_tile": (128, 1, 2, 64),
    "past": (0, 300),  # tokens of the keys before the queries, which then have `q_offset`
}
Combination = tuple[tuple[str, object], ...]


def all_calls() -> list[Shape]:
    """Steps of training in every combination of the options."""
    return list(map(_call, combinations()))


def covering_calls(*, strength: int = 2) -> list[Shape]:
    """A few of `all_calls` in which every pair of options meets, or every set of `strength` options."""
    return list(map(_call, covering(combinations(), strength)))


def combinations() -> list[Combination]:
    """Every combination of the options whose kernels are not those of another one."""
    every = (tuple(zip(OPTIONS, values)) for values in itertools.product(*OPTIONS.values()))
    return [options for options in every if _makes_sense(**dict(options))]


def covering(every: list[Combination], strength: int) -> list[Combination]:
    """Combinations that hold every set of `strength` options, chosen greedily in their order."""
    held = {options: frozenset(itertools.combinations(options, strength)) for options in every}
    missing, chosen = set().union(*held.values()), []
    while missing:
        chosen.append(max(held, key=lambda options: len(held[options] & missing)))
        missing -= held[chosen[-1]]
    return chosen


def _makes_sense(*, q_tile: int, past: int, gate: str, compress_weights: bool, **_: object) -> bool:
    """True unless queries at an offset would choose by tile, or the kernels are those of other combinations."""
    return (not past or q_tile == 1) and (not past and q_tile in (1, 128) or gate == "weight" and not compress_weights)


def _call(options: Combination) -> Shape:
    fields = dict(options)
    (Hq, Hkv), T, D = fields.pop("heads"), fields["T"], fields["D"]
    config = NSAConfig(**{name: fields.pop(name) for name in ("block_size", "deterministic", "q_tile")})
    lengths, past = (T - T // 3, T // 3) if fields.pop("packed") else None, fields.pop("past")
    if past:
        fields["keys"] = T + past * len(lengths or (T,))
        fields["lengths_k"] = None if lengths is None else tuple(length + past for length in lengths)
    return Shape(B=1, Hq=Hq, Hkv=Hkv, Dv=D, config=config, lengths=lengths, device="cuda", **fields)
