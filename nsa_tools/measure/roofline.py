"""The roofline of each component of a call: bytes that must move, arithmetic, and the time that both take at least.

A floor counts each tensor that must be read or written once, and the pairs of a query and a key that are visible, at
rates which a GPU reaches in practice: a copy's for bytes, dense attention's for arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nsa_layer.config import BRANCHES
from nsa_layer.kernels.union_lists.sizes import words_of_entry
from nsa_layer.support import UNION_ROWS, reads_unions
from nsa_tools.measure.timing import milliseconds
from nsa_tools.shape import Shape

# Of one H200: device copy; dense causal attention, forward and backward.
H200 = dict(bytes_a_second=4.2e12, forward_flops=660e12, backward_flops=614e12)
FP32 = 4


@dataclass(frozen=True)
class Ceilings:
    """Rates that the device reaches: bytes and floating-point operations of attention in a second."""

    bytes_a_second: float
    forward_flops: float
    backward_flops: float

    def flops(self, direction: str) -> float:
        return self.backward_flops if direction == "backward" else self.forward_flops


@dataclass(frozen=True)
class Work:
    """Bytes that a component must move, and operations that it must make."""

    bytes: float
    flops: float = 0.0

    def is_compute_bound(self, at: Ceilings, direction: str) -> bool:
        return self.flops / at.flops(direction) > self.bytes / at.bytes_a_second

    def floor_ms(self, at: Ceilings, direction: str) -> float:
        """The longer of the two: moving overlaps computing."""
        return max(self.bytes / at.bytes_a_second, self.flops / at.flops(direction)) * 1e3


def ceilings(device: str, dtype: torch.dtype) -> Ceilings:
    """The documented rates on an H200, elsewhere those of a copy and of a matrix product, measured now."""
    gpu = device.startswith("cuda")
    if gpu and "H200" in torch.cuda.get_device_name(device):
        return Ceilings(**H200)
    size, n = (1 << 28, 8192) if gpu else (1 << 22, 256)
    x, a = torch.empty(size, dtype=torch.uint8, device=device), torch.randn(n, n, device=device).to(dtype)
    y = torch.empty_like(x)
    copy, product = (min(milliseconds(f, device) for _ in range(5)) / 1e3 for f in (lambda: y.copy_(x), lambda: a @ a))
    return Ceilings(2 * size / copy, 2 * n**3 / product, 2 * n**3 / product)


def visible_pairs(shape: Shape) -> dict[str, int]:
    """Pairs of a query and a key that a query head computes in each branch, over all sequences."""
    lengths = [shape.T] * shape.B if shape.lengths is None else shape.lengths
    branches = zip(BRANCHES, (("cmp", _compressed), ("slc", _selected), ("swa", _window)))
    of_call = [named for branch, named in branches if shape.config.computes(branch)]
    return {name: sum(count(length, shape) for length in lengths) for name, count in of_call}


def _compressed(T: int, shape: Shape) -> int:
    """Compressed key j is seen by the queries from ``j * stride + offset`` on."""
    config = shape.config
    Tc = min(config.compressed_length(T), max(0, (T - 1 - config.offset) // config.stride + 1))
    return Tc * (T - config.offset) - config.stride * (Tc * (Tc - 1) // 2)


def _selected(T: int, shape: Shape) -> int:
    """A tile's list is full, except for keys after the query."""
    config, l = shape.config, shape.config.block_size
    first = torch.arange(0, T, config.q_tile)
    rows = (T - first).clamp(max=config.q_tile)
    own = (first + rows + l - 1) // l - first // l
    # Earlier blocks, as many as there are and the list holds, and what precedes the tile in its first block.
    before = torch.minimum(first // l, config.list_width(T) - own).clamp(min=0) * l + first % l
    return int((rows * before + rows * (rows + 1) // 2).sum())


def _window(T: int, shape: Shape) -> int:
    w = min(shape.config.window_size, T)
    return w * (w + 1) // 2 + (T - w) * w


def work(shape: Shape, backend: str = "cute") -> dict[tuple[str, str], Work]:
    """By component and direction, for the directions of the call.

    Where the kernels take unions their backward of the selected branch is two passes. What unions of neighbours' lists
    add to the exact pairs is no work that has to be done.
    """
    s, e, config, gated = shape, shape.dtype.itemsize, shape.config, shape.gate == "weight"
    lengths = [s.T] * s.B if s.lengths is None else s.lengths
    tokens, blocks = sum(lengths), sum(map(config.compressed_length, lengths))
    tiles = sum(map(config.num_tiles, lengths))
    q, o, kv = tokens * s.Hq * s.D * e, tokens * s.Hq * s.Dv * e, tokens * s.Hkv * (s.D + s.Dv) * e
    kv_cmp, rows = blocks * s.Hkv * (s.D + s.Dv) * e, tokens * s.Hq * FP32
    lists = tiles * s.Hkv * config.list_width(max(lengths)) * 4
    scores = sum(config.num_tiles(length) * config.num_blocks(length) for length in lengths) * s.Hq * s.D
    pairs, scored = visible_pairs(s), blocks * s.Hkv * s.D * FP32
    means, q_chooses = kv_cmp + scored, q
    if s.index_dim:
        heads, Di = 1 if s.one_key else s.Hkv, s.index_dim
        scores = sum(length * (length + 1) // 2 for length in lengths) * s.Hkv * 2 * Di
        q_chooses, scored = tokens * s.Hkv * Di * e, tokens * heads * Di * e
    elif config.by_token:  # one more product of the compressed branch, with its rounded keys and its log-sum-exp
        scores, scored, means = 2 * pairs["cmp"] * s.Hq * s.D, blocks * s.Hkv * s.D * e + rows, kv_cmp
    keys = {"cmp": kv_cmp, "slc": kv, "swa": kv}
    floors = {
        ("compress", "forward"): Work(kv + means),
        ("compress", "backward"): Work(kv + kv_cmp),
        ("choose", "forward"): Work(q_chooses + scored + lists, scores),
        ("lists", "forward"): Work(2 * lists),
        ("lists", "backward"): Work(2 * lists),
        ("gate", "forward"): Work((1 + config.num_branches) * o + gated * q),
        ("gate", "backward"): Work((1 + config.num_branches) * o + gated * 2 * q + 2 * config.num_branches * rows),
        # dk and dv alone: the last call that adds to dq can round it.
        ("convert", "backward"): Work(kv / e * (FP32 + e)),
    }
    for name, count in pairs.items():
        floors[name, "forward"] = Work(q + o + keys[name] + rows, 2 * count * s.Hq * (s.D + s.Dv))
        floors[name, "backward"] = Work(2 * q + o + 2 * keys[name] + 2 * rows, 2 * count * s.Hq * (3 * s.D + 2 * s.Dv))
    if reads_unions(config, s.D, listed=False) and backend == "cute":
        # Unions cannot be shorter than one token's list; pairs are read from the lists, and written once.
        G = s.Hq // s.Hkv
        entries = sum(-(-length * G // UNION_ROWS) for length in lengths) * s.Hkv * config.list_width(max(lengths))
        unions = entries * 4 * (1 + words_of_entry(G, config.block_size))
        floors["lists", "forward"] = floors["lists", "backward"] = Work(lists + unions)
        pairs_of_tokens = tokens * s.Hkv * config.list_width(max(lengths)) * 4
        floors["pairs", "backward"] = Work(lists + pairs_of_tokens)
        # Two passes over the exact pairs: of backward's five products both make q . k and do . v.
        del floors["slc", "backward"]
        products = 2 * pairs["slc"] * s.Hq
        floors["slc_dq", "backward"] = Work(2 * q + o + kv + 2 * rows, products * (2 * s.D + s.Dv))
        floors["slc_dkdv", "backward"] = Work(q + o + 2 * kv + 2 * rows + pairs_of_tokens, products * 2 * (s.D + s.Dv))
    return {(name, way): work for (name, way), work in floors.items() if s.backward or way == "forward"}
