"""Attention of a token's heads to a share of its tokens: of listed blocks, or of its window."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from nsa_layer.kernels.decode.places import Sequence
from nsa_layer.kernels.decode.spec import KEYS, ROWS, WARPS, DecodeSpec
from nsa_layer.kernels.decode.stored import Stored, new_row
from nsa_layer.kernels.decode.warp_rows import WarpRows, own_keys, set_queries


@dataclass(frozen=True)
class TokenTile:
    """Up to 16 query heads of a token and key/value head, and a thread block's share of what they attend to.

    Attributes:
        first, count: of the heads, among the group's.
    """

    spec: cutlass.Constexpr[DecodeSpec]
    sequence: Sequence
    head: Int32
    token: Int32
    first: Int32
    count: Int32
    share: Int32
    shares: Int32

    @classmethod
    def of(cls, spec: DecodeSpec, sequence: Sequence, head: Int32, x: Int32, shares: Int32) -> TokenTile:
        """x: of a token's tiles' shares."""
        tiles = num_tiles(spec)
        first = x // shares % tiles * ROWS
        count = cutlass.min(spec.G - first, ROWS)
        return cls(spec, sequence, head, x // (shares * tiles), first, count, x % shares, shares)

    @property
    def t(self) -> Int32:
        """The token's position."""
        return self.sequence.position(self.token)

    @property
    def first_row(self) -> Int32:
        """The number of the first row among the key/value head's."""
        return self.token * self.spec.G + self.first

    def q_head(self, row: Int32) -> Int32:
        return self.head * self.spec.G + self.first + row

    def first_of(self, sList: cute.Tensor | None, group: Int32, groups: Int32) -> Int32:
        """The first token of a group, of the last one if there are fewer."""
        spec, group = self.spec, cutlass.min(group, groups - 1)
        if const_expr(sList is None):
            return (cutlass.max(self.t - spec.window + 1, 0) // KEYS + group) * KEYS
        in_block = spec.block_size // KEYS
        return sList[group // in_block] * spec.block_size + group % in_block * KEYS

    def set_queries(self, rows: WarpRows, mQ: cute.Tensor) -> None:
        g = cute.arch.lane_idx() // 4
        heads = [self.q_head(cutlass.min(g + 8 * r, self.count - 1)) for r in range(2)]
        set_queries(rows, [new_row(mQ, self.sequence, self.token, head) for head in heads])

    @cute.jit
    def load_first(self, rows: WarpRows, stored: Stored, sList: cute.Tensor | None, groups: Int32):
        """Load this warp's first group of 16 tokens: of listed blocks, or of those up to t."""
        group = self.share * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if group < groups:
            at, table = self.first_of(sList, group, groups), stored.table(self.sequence)
            page = table.page(cutlass.min(at, self.t))
            k_at, v_at = own_keys()
            rows.load_k([self.row_of(stored, 0, table, page, at + i) for i in k_at])
            rows.load_v([self.row_of(stored, 1, table, page, at + i) for i in v_at])

    @cute.jit
    def attend(self, rows: WarpRows, stored: Stored, sList: cute.Tensor | None, groups: Int32):
        """Attention to this warp's groups, of which `load_first` has loaded the first."""
        spec, t, table = self.spec, self.t, stored.table(self.sequence)
        c = cute.arch.lane_idx() % 4
        group = self.share * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        step = self.shares * WARPS
        k_at, v_at = own_keys()
        if group < groups:
            at = self.first_of(sList, group, groups)
            after = self.first_of(sList, group + step, groups)
            page = table.page(cutlass.min(after, t))
            for now in cutlass.range(group, groups, step, unroll=1):
                scores = rows.scores()
                if now + step < groups:
                    rows.load_k([self.row_of(stored, 0, table, page, after + i) for i in k_at])
                for x in cutlass.range_constexpr(8):
                    key = at + x // 4 * 8 + 2 * c + x % 2
                    seen = key <= t
                    if const_expr(sList is None):
                        seen = seen & (key > t - spec.window)
                    scores[x] = cutlass.select_(seen, scores[x], -Float32.inf)
                rows.add(scores)
                if now + step < groups:
                    rows.load_v([self.row_of(stored, 1, table, page, after + i) for i in v_at])
                at = after
                after = self.first_of(sList, now + 2 * step, groups)
                page = table.page(cutlass.min(after, t))

    def row_of(self, stored: Stored, i: int, table, page: Int32, at: Int32) -> cute.Tensor:
        """Row [D] of a token, of token t if that is behind; it is on the page."""
        return stored.token(i, table, page, cutlass.min(at, self.t), self.head)


def num_tiles(spec: DecodeSpec) -> int:
    return -(-spec.G // ROWS)
