"""Attention of a token's heads to a share of its tokens: of listed blocks, or of its window."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from nsa_layer.kernels.decode.compressed import Stored, query
from nsa_layer.kernels.decode.places import Sequence, Table
from nsa_layer.kernels.decode.spec import KEYS, WARPS, DecodeSpec
from nsa_layer.kernels.decode.warp_rows import no_rows, own_keys, set_queries, write_nothing, write_partial


@cute.jit
def attend_tokens(
    spec: cutlass.Constexpr[DecodeSpec],
    stored: Stored,
    sList: cute.Tensor | None,
    groups: Int32,
    share: Int32,
    shares: Int32,
    piece: Int32,
    mQ: cute.Tensor,
    sequence: Sequence,
    t: Int32,
    token: Int32,
    head: Int32,
    first: Int32,
    count: Int32,
    scale_log2: Float32,
    shared: tuple,
    partial: tuple,
):
    """Attention to a share of groups of 16 tokens: of listed blocks, or of those up to t."""
    table = stored.table(sequence)
    lane = cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    g, c = lane // 4, lane % 4
    first_row = token * spec.G + first
    group, step = share * WARPS + warp, shares * WARPS
    if share * WARPS < groups:
        rows = no_rows(spec.D, mQ.element_type, scale_log2)
        heads = [head * spec.G + first + cutlass.min(g + 8 * r, count - 1) for r in range(2)]
        set_queries(rows, [query(mQ, spec, sequence, token, h) for h in heads])
        k_at, v_at = own_keys()
        if group < groups:
            at = first_of(spec, sList, group, groups, t)
            page = table.page(cutlass.min(at, t))
            rows.load_k([row_of(stored.caches[0], table, page, at, i, t, head) for i in k_at])
            rows.load_v([row_of(stored.caches[1], table, page, at, i, t, head) for i in v_at])
            after = first_of(spec, sList, group + step, groups, t)
            page = table.page(cutlass.min(after, t))
            for now in cutlass.range(group, groups, step, unroll=1):
                scores = rows.scores()
                if now + step < groups:
                    rows.load_k([row_of(stored.caches[0], table, page, after, i, t, head) for i in k_at])
                for x in cutlass.range_constexpr(8):
                    key = at + x // 4 * 8 + 2 * c + x % 2
                    seen = key <= t
                    if const_expr(sList is None):
                        seen = seen & (key > t - spec.window)
                    scores[x] = cutlass.select_(seen, scores[x], -Float32.inf)
                rows.add(scores)
                if now + step < groups:
                    rows.load_v([row_of(stored.caches[1], table, page, after, i, t, head) for i in v_at])
                at = after
                after = first_of(spec, sList, now + 2 * step, groups, t)
                page = table.page(cutlass.min(after, t))
        write_partial(rows, *shared, *partial, first_row, count, piece)
    else:
        write_nothing(partial[0], first_row, count, piece)


def first_of(spec: DecodeSpec, sList: cute.Tensor | None, group: Int32, groups: Int32, t: Int32) -> Int32:
    """The first token of a group, of the last one if there are fewer."""
    group = cutlass.min(group, groups - 1)
    if const_expr(sList is None):
        return (cutlass.max(t - spec.window + 1, 0) // KEYS + group) * KEYS
    in_block = spec.block_size // KEYS
    return sList[group // in_block] * spec.block_size + group % in_block * KEYS


def row_of(cache: cute.Tensor, table: Table, page: Int32, first: Int32, i: Int32, t: Int32, head: Int32):
    """Row [D] of token ``first + i``, of token t if that is behind; it is on the page."""
    return cache[page, table.within(cutlass.min(first + i, t)), head, None]
