"""Lists of key blocks by query tile, turned round: the query tiles of each key tile, in order, and a plan over them.

A CTA has some key tiles of one head. It reads the lists of all query tiles that may see them, and sets a bit of its
bitmap [key tiles, query tiles] in shared memory for each entry: whatever the order in which threads come by, the bits
read off afterwards are in order. Run twice, first for the counts and then, with starts known, for the entries.

Key tile rows are launched, and add to a query tile's dq, from right to left where the order of adds is fixed: an
entry's lock value is the number of listed key tiles to its right. A row is then walked by rising lock value, later
query tiles first among equals: a counting sort by a warp, stable and so without chance.

Memory is what is listed. All lists are read for every bitmap, and a bitmap of 192 KB holds the fewer key tiles the more
query tiles there are: 0.4 GB out of the L2 for a million tokens and 8 heads, 23 GB for four million.
"""

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64, Uint32, const_expr

from flash_attn.cute.utils import warp_prefix_sum
from nsa_layer.kernels.k2q_csr.prefix_sums import items_of
from nsa_layer.kernels.launch import OPTIONS, fake_stream, fake_tensor, launch
from nsa_layer.kernels.varlen_rows import sequence_of

THREADS = 512
WARPS = THREADS // 32
FEW_WORDS, MANY_WORDS = 8 << 10, 48 << 10  # of 32 bits, in a CTA's bitmap
MOST_LOCKS = 512
LOCK_SHIFT = 22  # a query tile's number stands below, its lock value above
ITEM = 8  # numbers of a plan item
FILLERS = 1024  # CTAs, at most, that fill what a plan has room for beyond its items


