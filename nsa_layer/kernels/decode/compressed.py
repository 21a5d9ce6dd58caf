"""First launch of a step: append tokens, complete compressed keys, and the compressed branch over pieces of its keys.

A thread block has up to 16 rows of a key/value head and a piece of the compressed keys. Scores go to memory for the
choice. The last piece has the keys that this call completes, too; its thread blocks look at all the sequence's pages
first, since a sequence that is led out of the caches writes nothing. Those of a further 16 rows write the same again,
rather than wait for one another.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from nsa_layer.kernels.decode.places import LARGEST, Lengths, Sequence, Table
from nsa_layer.kernels.decode.spec import KEYS, ROWS, THREADS, VECTOR, WARPS, DecodeSpec
from nsa_layer.kernels.decode.warp_rows import (
    no_rows,
    own_keys,
    set_queries,
    shared_partial,
    write_nothing,
    write_partial,
)

LOG2_E = 1.4426950408889634
WARP_KEYS = KEYS * WARPS


@dataclass(frozen=True)
class Stored:
    """A key cache and its value cache, or one of them, [rows, S, Hkv, D] or [pages, page, Hkv, D], and what is new.

    Attributes:
        new: k and v, [B, T, Hkv, D] or [1, total, Hkv, D]; None where nothing is.
    """

    caches: tuple[cute.Tensor, cute.Tensor]
    new: tuple[cute.Tensor | None, cute.Tensor | None]
    pages: cute.Tensor | None

    def table(self, sequence: Sequence) -> Table:
        cache = self.caches[0] if const_expr(self.caches[0] is not None) else self.caches[1]
        count, size = cache.shape[:2]
        return Table(self.pages, sequence, Int32(size), Int32(count))


class CompressedDecode:
    """The kernel."""

    shapes = (
        "Bq Tq Hq D", "P S Hkv D", "P S Hkv D", "Bk Tk Hkv D", "Bk Tk Hkv D", "P S Hkv D", "P S Hkv D", "Bk Tk Hkv D",
        "Bk Tk Hkv D", "Pc Sc Hkv D", "Pc Sc Hkv D", "Bm m Hkv D", "Bm m Hkv D", "B n *", "B nc *", "B *", "Bs *",
        "B *", "Hkv D D", "Hkv D D", "B Hkv R keys", "B Hkv R pieces 2", "B Hkv R pieces D", "B Hkv",
    )  # fmt: skip

    def __init__(self, spec: DecodeSpec) -> None:
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK_cache: cute.Tensor,
        mV_cache: cute.Tensor,
        mK: cute.Tensor | None,
        mV: cute.Tensor | None,
        mK_win_cache: cute.Tensor | None,
        mV_win_cache: cute.Tensor | None,
        mK_win: cute.Tensor | None,
        mV_win: cute.Tensor | None,
        mK_cmp_cache: cute.Tensor,
        mV_cmp_cache: cute.Tensor,
        mK_cmp: cute.Tensor | None,
        mV_cmp: cute.Tensor | None,
        mPages: cute.Tensor | None,
        mCmp_pages: cute.Tensor | None,
        mIdx: cute.Tensor | None,
        mCu: cute.Tensor | None,
        mLengths: cute.Tensor,
        mW_k: cute.Tensor | None,
        mW_v: cute.Tensor | None,
        mScores: cute.Tensor,
        mStats: cute.Tensor,
        mAcc: cute.Tensor,
        mValid: cute.Tensor,
        room: Int32,
        compressed_room: Int32,
        cmp: Int32,
        softmax_scale: Float32,
        stream,
    ):
        spec = self.spec
        lengths = Lengths(spec, mLengths, mCu, mIdx, room, compressed_room, Int32(mQ.shape[1]))
        tokens = Stored((mK_cache, mV_cache), (mK, mV), mPages)
        keys = Stored((mK_cmp_cache, mV_cmp_cache), (mK_cmp, mV_cmp), mCmp_pages)
        window = (
            None if const_expr(mK_win_cache is None and mV_win_cache is None)
            else Stored((mK_win_cache, mV_win_cache), (mK_win, mV_win), mPages)
        )  # fmt: skip
        B, Hkv, R, _ = mScores.shape
        self.kernel(
            mQ,
            tokens,
            window,
            keys,
            lengths,
            cmp,
            (mW_k, mW_v),
            (mScores, mStats, mAcc, mValid),
            softmax_scale * LOG2_E,
        ).launch(
            grid=[cmp * -(-spec.rows // ROWS), Hkv, B],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=2,
            preferred_smem_carveout=50,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        tokens: Stored,
        window: Stored | None,
        keys: Stored,
        lengths: Lengths,
        splits: Int32,
        weights: tuple,
        out: tuple,
        scale_log2: Float32,
    ):
        spec, (mScores, mStats, mAcc, mValid) = self.spec, out
        tidx, _, _ = cute.arch.thread_idx()
        x, head, b = cute.arch.block_idx()
        smem = SmemAllocator()
        sStats, sAcc = shared_partial(smem, spec.D)
        sBad = smem.allocate_tensor(Int32, cute.make_layout(1), byte_alignment=4)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        split, tile = x % splits, x // splits

        sequence = lengths.of(b, LARGEST if const_expr(tokens.pages is not None) else Int32(tokens.caches[0].shape[0]))
        before, after = sequence.completed()
        share = cute.ceil_div(cute.ceil_div(before, splits), WARP_KEYS) * WARP_KEYS
        begin = cutlass.min(split * share, before)
        end = cutlass.min(begin + share, before)
        if split == splits - 1:
            end = after
            valid = self.is_inside(sequence, tokens, keys, sBad)
            if valid:
                if tile == 0:
                    append(spec, sequence, tokens, head)
                    if const_expr(window is not None):
                        append(spec, sequence, window, head)
                for j in cutlass.range(before, after, unroll=1):
                    for i in cutlass.range_constexpr(2):
                        complete(spec, sequence, i, tokens, keys, weights[i], j, head, sAcc)
            if tile == 0 and tidx == 0:
                mValid[b, head] = cutlass.select_(valid, Int32(1), Int32(0))
            cute.arch.sync_threads()

        first, count = tile * ROWS, cutlass.min(spec.rows - tile * ROWS, ROWS)
        last = sequence.position(cutlass.min((first + count - 1) // spec.G, sequence.T - 1))
        end = cutlass.min(end, sequence.keys_end(last))
        end = cutlass.select_(sequence.inside, end, Int32(0))
        stats, acc = mStats[b, head, None, None, None], mAcc[b, head, None, None, None]
        if begin < end:
            scores = mScores[b, head, None, None]
            self.attend(mQ, sequence, keys, head, first, count, begin, end, scale_log2, scores,
                        (sStats, sAcc), (stats, acc), split)  # fmt: skip
        else:
            write_nothing(stats, first, count, split)

    @cute.jit
    def is_inside(self, sequence: Sequence, tokens: Stored, keys: Stored, sBad: cute.Tensor) -> Boolean:
        """True if all the sequence's places are there; of all threads together."""
        tidx, _, _ = cute.arch.thread_idx()
        if const_expr(tokens.pages is not None or keys.pages is not None):
            if tidx == 0:
                sBad[0] = Int32(0)
            cute.arch.sync_threads()
            if sequence.inside:
                bad = tokens.table(sequence).lacks(sequence.S, tidx, THREADS)
                bad = bad | keys.table(sequence).lacks(sequence.completed()[1], tidx, THREADS)
                if bad:
                    sBad[0] = Int32(1)
            cute.arch.sync_threads()
            return sequence.inside & (sBad[0] == 0)
        return sequence.inside

    @cute.jit
    def attend(
        self,
        mQ: cute.Tensor,
        sequence: Sequence,
        keys: Stored,
        head: Int32,
        first: Int32,
        count: Int32,
        begin: Int32,
        end: Int32,
        scale_log2: Float32,
        scores_out: cute.Tensor,
        shared: tuple,
        partial: tuple,
        piece: Int32,
    ):
        """Attention of a tile of rows to the keys ``begin .. end - 1``."""
        spec, table = self.spec, keys.table(sequence)
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        g, c = lane // 4, lane % 4
        rows = no_rows(spec.D, mQ.element_type, scale_log2)
        own = [cutlass.min(g + 8 * r, count - 1) + first for r in range(2)]
        tokens = [cutlass.min(row // spec.G, sequence.T - 1) for row in own]
        set_queries(rows, [query(mQ, spec, sequence, tokens[r], head * spec.G + own[r] % spec.G) for r in range(2)])
        seen = [sequence.keys_end(sequence.position(token)) for token in tokens]
        k_at, v_at = own_keys()

        at = begin + warp * KEYS
        if at < end:
            page = table.page(cutlass.min(at + lane % KEYS, end - 1))
            rows.load_k([row_of(keys.caches[0], table, page, at, i, end, head) for i in k_at])
            rows.load_v([row_of(keys.caches[1], table, page, at, i, end, head) for i in v_at])
            page = table.page(cutlass.min(at + WARP_KEYS + lane % KEYS, end - 1))
            for now in cutlass.range(at, end, WARP_KEYS, unroll=1):
                scores = rows.scores()
                after = now + WARP_KEYS
                if after < end:
                    rows.load_k([row_of(keys.caches[0], table, page, after, i, end, head) for i in k_at])
                for x in cutlass.range_constexpr(8):
                    key, r = now + x // 4 * 8 + 2 * c + x % 2, x % 4 // 2
                    if (key < end) & (g + 8 * r < count):
                        scores_out[own[r], key] = scores[x]
                    scores[x] = cutlass.select_(key < cutlass.min(seen[r], end), scores[x], -Float32.inf)
                rows.add(scores)
                if after < end:
                    rows.load_v([row_of(keys.caches[1], table, page, after, i, end, head) for i in v_at])
                page = table.page(cutlass.min(after + WARP_KEYS + lane % KEYS, end - 1))
        write_partial(rows, *shared, *partial, first, count, piece)


def query(mQ: cute.Tensor, spec: DecodeSpec, sequence: Sequence, token: Int32, head: Int32) -> cute.Tensor:
    """A row [D] of q [B, T, Hq, D], packed [1, total, Hq, D]."""
    return mQ[batch_of(mQ, sequence), sequence.first_row + token, head, None]


def batch_of(x: cute.Tensor, sequence: Sequence) -> Int32:
    return sequence.b * cutlass.min(x.shape[0] - 1, 1)


def row_of(cache: cute.Tensor, table: Table, page: Int32, first: Int32, i: Int32, end: Int32, head: Int32):
    """Row [D] of key ``first + i``, of the last one if that is behind; page: in lane x % 16, that of key first + x."""
    at = cutlass.min(first + i, end - 1)
    if const_expr(table.pages is not None):
        page = cute.arch.shuffle_sync(page, i)
    return cache[page, table.within(at), head, None]


@cute.jit
def append(spec: DecodeSpec, sequence: Sequence, stored: Stored, head: Int32):
    """Write a sequence's new keys and values of a head."""
    tidx, _, _ = cute.arch.thread_idx()
    lanes, table = spec.D // VECTOR, stored.table(sequence)
    for i in cutlass.range_constexpr(2):
        new, cache = stored.new[i], stored.caches[i]
        if const_expr(new is not None and cache is not None):
            for token in cutlass.range(tidx // lanes, sequence.T, THREADS // lanes, unroll=1):
                at = sequence.position(token)
                piece = cute.make_rmem_tensor((VECTOR,), cache.element_type)
                source = new[batch_of(new, sequence), sequence.first_row + token, head, None]
                cute.autovec_copy(cute.local_tile(source, (VECTOR,), (tidx % lanes,)), piece)
                target = cache[table.page(at), table.within(at), head, None]
                cute.autovec_copy(piece, cute.local_tile(target, (VECTOR,), (tidx % lanes,)))


@cute.jit
def complete(
    spec: DecodeSpec,
    sequence: Sequence,
    i: cutlass.Constexpr[int],
    tokens: Stored,
    keys: Stored,
    weight: cute.Tensor | None,
    j: Int32,
    head: Int32,
    sSums: cute.Tensor,
):
    """Write compressed key (i = 0) or value (i = 1) j of a head: given, or the mean of its tokens, projected."""
    tidx, _, _ = cute.arch.thread_idx()
    lanes = spec.D // VECTOR
    lane, group, groups = tidx % lanes, tidx // lanes, THREADS // lanes
    cache, given, table = keys.caches[i], keys.new[i], keys.table(sequence)
    target = cache[table.page(j), table.within(j), head, None]
    piece = cute.make_rmem_tensor((VECTOR,), cache.element_type)
    if const_expr(given is not None):
        if group == 0:
            before, _ = sequence.completed()
            source = given[batch_of(given, sequence), j - before, head, None]
            cute.autovec_copy(cute.local_tile(source, (VECTOR,), (lane,)), piece)
            cute.autovec_copy(piece, cute.local_tile(target, (VECTOR,), (lane,)))
    else:
        sums = cute.make_rmem_tensor((VECTOR,), Float32)
        sums.fill(0.0)
        first, own = sequence.position(Int32(0)), tokens.table(sequence)
        for token in cutlass.range(group, spec.span, groups, unroll=4):
            at = j * spec.stride + token
            source = tokens.caches[i][own.page(at), own.within(at), head, None]
            cute.autovec_copy(cute.local_tile(source, (VECTOR,), (lane,)), piece)
            if const_expr(tokens.new[i] is not None):
                if at >= first:  # what another thread block writes
                    new = tokens.new[i]
                    source = new[batch_of(new, sequence), sequence.first_row + at - first, head, None]
                    cute.autovec_copy(cute.local_tile(source, (VECTOR,), (lane,)), piece)
            for x in cutlass.range_constexpr(VECTOR):
                sums[x] += piece[x].to(Float32)
        sLines = cute.make_tensor(sSums.iterator, cute.make_layout((spec.D, groups)))
        for x in cutlass.range_constexpr(VECTOR):
            sLines[lane * VECTOR + x, group] = sums[x]
        cute.arch.sync_threads()
        if tidx < spec.D:
            total = Float32(0.0)
            for line in cutlass.range_constexpr(groups):
                total += sLines[tidx, line]
            sLines[tidx, 0] = total * (1.0 / spec.span)
        cute.arch.sync_threads()
        if tidx < spec.D:
            made = sLines[tidx, 0]
            if const_expr(weight is not None):
                made = Float32(0.0)
                for d in cutlass.range(spec.D, unroll=16):
                    made += sLines[d, 0] * weight[head, d, tidx].to(Float32)
            target[tidx] = made.to(cache.element_type)
        cute.arch.sync_threads()
