"""The operator's static options in one frozen, hashable record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

RULES = ("nsa", "index", "seed")
BRANCHES = ("compressed", "selected", "window")
LARGEST = 2**31 - 1  # positions are int32
LONGEST_BLOCK = 1 << 20  # tokens
WIDEST_TILE = 256
LEAST = dict.fromkeys(("block_size", "block_counts", "q_tile", "compress_size", "compress_stride"), 1)
LEAST |= dict(window_size=0, init_blocks=0, local_blocks=0, compress_offset=-LARGEST)


@dataclass(frozen=True, kw_only=True)
class NSAConfig:
    """Static options of Native Sparse Attention (arXiv:2502.11089); the values are checked at once.

    Attributes:
        block_size: tokens in a block of selection, ``l'``; at most 2**20, as in one of compression.
        compress_size: tokens in a block of compression, ``l``. None: ``block_size``, which it is for every ``q_tile``
            above 1.
        compress_stride: tokens between the starts of compressed blocks, ``d``; a divisor of ``compress_size``, which is
            what None stands for, and of ``block_size``.
        block_counts: blocks listed per query, or tile of queries, ``n``.
        q_tile: queries that share one choice of blocks: 1, each chooses for itself; or a power of two up to 256 that
            is a multiple or a divisor of ``block_size``, an approximation; with lists of the caller's for the selected
            branch alone, any.
        window_size: tokens that the sliding window sees, the query's own included, ``w``. 0: no window branch.
        compress_offset: compressed key j is visible to query t iff ``j * compress_stride + compress_offset <= t``.
            None: ``compress_size - 1``, the first value that is causal. Smaller ones leak the future.
        init_blocks: first blocks of the sequence that are always listed, once they have begun.
        local_blocks: last blocks that are always listed: the tile's own and ``local_blocks - 1`` before; 0: none. Where
            all these exceed ``block_counts``, the own block goes first, then newer before older. With 0 for both the
            own block is chosen like any other.
        deterministic: the same input gives the same bits twice, backward included.
        rule: how blocks are selected. "nsa": causally, for each key/value head, by the compressed branch; "index": by
            the largest score of a token of the block with ``q_index`` and ``k_index``, as in MiniMax-M3; "seed": as
            `NSAConfig.seed` has it.
        branches: that are computed, any of "compressed", "selected" and "window", kept in this order.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field is out of range, or two do not fit each other.

    Example:
        >>> NSAConfig(block_counts=8, window_size=256).compressed_length(1024)
        16
    """

    block_size: int = 64
    compress_size: int | None = None
    compress_stride: int | None = None
    block_counts: int = 16
    q_tile: int = 1
    window_size: int = 512
    compress_offset: int | None = None
    init_blocks: int = 1
    local_blocks: int = 2
    deterministic: bool = False
    rule: str = "nsa"
    branches: tuple[str, ...] = BRANCHES

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            if (value := getattr(self, name)) is not None or not name.startswith("compress"):
                require_int(name, value, least=least)
        require_int("init_blocks + local_blocks", self.init_blocks + self.local_blocks, least=0)
        require_bools(deterministic=self.deterministic)
        require_one_of("rule", self.rule, RULES)
        self._check_branches()
        stride = self.stride
        for name, size in (("block_size", self.block_size), ("compress_size", self.span)):
            if size > LONGEST_BLOCK:
                raise ValueError(f"{name} must be at most {LONGEST_BLOCK} tokens, got {size}")
            if size % stride:
                raise ValueError(f"compress_stride must divide {name}, got compress_stride={stride}, {name}={size}")
        self._check_tile()

    def _check_branches(self) -> None:
        if not isinstance(self.branches, (tuple, list)):
            raise TypeError(f"branches must be a tuple of str, got {self.branches!r}")
        named = tuple(name for name in BRANCHES if name in self.branches)
        if not named or len(named) != len(self.branches):
            raise ValueError(
                f"branches must be some of {', '.join(map(repr, BRANCHES))}, each once, got {self.branches}"
            )
        object.__setattr__(self, "branches", named)
        if not self.num_branches:
            raise ValueError("branches=('window',) needs a window, got window_size=0")
        if self.rule == "seed" and named != BRANCHES:
            raise ValueError(f"rule='seed' needs all branches, got {named}")
        if self.rule == "index" and "selected" not in named:
            raise ValueError(f"rule='index' chooses blocks of the selected branch, got branches={named}")
        if self.rule == "index" and self.q_tile != 1:
            raise ValueError(f"rule='index' needs q_tile=1, got {self.q_tile}")

    def _check_tile(self) -> None:
        if self.q_tile > WIDEST_TILE or self.q_tile & (self.q_tile - 1):
            raise ValueError(f"q_tile must be 1 or a power of two up to {WIDEST_TILE}, got {self.q_tile}")
        if self.branches != ("selected",) and self.q_tile % self.block_size and self.block_size % self.q_tile:
            raise ValueError(
                f"q_tile must be a multiple or a divisor of block_size, got q_tile={self.q_tile}, "
                f"block_size={self.block_size}"
            )
        forced = (self.init_blocks, self.local_blocks)
        if self.rule == "seed" and (self.stride, self.offset, *forced) != (self.block_size, 0, 0, 0):
            raise ValueError(
                "rule='seed' needs compress_stride=block_size and 0 for compress_offset, init_blocks and local_blocks, "
                f"got {self.stride}, {self.offset}, {self.init_blocks} and {self.local_blocks}"
            )
        if self.span != self.block_size and not self.by_token:
            raise ValueError(
                f"compress_size other than block_size needs q_tile=1 and rule='nsa', got compress_size={self.span}, "
                f"block_size={self.block_size}, q_tile={self.q_tile}, rule={self.rule!r}"
            )

    @property
    def span(self) -> int:
        """Tokens in a block of compression, ``l``."""
        return self.block_size if self.compress_size is None else self.compress_size

    @property
    def stride(self) -> int:
        """Tokens between the starts of compressed blocks, ``d``."""
        return self.span if self.compress_stride is None else self.compress_stride

    @property
    def offset(self) -> int:
        """The compressed-causal offset in force."""
        return self.span - 1 if self.compress_offset is None else self.compress_offset

    @property
    def num_branches(self) -> int:
        """Number of computed branches: a window of 0 tokens is not."""
        return sum(map(self.computes, BRANCHES))

    def computes(self, branch: str) -> bool:
        """True if a branch is computed: one of ``branches``, and a window has tokens."""
        return branch in self.branches and (branch != "window" or self.window_size > 0)

    def of_branches(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """The values, of one for each of `BRANCHES`, of the branches that are there."""
        return tuple(x for x, name in zip(values, BRANCHES, strict=True) if name in self.branches)

    @property
    def window_reach(self) -> int:
        """Tokens that the sliding window sees before the query's own."""
        return max(0, self.window_size - 1)

    @property
    def by_token(self) -> bool:
        """True if each query chooses its own blocks."""
        return self.q_tile == 1 and self.rule != "seed"

    def require_choice_by_token(self, asked: str = "q_offset") -> None:
        """Raise NotImplementedError where queries apart from the rest of their sequence cannot choose blocks."""
        if not self.by_token:
            raise NotImplementedError(
                f"{asked} with q_tile={self.q_tile}, rule={self.rule!r}: a choice belongs to a tile, and its queries "
                "may not all be there; use q_tile=1, or give block_indices"
            )

    @property
    def chooses_own(self) -> bool:
        """True if a causal tile's own blocks, which are not complete, are candidates: an index scores them; else they
        are where no block is forced."""
        return self.rule == "index" or self.rule == "nsa" and not self.init_blocks and not self.local_blocks

    @property
    def forces_too_many(self) -> bool:
        """True if a tile may have more forced blocks than a list has entries."""
        in_tile = max(1, self.q_tile // self.block_size) - 1 if self.local_blocks else 0
        return self.init_blocks + self.local_blocks + in_tile > self.block_counts

    def compressed_length(self, T: int | torch.SymInt | torch.Tensor) -> int | torch.SymInt | torch.Tensor:
        """Compressed keys of T tokens: complete blocks only."""
        count = (T - self.span) // self.stride + 1
        if isinstance(count, torch.Tensor):
            return count.clamp(min=0)
        return max(0, count) if isinstance(count, int) else torch.sym_max(0, count)

    def compressed_capacity(self, total: int) -> int:
        """Compressed keys, at most, of packed sequences with this number of tokens in all."""
        return total // self.stride

    def most_completed(self, T: int) -> int:
        """Compressed keys that T tokens complete at most, at any position."""
        return -(-T // self.stride)

    def num_blocks(self, T: int) -> int:
        """Selection blocks of T tokens, a short last one included."""
        return -(-T // self.block_size)

    def num_tiles(self, T: int, sequences: int = 1) -> int:
        """Query tiles of T tokens; the most of this many packed sequences with T tokens in all."""
        return -(-T // self.q_tile) + (sequences - 1 if self.q_tile > 1 else 0)

    def list_width(self, T: int) -> int:
        """Width of the lists of T tokens: ``block_counts``, at most all blocks."""
        count, most = self.num_blocks(T), self.block_counts
        if isinstance(count, int):
            return min(count, most)
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # of graphs alone: it imports sympy

        # A number where all lengths of the graph have this many blocks: PyTorch 2.15 needs it.
        return most if statically_known_true(count >= most) else torch.sym_min(count, most)

    def replace(self, **changes: object) -> NSAConfig:
        """A copy with some fields changed; TypeError or ValueError as for the class.

        Example:
            >>> NSAConfig().replace(q_tile=128).q_tile
            128
        """
        return replace(self, **changes)

    @classmethod
    def paper(cls, **changes: object) -> NSAConfig:
        """The sizes of arXiv:2502.11089, with changes: means of 32 tokens every 16, 16 blocks of 64 for each token.

        Example:
            >>> NSAConfig.paper().compressed_length(1024)
            63
        """
        return cls(**(dict(compress_size=32, compress_stride=16, q_tile=1) | changes))

    @classmethod
    def seed(cls, **changes: object) -> NSAConfig:
        """The operator of the public block-sparse NSA seed, for comparison with it; it leaks the future.

        Each query head lists the ``block_counts`` complete blocks with the highest mean score over a tile's queries,
        among blocks that start at or before the tile's last token. On the reference and eager backends only.

        Example:
            >>> NSAConfig.seed(block_counts=4).q_tile
            256
        """
        fixed = dict(rule="seed", q_tile=256, compress_offset=0, init_blocks=0, local_blocks=0)
        return cls(**(fixed | changes))

    @classmethod
    def from_dict(cls, values: dict[str, object]) -> NSAConfig:
        """The inverse of ``dataclasses.asdict``, of dictionaries of older versions too: one without ``compress_size``
        was written when tiles of 128 were the default, which it means by no ``q_tile``.

        Raises:
            TypeError, ValueError: no dictionary of names, an unknown key, a field under two names, or a bad value.

        Example:
            >>> NSAConfig.from_dict(dataclasses.asdict(NSAConfig(q_tile=128))).q_tile
            128
        """
        if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
            raise TypeError(f"values must be a dict of NSAConfig fields by name, got {values!r}")
        new = {} if "compress_size" in values else dict(q_tile=OLD_TILE)
        for old, names in RENAMED.items():
            if old in values and (both := [name for name in names if name in values]):
                raise ValueError(f"{old} is the old name of {' and '.join(names)}, got it beside {both[0]}")
        if "block_stride" in values:
            new["compress_stride"] = values["block_stride"]
        if "force_blocks" in values:
            require_bools(force_blocks=values["force_blocks"])
            new |= zip(RENAMED["force_blocks"], (1, 2) if values["force_blocks"] else (0, 0))
        new |= {name: value for name, value in values.items() if name not in RENAMED}
        if unknown := sorted(name for name in new if name not in CONFIG_FIELDS):
            raise ValueError(f"values must be fields of NSAConfig, got {', '.join(unknown)}")
        return cls(**new)


CONFIG_FIELDS = tuple(f.name for f in fields(NSAConfig))  # Dynamo cannot ask a class for them
# Of dictionaries of older versions: fields under other names, and the default q_tile where none had compress_size.
RENAMED = {"block_stride": ("compress_stride",), "force_blocks": ("init_blocks", "local_blocks")}
OLD_TILE = 128


def require_int(name: str, value: object, *, least: int) -> None:
    """Raise TypeError or ValueError, naming the argument, unless it is an int from `least` to `LARGEST`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r} ({type(value).__name__})")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if value > LARGEST:
        raise ValueError(f"{name} must be at most {LARGEST}, got {value}")


def require_sizes(**sizes: object) -> None:
    """Raise TypeError or ValueError, naming the argument, unless each is an int of at least 1."""
    for name, size in sizes.items():
        require_int(name, size, least=1)


def require_one_of(name: str, value: object, known: Iterable[object]) -> None:
    """Raise ValueError, naming the argument, unless it is a known value."""
    if value not in list(known):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")


def require_bools(**flags: object) -> None:
    """Raise TypeError, naming the argument, for one that is no bool."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be a bool, got {value!r}")
