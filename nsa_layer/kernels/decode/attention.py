"""Attention of a token's heads to a share of its tokens: of listed blocks, or of its window."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from nsa_layer.kernels.decode.cache_rows import Stored, new_row
from nsa_layer.kernels.decode.places import Sequence, Table
from nsa_layer.kernels.decode.spec import KEYS, ROWS, WARP, DecodeSpec
from nsa_layer.kernels.decode.warp_rows import WarpRows, own_keys, set_queries

PREFETCHED = 32  # elements of 64 bytes, which a GPU's memory gives at once


@dataclass(frozen=True)
class TokenTile:
    """Up to 16 query heads of a token and key/value head, and a thread block's share of what they attend to.

    Attributes:
        warps: of a thread block.
        first, count: of the heads, among the group's.
    """

    spec: cutlass.Constexpr[DecodeSpec]
    warps: cutlass.Constexpr[int]
    sequence: Sequence
    head: Int32
    token: Int32
    first: Int32
    count: Int32
    share: Int32
    shares: Int32

    @classmethod
    def of(cls, spec: DecodeSpec, warps: int, sequence: Sequence, head: Int32, x: Int32, shares: Int32) -> TokenTile:
        """x: of a token's tiles' shares."""
        tiles = num_tiles(spec)
        first = x // shares % tiles * ROWS
        count = cutlass.min(spec.G - first, ROWS)
        return cls(spec, warps, sequence, head, x // (shares * tiles), first, count, x % shares, shares)

    @property
    def t(self) -> Int32:
        """The token's position."""
        return self.sequence.position(self.token)

    @property
    def first_row(self) -> Int32:
        """The first of the key/value head's rows that this tile has."""
        return self.token * self.spec.G + self.first

    @property
    def group(self) -> Int32:
        """The first group of this warp."""
        return self.share * self.warps + cute.arch.make_warp_uniform(cute.arch.warp_idx())

    def q_head(self, row: Int32) -> Int32:
        return self.head * self.spec.G + self.first + row

    def first_of(self, sList: cute.Tensor | None, group: Int32, groups: Int32) -> Int32:
        """The first token of a group of 16, of the last one if there are fewer: in listed blocks, or in the window."""
        spec, group = self.spec, cutlass.min(group, groups - 1)
        if const_expr(sList is None):
            return cutlass.max(self.t - spec.window + 1, 0) + group * KEYS
        in_block = spec.block_size // KEYS
        return sList[group // in_block] * spec.block_size + group % in_block * KEYS

    def set_queries(self, rows: WarpRows, mQ: cute.Tensor) -> None:
        g = cute.arch.lane_idx() // 4
        heads = [self.q_head(cutlass.min(g + 8 * r, self.count - 1)) for r in range(2)]
        set_queries(rows, [new_row(mQ, self.sequence, self.token, head) for head in heads])

    @cute.jit
    def load_first(self, rows: WarpRows, mQ: cute.Tensor, stored: Stored, sList: cute.Tensor | None, groups: Int32):
        """Load this warp's first group, and the queries, again rather than keep them."""
        if self.group < groups:
            at, table = self.first_of(sList, self.group, groups), stored.table(self.sequence)
            page, (k_at, v_at) = self.page(table, at), own_keys()
            rows.load_k([self.row_of(stored, 0, table, page, at, i) for i in k_at])
            rows.load_v([self.row_of(stored, 1, table, page, at, i) for i in v_at])
            self.set_queries(rows, mQ)

    @cute.jit
    def prefetch_window(self, stored: Stored, groups: Int32):
        """Bring this warp's second group of the window to the L2."""
        group, lane, pieces = self.group + self.shares * self.warps, cute.arch.lane_idx(), self.spec.D // PREFETCHED
        if group < groups:
            first, table = self.first_of(None, group, groups), stored.table(self.sequence)
            page = self.page(table, first)
            for key in cutlass.range_constexpr(0, KEYS, WARP // pieces):
                for i in cutlass.range_constexpr(2):
                    row = self.row_of(stored, i, table, page, first, key + lane // pieces)
                    piece = row.iterator + lane % pieces * PREFETCHED
                    cute.arch.prefetch(piece.llvm_ptr, cache_level="L2")

    @cute.jit
    def attend(self, rows: WarpRows, stored: Stored, sList: cute.Tensor | None, groups: Int32):
        """Attention to this warp's groups, of which `load_first` has loaded the first."""
        t, table, step = self.t, stored.table(self.sequence), self.shares * self.warps
        c = cute.arch.lane_idx() % 4
        k_at, v_at = own_keys()
        if self.group < groups:
            at = self.first_of(sList, self.group, groups)
            after = self.first_of(sList, self.group + step, groups)
            page = self.page(table, after)
            for now in cutlass.range(self.group, groups, step, unroll=1):
                scores = rows.scores()
                if now + step < groups:
                    rows.load_k([self.row_of(stored, 0, table, page, after, i) for i in k_at])
                for x in cutlass.range_constexpr(8):
                    seen = at + x // 4 * 8 + 2 * c + x % 2 <= t
                    scores[x] = cutlass.select_(seen, scores[x], -Float32.inf)
                rows.add(scores)
                if now + step < groups:
                    rows.load_v([self.row_of(stored, 1, table, page, after, i) for i in v_at])
                at = after
                after = self.first_of(sList, now + 2 * step, groups)
                page = self.page(table, after)

    def page(self, table: Table, at: Int32) -> Int32:
        """In lane x % 16 that of token ``at + x``."""
        return table.page(cutlass.min(at + cute.arch.lane_idx() % KEYS, self.t))

    def row_of(self, stored: Stored, i: int, table: Table, page: Int32, first: Int32, n: Int32) -> cute.Tensor:
        """Row [D] of token ``first + n``, of token t if that is behind; page: as `page` has it."""
        if const_expr(table.pages is not None):
            page = cute.arch.shuffle_sync(page, n)
        return stored.token(i, table, page, cutlass.min(first + n, self.t), self.head)


def num_tiles(spec: DecodeSpec) -> int:
    return -(-spec.G // ROWS)
