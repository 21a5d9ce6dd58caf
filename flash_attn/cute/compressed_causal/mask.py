"""Compressed-causal masking: key j is visible to query t iff j * factor + offset <= t.

Key j stands for the tokens up to j * factor + offset. Positions count from each sequence's start, in packed sequences
too; offsets may be negative, for queries that are the last of a longer context, also by sequence on the device
(q_offset). Visible keys are a prefix of the keys and visible rows a suffix of the rows, so the tiles to visit are
ranges. Kernels take factor and offset as run-time values: one compiled kernel serves them all.
"""

from numbers import Integral
from typing import Any, NamedTuple, Optional

import cutlass
from cutlass import Int32, Int64, const_expr
from cutlass.cute import FastDivmodDivisorV2

# Row and key arithmetic is 32-bit: a tile's worth of keys times the factor has to fit beside a row.
MAX_FACTOR = 1 << 22
MAX_OFFSET = 1 << 29


class CompressArgs(NamedTuple):
    """Factor and offset on their way into a compiled kernel."""

    factor: int | Int32
    offset: int | Int32

    def traced(self) -> "CompressArgs":
        """The same as an example argument for the compiler: run-time values, not constants."""
        return CompressArgs(Int32(self.factor), Int32(self.offset))

    def of_last(self, queries: int, keys: int) -> "CompressArgs":
        """The same for queries that are the last of all tokens that keys stand for, where the host does not know."""
        return self._replace(offset=self.offset - max(0, keys * self.factor - queries))


def compression(causal: bool, factor: int, offset: int, by_sequence: bool = False) -> Optional[CompressArgs]:
    """The arguments as the kernels take them; None for (1, 0), which is the path without compression.

    by_sequence: causal queries have an offset for each sequence, also with (1, 0), where they are counted from 0 then.

    Raises:
        TypeError, ValueError: the pair is not two integers in range, or is not (1, 0) without causal=True.
    """
    for name, value in (("compress_factor", factor), ("compress_offset", offset)):
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{name} must be an int, got {value!r} ({type(value).__name__})")
    if not 1 <= factor <= MAX_FACTOR:
        raise ValueError(f"compress_factor must be in 1 .. {MAX_FACTOR}, got {factor}")
    if abs(offset) > MAX_OFFSET:
        raise ValueError(f"compress_offset must be in -{MAX_OFFSET} .. {MAX_OFFSET}, got {offset}")
    if (factor, offset) == (1, 0) and not (causal and by_sequence):
        return None
    if not causal:
        raise ValueError(
            f"compress_factor={factor}, compress_offset={offset} need causal=True: they say where the "
            "causal mask's edge runs"
        )
    return CompressArgs(int(factor), int(offset))


# What compressed-causal masking cannot be combined with, and what to do instead.
UNSUPPORTED = {
    "window_size": "a window has no meaning on keys that stand for blocks; write it as a mask_mod",
    "qv": "the MLA kernels do not implement it",
    "sm80": "only SM90 and SM100 kernels implement it",
    "sm120": "only SM90 and SM100 kernels implement it",
}


def refuse_unsupported(compress: Optional[CompressArgs], arch: int, **asked: bool) -> None:
    """Check a call against UNSUPPORTED; `asked` says which of its features the call uses."""
    if compress is None:
        return
    asked = {**asked, "sm80": arch // 10 == 8, "sm120": arch // 10 == 12}
    for feature, why in UNSUPPORTED.items():
        if asked.get(feature, False):
            raise NotImplementedError(
                f"compress_factor={compress.factor}, compress_offset={compress.offset} together with "
                f"{feature} (sm_{arch}): {why}"
            )


class CompressedCausal(NamedTuple):
    """Factor and offset inside a kernel; BlockInfo and AttentionMask ask it for their limits."""

    divisor: FastDivmodDivisorV2  # by factor; carries the factor itself too
    offset: Int32
    shares: tuple = ()  # SM90 backward's `QueryShares`, where several CTAs share a key tile

    @staticmethod
    def create(compress: Optional[CompressArgs], shares: Optional[tuple] = None) -> Optional["CompressedCausal"]:
        """On the host, once a launch; None stays None."""
        if compress is None:
            return None
        divisor = FastDivmodDivisorV2(Int32(compress.factor))
        return CompressedCausal(divisor, Int32(compress.offset), shares if shares is not None else ())

    def of(self, seqlen: Any) -> "CompressedCausal":
        """The same for the rows of a sequence (`SeqlenInfoQK`), which may have an offset of its own."""
        if const_expr(seqlen.q_offset is None):
            return self
        return self._replace(offset=self.offset - seqlen.q_offset)

    @property
    def factor(self) -> Int32:
        return Int32(self.divisor.divisor)

    def keys_seen_by(self, row: Int32) -> Int32:
        """Number of keys that query `row` sees, were there no end of the keys: it sees 0 .. this - 1.

        Adding the factor before dividing adds 1, and keeps what a row before the first visible key gives from being
        negative.
        """
        return cutlass.max(row - self.offset + self.factor, 0) // self.divisor

    def first_row_seeing(self, key: Int32, at_most: Int32) -> Int32:
        """The first query that sees `key`, negative where even earlier ones would, or `at_most` where that is less.

        Keys may reach so far beyond those that any row sees that their rows do not fit 32 bits.
        """
        row = Int64(key) * Int64(self.factor) + Int64(self.offset)
        return Int32(cutlass.min(row, Int64(at_most)))
