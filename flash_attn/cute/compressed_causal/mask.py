"""Compressed-causal masking: key j is visible to query t iff j * factor + offset <= t.

Key j stands for the tokens up to j * factor + offset. Positions count from each sequence's start, in packed sequences
too; offsets may be negative, for queries that are the last of a longer context, or given per sequence on the device
(q_offset). Visible keys are a prefix and visible rows a suffix, so the tiles to visit are ranges. Factor and offset are
run-time values of a kernel: one compilation serves them all.
"""

from numbers import Integral
from typing import Any, NamedTuple, Optional

import cutlass
from cutlass import Int32, Int64, const_expr
from cutlass.cute import FastDivmodDivisorV2

# Row and key arithmetic is 32-bit: a tile of keys times the factor, plus a row, has to fit.
MAX_FACTOR = 1 << 22
MAX_OFFSET = 1 << 29


class CompressArgs(NamedTuple):
    """Factor and offset as arguments of a compiled kernel."""

    factor: int | Int32
    offset: int | Int32

    def traced(self) -> "CompressArgs":
        """Int32 values as an example argument for the compiler, which would make constants of ints."""
        return CompressArgs(Int32(self.factor), Int32(self.offset))

    def of_last(self, queries: int, keys: int) -> "CompressArgs":
        """Arguments if queries are the last of keys * factor tokens: an estimate where q_offset is on the device."""
        return self._replace(offset=self.offset - max(0, keys * self.factor - queries))


def compression(causal: bool, factor: int, offset: int, by_sequence: bool = False) -> Optional[CompressArgs]:
    """Check factor and offset, and make kernel arguments of them; None for (1, 0), plain causal masking.

    by_sequence: queries have an offset per sequence (q_offset), which needs arguments for (1, 0) too if causal.

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
    """Factor and offset inside a kernel, from which BlockInfo and AttentionMask compute their limits."""

    divisor: FastDivmodDivisorV2  # by the factor, which it holds too
    offset: Int32
    shares: tuple = ()  # SM90 backward's `QueryShares`, where several CTAs split a key tile's queries

    @staticmethod
    def create(compress: Optional[CompressArgs], shares: Optional[tuple] = None) -> Optional["CompressedCausal"]:
        """Made in the host function of a kernel, once per launch; None stays None."""
        if compress is None:
            return None
        divisor = FastDivmodDivisorV2(Int32(compress.factor))
        return CompressedCausal(divisor, Int32(compress.offset), shares if shares is not None else ())

    def of(self, seqlen: Any) -> "CompressedCausal":
        """The mask for the rows of a sequence (`SeqlenInfoQK`): its q_offset, if any, is subtracted."""
        if const_expr(seqlen.q_offset is None):
            return self
        return self._replace(offset=self.offset - seqlen.q_offset)

    @property
    def factor(self) -> Int32:
        return Int32(self.divisor.divisor)

    def keys_seen_by(self, row: Int32) -> Int32:
        """Number of keys that query `row` sees, 0 .. number - 1, without regard to the sequence's end.

        The factor is added before the division, and the sum clamped at 0, so that the dividend is never negative.
        """
        return cutlass.max(row - self.offset + self.factor, 0) // self.divisor

    def first_row_seeing(self, key: Int32, at_most: Int32) -> Int32:
        """min(key * factor + offset, at_most), the first query that sees `key`; may be negative.

        In 64 bits, since keys that no row sees may overflow 32.
        """
        row = Int64(key) * Int64(self.factor) + Int64(self.offset)
        return Int32(cutlass.min(row, Int64(at_most)))
