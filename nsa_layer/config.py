"""The operator's static options in one frozen, hashable record."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

RULES = ("nsa", "seed")
LARGEST = 2**31 - 1  # positions are int32


@dataclass(frozen=True, kw_only=True)
class NSAConfig:
    """Static options of Native Sparse Attention (arXiv:2502.11089); the values are checked at once.

    Attributes:
        block_size: tokens in a block, ``l``; of compression and of selection.
        block_stride: tokens between the starts of compressed blocks, ``d``; a divisor of ``block_size``, which is what
            None stands for.
        block_counts: blocks listed per query tile, ``n``; forced blocks are listed even where there are more of them.
        q_tile: queries that share one choice of blocks; a multiple or a divisor of ``block_size``.
        window_size: tokens that the sliding window sees, the query's own included, ``w``.
        compress_offset: compressed key j is visible to query t iff ``j * block_stride + compress_offset <= t``.
            None: ``block_size - 1``, the first value that is causal. Smaller ones leak the future.
        force_blocks: always list block 0, the blocks of the tile's own tokens, and the block before them.
        deterministic: the same input gives the same bits twice, backward included.
        rule: how blocks are chosen. "nsa": causally, for each key/value head; "seed": as `NSAConfig.seed` has it.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field is out of range, or two do not fit each other.
    """

    block_size: int = 64
    block_stride: int | None = None
    block_counts: int = 16
    q_tile: int = 128
    window_size: int = 512
    compress_offset: int | None = None
    force_blocks: bool = True
    deterministic: bool = False
    rule: str = "nsa"

    def __post_init__(self) -> None:
        for name in ("block_size", "block_counts", "q_tile", "window_size"):
            require_int(name, getattr(self, name), least=1)
        if self.block_stride is not None:
            require_int("block_stride", self.block_stride, least=1)
        if self.compress_offset is not None:
            require_int("compress_offset", self.compress_offset, least=-LARGEST)
        for name in ("force_blocks", "deterministic"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {getattr(self, name)!r}")
        if self.rule not in RULES:
            raise ValueError(f"rule must be one of {', '.join(map(repr, RULES))}, got {self.rule!r}")
        if self.block_size % self.stride:
            raise ValueError(
                f"block_stride must divide block_size, got block_stride={self.stride}, block_size={self.block_size}"
            )
        if self.q_tile % self.block_size and self.block_size % self.q_tile:
            raise ValueError(
                f"q_tile must be a multiple or a divisor of block_size, got q_tile={self.q_tile}, "
                f"block_size={self.block_size}"
            )
        if self.rule == "seed" and (self.stride, self.offset, self.force_blocks) != (self.block_size, 0, False):
            raise ValueError(
                "rule='seed' needs block_stride=block_size, compress_offset=0 and force_blocks=False, got "
                f"{self.stride}, {self.offset} and {self.force_blocks}"
            )

    @property
    def stride(self) -> int:
        """Tokens between the starts of compressed blocks, ``d``."""
        return self.block_size if self.block_stride is None else self.block_stride

    @property
    def offset(self) -> int:
        """The compressed-causal offset in force."""
        return self.block_size - 1 if self.compress_offset is None else self.compress_offset

    def compressed_length(self, T: int) -> int:
        """Compressed keys of T tokens: complete blocks only."""
        return max(0, (T - self.block_size) // self.stride + 1)

    def num_blocks(self, T: int) -> int:
        """Selection blocks of T tokens, a short last one included."""
        return -(-T // self.block_size)

    def num_tiles(self, T: int) -> int:
        """Query tiles of T tokens."""
        return -(-T // self.q_tile)

    def list_width(self, T: int) -> int:
        """Width of a tile's list: ``block_counts``, or all forced blocks where they are more; at most all blocks."""
        own = max(1, self.q_tile // self.block_size)
        forced = own + 2 if self.force_blocks else 0
        return min(self.num_blocks(T), max(self.block_counts, forced))

    def replace(self, **changes: object) -> NSAConfig:
        """A copy with some fields changed, checked again."""
        return replace(self, **changes)

    @classmethod
    def seed(cls, **changes: object) -> NSAConfig:
        """The operator of the public block-sparse NSA seed, for comparison with it; it leaks the future.

        Each query head lists the ``block_counts`` complete blocks with the highest mean score over a tile's queries,
        among those that start at or before the tile's last token. On the reference and eager backends only.
        """
        return cls(**(dict(rule="seed", q_tile=256, compress_offset=0, force_blocks=False) | changes))

    @classmethod
    def from_dict(cls, values: dict[str, object]) -> NSAConfig:
        """The inverse of ``dataclasses.asdict``; an unknown key is a ValueError."""
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown:
            raise ValueError(f"unknown NSAConfig fields: {', '.join(unknown)}")
        return cls(**values)


def require_int(name: str, value: object, *, least: int) -> None:
    """Raise TypeError or ValueError, naming the argument, unless it is an int from `least` to `LARGEST`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r} ({type(value).__name__})")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if value > LARGEST:
        raise ValueError(f"{name} must be at most {LARGEST}, got {value}")