class TransposeKernel:
    """Counts of each key tile's query tiles; or with `fills` the entries, lock values and plan items.

    Args:
        words: of the bitmap.
        packed: sequences stand one after the other.
        parts: key tiles of a listed block.
        quads: lists can be read four entries at a time.
        locks: most lock values, a multiple of 32; 0: entries in rising order, without lock values.
        copies: query heads that have the same list.
        longest: entries of a plan item at most; 0: an item for every row.
        planned: write plan items.
    """

    def __init__(
        self,
        *,
        words: int,
        packed: bool,
        causal: bool,
        q_tile: int,
        kv_tile: int,
        parts: int,
        quads: bool,
        fills: bool = False,
        locks: int = 0,
        copies: int = 1,
        longest: int = 0,
        planned: bool = False,
    ) -> None:
        self.words, self.packed, self.causal = words, packed, causal
        self.q_tile, self.kv_tile, self.parts, self.quads = q_tile, kv_tile, parts, quads
        self.fills, self.locks, self.copies = fills, locks, copies
        self.longest, self.planned = longest, planned

    @cute.jit
    def __call__(
        self,
        lists: cute.Tensor,  # [B, H, M, n]: blocks, -1 for none; packed [1, H, all M, n]
        cu_tiles: cute.Tensor | None,  # [sequences + 1]: query tiles before each packed sequence
        cu_rows: cute.Tensor | None,  # the same of key tiles
        counts: cute.Tensor,  # [H, B * N]; packed [H, all N]
        starts: cute.Tensor | None,  # like counts
        items_before: cute.Tensor | None,  # [H * B * N + 1]
        entries: cute.Tensor | None,  # [listed]
        lock_values: cute.Tensor | None,
        unsorted: cute.Tensor | None,
        plan: cute.Tensor | None,  # [items, ITEM]
        rows_a_cta: Int32,
        words_a_row: Int32,
        stream,
    ):
        batch, heads = lists.shape[0], lists.shape[1]
        grid = [cute.ceil_div(counts.shape[1] // batch, rows_a_cta) * heads * batch, 1, 1]
        written = (counts, starts, items_before, entries, lock_values, unsorted, plan)
        arguments = (lists, cu_tiles, cu_rows, *written, rows_a_cta, words_a_row)
        self.kernel(*arguments).launch(grid=grid, block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        lists: cute.Tensor,
        cu_tiles: cute.Tensor | None,
        cu_rows: cute.Tensor | None,
        counts: cute.Tensor,
        starts: cute.Tensor | None,
        items_before: cute.Tensor | None,
        entries: cute.Tensor | None,
        lock_values: cute.Tensor | None,
        unsorted: cute.Tensor | None,
        plan: cute.Tensor | None,
        rows_a_cta: Int32,
        words_a_row: Int32,
    ):
        tidx = cute.arch.thread_idx()[0]
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta = cute.arch.block_idx()[0]
        own_rows = counts.shape[1] // lists.shape[0]
        chunks = cute.ceil_div(own_rows, rows_a_cta)
        chunk, segment = cta % chunks, cta // chunks
        smem = cutlass.utils.SmemAllocator()
        bitmap = smem.allocate_tensor(Uint32, cute.make_layout(self.words), byte_alignment=16)
        buckets = None
        if const_expr(self.locks):
            of_warps = smem.allocate_tensor(Int32, cute.make_layout((self.locks, WARPS)), byte_alignment=16)
            buckets = of_warps[None, warp]
        batch, head = segment // lists.shape[1], segment % lists.shape[1]
        first = chunk * rows_a_cta
        end = cutlass.min(first + rows_a_cta, own_rows)
        for i in cutlass.range(tidx, (end - first) * words_a_row, THREADS):
            bitmap[i] = Uint32(0)
        cute.arch.sync_threads()
        mLists = lists[batch, head, None, None]
        # The query tiles that may list a tile of this CTA's: with `causal` none that end before the first one.
        tile, last_tile = Int32(0), lists.shape[2]
        n_first = first
        if const_expr(self.packed):
            first_sequence = sequence_of(cu_rows, first)
            n_first -= cu_rows[first_sequence]
            tile, last_tile = cu_tiles[first_sequence], cu_tiles[sequence_of(cu_rows, end - 1) + 1]
        if const_expr(self.causal):
            tile += n_first * self.kv_tile // self.q_tile
        for at in cutlass.range(tile + tidx, last_tile, THREADS):
            m, origin, stop = at, first, end
            if const_expr(self.packed):
                sequence = sequence_of(cu_tiles, at)
                before = cu_rows[sequence]
                m -= cu_tiles[sequence]
                origin, stop = first - before, cutlass.min(end, cu_rows[sequence + 1]) - before
            if const_expr(self.causal):
                stop = cutlass.min(stop, self.rows_seen(m))
            self.mark(mLists, at, bitmap, m, origin, stop, words_a_row)
        cute.arch.sync_threads()
        for row in cutlass.range(first + warp, end, WARPS):
            bits = cute.domain_offset((row - first) * words_a_row, bitmap)
            place = batch * own_rows + row
            if const_expr(not self.fills):
                count = Int32(0)
                for w in cutlass.range(lane, words_a_row, 32):
                    count += Int32(cute.arch.popc(Uint32(bits[w])))
                count = cute.arch.warp_redux_sync(count, "add")
                if lane == 0:
                    counts[head, place] = count
            else:
                sequence, n, first_row, rows, own = batch, row, batch * own_rows, own_rows, mLists
                if const_expr(self.packed):
                    sequence = sequence_of(cu_rows, row)
                    first_row = cu_rows[sequence]
                    n, rows = row - first_row, cu_rows[sequence + 1] - first_row
                    own = cute.domain_offset((cu_tiles[sequence], 0), mLists)
                start, count = Int64(starts[head, place]), counts[head, place]
                if const_expr(self.locks):
                    self.read_bits(bits, cute.domain_offset(start, unsorted), words_a_row, lane)
                    cute.arch.sync_warp()
                    here = (cute.domain_offset(start, t) for t in (unsorted, entries, lock_values))
                    self.sort_row(*here, buckets, own, n, rows, count, lane)
                else:
                    self.read_bits(bits, cute.domain_offset(start, entries), words_a_row, lane)
                if const_expr(self.planned):
                    segment_of_row = head * counts.shape[1] + first_row
                    self.write_items(
                        plan, counts, items_before, segment_of_row, rows, sequence, head, n, place, start, lane
                    )
        if const_expr(self.planned):
            # What the plan has room for beyond its items: items of nothing.
            items = items_before[items_before.shape[0] - 1] * self.copies
            fillers = cutlass.min(cute.arch.grid_dim()[0], FILLERS)
            if cta < fillers:
                for i in cutlass.range(items + cta * THREADS + tidx, plan.shape[0], fillers * THREADS):
                    for field in cutlass.range_constexpr(ITEM):
                        plan[i, field] = Int32(0)

    @cute.jit
    def mark(
        self,
        lists: cute.Tensor,
        tile: Int32,
        bitmap: cute.Tensor,
        m: Int32,
        origin: Int32,
        end: Int32,
        words_a_row: Int32,
    ):
        """Set the bits of query tile m, row `tile` of the lists, for key tiles before `end`; `origin` is the first."""
        begin = cutlass.max(origin, 0)
        bit = Uint32(1) << Uint32(m & 31)
        for quad in cutlass.range(self.quads_of(lists)):
            blocks = self.read_quad(lists, tile, quad)
            for i in cutlass.range_constexpr(cute.size(blocks)):
                for part in cutlass.range_constexpr(self.parts):
                    n = blocks[i] * self.parts + part
                    if n >= begin and n < end:
                        place = (n - origin) * words_a_row + (m >> 5)
                        cute.arch.atomic_or(bitmap.iterator + place, bit, scope="cta")

    def rows_seen(self, m: Int32) -> Int32:
        """Key tiles that start before the end of query tile m."""
        return ((m + 1) * self.q_tile + (self.kv_tile - 1)) // self.kv_tile

    def quads_of(self, lists: cute.Tensor) -> Int32:
        return lists.shape[1] // 4 if const_expr(self.quads) else lists.shape[1]

    @cute.jit
    def read_quad(self, lists: cute.Tensor, m: Int32, quad: Int32):
        """Four entries of query tile m's list, or one."""
        size = const_expr(4 if self.quads else 1)
        blocks = cute.make_rmem_tensor(size, Int32)
        cute.autovec_copy(cute.local_tile(lists[m, None], (size,), (quad,)), blocks)
        return blocks

    @cute.jit
    def read_bits(self, bits: cute.Tensor, row: cute.Tensor, words: Int32, lane: Int32):
        """The set bits of a row of the bitmap, in rising order; in falling order where they are to be sorted."""
        written = Int32(0)
        for w in cutlass.range(0, words, 32):
            word = Uint32(0)
            at = w + lane
            if const_expr(self.locks):
                at = words - 1 - at
            if w + lane < words:
                word = Uint32(bits[at])
            number = Int32(cute.arch.popc(word))
            through = warp_prefix_sum(number, lane)
            place = written + through - number
            for i in cutlass.range(number):
                bit = 31 - Int32(cute.arch.clz(word))
                if const_expr(not self.locks):
                    bit = Int32(cute.arch.popc((word & (~word + 1)) - 1))
                row[place + i] = at * 32 + bit
                word = word ^ (Uint32(1) << Uint32(bit))
            written += cute.arch.shuffle_sync(through, 31)

    @cute.jit
    def sort_row(
        self,
        unsorted: cute.Tensor,
        entries: cute.Tensor,
        lock_values: cute.Tensor,
        buckets: cute.Tensor,
        lists: cute.Tensor,
        n: Int32,
        rows: Int32,
        count: Int32,
        lane: Int32,
    ):
        """A row's query tiles by rising lock value. Entries are 2 * query tile, as walks with lock values have them."""
        for i in cutlass.range_constexpr(self.locks // 32):
            buckets[i * 32 + lane] = Int32(0)
        cute.arch.sync_warp()
        for i in cutlass.range(lane, count, 32):
            m = unsorted[i]
            lock = self.lock_value(lists, m, n, rows)
            unsorted[i] = (lock << LOCK_SHIFT) | m
            cute.arch.atomic_add(buckets.iterator + lock, Int32(1), scope="cta")
        cute.arch.sync_warp()
        before = Int32(0)
        for i in cutlass.range_constexpr(self.locks // 32):
            number = buckets[i * 32 + lane]
            through = warp_prefix_sum(number, lane)
            buckets[i * 32 + lane] = before + through - number
            before += cute.arch.shuffle_sync(through, 31)
        cute.arch.sync_warp()
        lower = (Uint32(1) << Uint32(lane)) - 1
        for i in cutlass.range(0, count, 32):
            value, lock = Int32(0), Int32(-1)
            if i + lane < count:
                value = unsorted[i + lane]
                lock = value >> LOCK_SHIFT
            peers = cute.arch.match_sync(0xFFFFFFFF, lock)
            rank = Int32(cute.arch.popc(peers & lower))
            if lock >= 0:
                place = buckets[lock] + rank
                entries[place] = (value & ((1 << LOCK_SHIFT) - 1)) * 2
                lock_values[place] = lock
            cute.arch.sync_warp()
            if lock >= 0 and rank == 0:
                buckets[lock] += Int32(cute.arch.popc(peers))
            cute.arch.sync_warp()

    @cute.jit
    def lock_value(self, lists: cute.Tensor, m: Int32, n: Int32, rows: Int32) -> Int32:
        """How many key tiles after n query tile m lists: they add to its dq first."""
        end = rows
        if const_expr(self.causal):
            end = cutlass.min(end, self.rows_seen(m))
        after = Int32(0)
        for quad in cutlass.range(self.quads_of(lists)):
            blocks = self.read_quad(lists, m, quad)
            for i in cutlass.range_constexpr(cute.size(blocks)):
                begin = cutlass.max(blocks[i] * self.parts, n + 1)
                after += cutlass.max(cutlass.min((blocks[i] + 1) * self.parts, end) - begin, 0)
        return after

    @cute.jit
    def write_items(
        self,
        plan: cute.Tensor,
        counts: cute.Tensor,
        items_before: cute.Tensor,
        segment: Int32,
        rows: Int32,
        sequence: Int32,
        head: Int32,
        n: Int32,
        place: Int32,
        start: Int64,
        lane: Int32,
    ):
        """The plan items of a row for all query heads that have this list.

        Items lie head by head, a sequence's rows side by side: from right to left where the order of adds is fixed.

        segment: the place of the sequence's first row among all heads'; its items, `rows` of them, follow.
        """
        count = counts[head, place]
        pieces = items_of(count, self.longest)
        first, end, own = items_before[segment], items_before[segment + rows], items_before[segment + n]
        first_item = self.copies * first + own - first
        if const_expr(self.locks):
            first_item = self.copies * first + end - own - pieces
        for i in cutlass.range(lane, pieces * self.copies, 32):
            copy, piece = i // pieces, i % pieces
            at = first_item + copy * (end - first) + piece
            item = (
                sequence,
                head * self.copies + copy,
                n,
                count * piece // pieces,
                count * (piece + 1) // pieces,
                i,
                Int32(start & 0xFFFFFFFF),
                Int32(start >> 32),
            )
            for field in cutlass.range_constexpr(ITEM):
                plan[at, field] = item[field]


def transpose(
    lists: torch.Tensor,
    cu_tiles: torch.Tensor | None,
    cu_rows: torch.Tensor | None,
    counts: torch.Tensor,
    starts: torch.Tensor | None,
    items_before: torch.Tensor | None,
    entries: torch.Tensor | None,
    lock_values: torch.Tensor | None,
    unsorted: torch.Tensor | None,
    plan: torch.Tensor | None,
    rows_a_cta: int,
    words_a_row: int,
    **options: int | bool,
) -> None:
    """Fill `counts`; with ``fills=True`` read them and fill `entries`, `lock_values` and `plan` (see the kernel).

    `unsorted` is room like `entries`, and as many entries as `lists` has places is room enough. A CTA's bitmap, of
    ``words``, has to have room for `rows_a_cta` rows of `words_a_row`.
    """
    options["quads"] = not any(x % 4 for x in (lists.shape[3], lists.storage_offset(), *lists.stride()[:3]))

    def compile_kernel():
        heads, rows = cute.sym_int(), cute.sym_int()
        align = 16 if options["quads"] else 4
        shapes = [
            (cu_tiles, torch.int32, (cute.sym_int(),)),
            (cu_rows, torch.int32, (cute.sym_int(),)),
            (counts, torch.int32, (heads, rows)),
            (starts, torch.int64, (heads, rows)),
            (items_before, torch.int32, (cute.sym_int(),)),
            *((t, torch.int32, (cute.sym_int(),)) for t in (entries, lock_values, unsorted)),
        ]
        fake = [
            fake_tensor(torch.int32, (cute.sym_int(), heads, cute.sym_int(), cute.sym_int()), align=align),
            *(None if t is None else fake_tensor(dtype, shape, align=dtype.itemsize) for t, dtype, shape in shapes),
            None if plan is None else fake_tensor(torch.int32, (cute.sym_int(), ITEM), align=32),
        ]
        return cute.compile(TransposeKernel(**options), *fake, Int32(1), Int32(1), fake_stream(), options=OPTIONS)

    tensors = (lists, cu_tiles, cu_rows, counts, starts, items_before, entries, lock_values, unsorted, plan)
    launch("transpose_lists", tuple(options.items()), compile_kernel, *tensors, rows_a_cta, words_a_row)
