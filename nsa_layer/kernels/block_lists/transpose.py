"""Transposition of block lists: key blocks by query tile -> query tiles by key tile in CSR, and a plan over its rows.

A CTA takes a range of key tiles of one head. It reads the lists of all query tiles that may see them and sets a bit of
a bitmap [key tiles, query tiles] in shared memory for each entry, so that rows are ascending in whatever order threads
run. Launched twice: for the counts, then, once the rows' starts are known, for the entries.

Memory is proportional to nnz. All lists are read for every bitmap, and a bitmap of 192 KB holds the fewer key tiles the
more query tiles there are: 0.4 GB out of the L2 for a million tokens and 8 heads, 23 GB for four million.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from flash_attn.cute.lists.rows import sequence_at
from flash_attn.cute.utils import warp_prefix_sum
from nsa_layer.kernels.csr import num_work_tiles

THREADS = 512
WARPS = THREADS // 32
FEW_WORDS, MANY_WORDS = 8 << 10, 48 << 10  # of 32 bits, in a CTA's bitmap
WORK_TILE = 8  # fields of a work tile
FILLERS = 1024  # CTAs, at most, that fill a plan's unused capacity


class BuildK2qCsr:
    """Row counts of the transposed lists; where their `starts` are given, entries and the work tiles of `plan` instead.

    As many entries as in `lists` are enough. The bitmap has capacity for `rows_a_cta` rows of `words_a_row`.

    Args:
        words: of the bitmap.
        parts: key tiles of a block.
        quads: lists can be read four entries at a time.
        q_heads_per_list: query heads that have the same list.
        longest: entries of a work tile at most.
    """

    def __init__(
        self,
        words: int,
        causal: bool,
        q_tile: int,
        kv_tile: int,
        parts: int,
        quads: bool,
        q_heads_per_list: int,
        longest: int,
    ) -> None:
        self.words, self.causal, self.q_tile, self.kv_tile, self.parts = words, causal, q_tile, kv_tile, parts
        self.quads, self.q_heads_per_list, self.longest = quads, q_heads_per_list, longest
        lists = "batch H M n @16" if quads else "batch H M n"
        self.shapes = lists, "starts", "starts", "H rows", "H rows", "work_tiles", "nnz", "plan 8 @32"

    @cute.jit
    def __call__(self, *arguments):
        """Lists [B, H, M, n] of blocks, -1 for none, packed [1, H, all M, n]; query tiles and key tiles before each
        packed sequence; counts and starts [H, B * N], packed [H, all N]; work tiles before each row [H * B * N + 1];
        entries [nnz]; plan [work_tiles, WORK_TILE]; rows of a CTA, words of a row, stream. From starts on tensors may
        be None."""
        tensors, (rows_a_cta, words_a_row, stream) = arguments[:8], arguments[8:]
        (batch, heads, _, _), counts = tensors[0].shape, tensors[3]
        grid = [cute.ceil_div(counts.shape[1] // batch, rows_a_cta) * heads * batch, 1, 1]
        self.kernel(tensors, rows_a_cta, words_a_row).launch(grid=grid, block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, tensors: tuple, rows_a_cta: Int32, words_a_row: Int32):
        lists, cu_tiles, cu_rows, counts, starts, tiles_before, entries, plan = tensors
        tidx = cute.arch.thread_idx()[0]
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta = cute.arch.block_idx()[0]
        own_rows = counts.shape[1] // lists.shape[0]
        chunks = cute.ceil_div(own_rows, rows_a_cta)
        chunk, segment = cta % chunks, cta // chunks
        smem = cutlass.utils.SmemAllocator()
        bitmap = smem.allocate_tensor(Uint32, cute.make_layout(self.words), byte_alignment=16)
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
        if const_expr(cu_tiles is not None):
            first_sequence = sequence_at(cu_rows, first)
            n_first -= cu_rows[first_sequence]
            tile, last_tile = cu_tiles[first_sequence], cu_tiles[sequence_at(cu_rows, end - 1) + 1]
        if const_expr(self.causal):
            tile += n_first * self.kv_tile // self.q_tile
        for at in cutlass.range(tile + tidx, last_tile, THREADS):
            m, origin, stop = at, first, end
            if const_expr(cu_tiles is not None):
                sequence = sequence_at(cu_tiles, at)
                before = cu_rows[sequence]
                m -= cu_tiles[sequence]
                origin, stop = first - before, cutlass.min(end, cu_rows[sequence + 1]) - before
            if const_expr(self.causal):
                stop = cutlass.min(stop, ((m + 1) * self.q_tile + (self.kv_tile - 1)) // self.kv_tile)
            self.mark(mLists, at, bitmap, (m, origin, stop), words_a_row)
        cute.arch.sync_threads()
        for row in cutlass.range(first + warp, end, WARPS):
            bits = cute.domain_offset((row - first) * words_a_row, bitmap)
            flat_row = batch * own_rows + row
            if const_expr(starts is None):
                count = Int32(0)
                for w in cutlass.range(lane, words_a_row, 32):
                    count += Int32(cute.arch.popc(Uint32(bits[w])))
                count = cute.arch.warp_redux_sync(count, "add")
                if lane == 0:
                    counts[head, flat_row] = count
            else:
                sequence, n, first_row, rows = batch, row, batch * own_rows, own_rows
                if const_expr(cu_tiles is not None):
                    sequence = sequence_at(cu_rows, row)
                    first_row = cu_rows[sequence]
                    n, rows = row - first_row, cu_rows[sequence + 1] - first_row
                start = Int64(starts[head, flat_row])
                self.read_bits(bits, cute.domain_offset(start, entries), words_a_row, lane)
                if const_expr(plan is not None):
                    segment_of_row = head * counts.shape[1] + first_row
                    own_row = (segment_of_row, rows, sequence, head, n, flat_row, start)
                    self.write_work_tiles(plan, counts, tiles_before, own_row, lane)
        if const_expr(plan is not None):
            # Fill the plan's unused capacity with empty work tiles.
            work_tiles = tiles_before[tiles_before.shape[0] - 1] * self.q_heads_per_list
            fillers = cutlass.min(cute.arch.grid_dim()[0], FILLERS)
            if cta < fillers:
                for i in cutlass.range(work_tiles + cta * THREADS + tidx, plan.shape[0], fillers * THREADS):
                    for field in cutlass.range_constexpr(WORK_TILE):
                        plan[i, field] = Int32(0)

    @cute.jit
    def mark(self, lists: cute.Tensor, tile: Int32, bitmap: cute.Tensor, span: tuple, words_a_row: Int32):
        """Set the bits of row `tile` of the lists; span: the query tile in its sequence, the bitmap's first key tile,
        and one past the last key tile to set."""
        m, origin, end = span
        begin = cutlass.max(origin, 0)
        bit = Uint32(1) << Uint32(m & 31)
        size = const_expr(4 if self.quads else 1)
        for quad in cutlass.range(lists.shape[1] // size):
            blocks = cute.make_rmem_tensor(size, Int32)
            cute.autovec_copy(cute.local_tile(lists[tile, None], (size,), (quad,)), blocks)
            for i in cutlass.range_constexpr(cute.size(blocks)):
                for part in cutlass.range_constexpr(self.parts):
                    n = blocks[i] * self.parts + part
                    if n >= begin and n < end:
                        word = (n - origin) * words_a_row + (m >> 5)
                        cute.arch.atomic_or(bitmap.iterator + word, bit, scope="cta")

    @cute.jit
    def read_bits(self, bits: cute.Tensor, row: cute.Tensor, words: Int32, lane: Int32):
        """Write the indices of the set bits of a row of the bitmap, ascending; by one warp."""
        written = Int32(0)
        for w in cutlass.range(0, words, 32):
            word = Uint32(0)
            at = w + lane
            if at < words:
                word = Uint32(bits[at])
            number = Int32(cute.arch.popc(word))
            through = warp_prefix_sum(number, lane)
            offset = written + through - number
            for i in cutlass.range(number):
                bit = Int32(cute.arch.popc((word & (~word + 1)) - 1))
                row[offset + i] = at * 32 + bit
                word = word ^ (Uint32(1) << Uint32(bit))
            written += cute.arch.shuffle_sync(through, 31)

    @cute.jit
    def write_work_tiles(
        self, plan: cute.Tensor, counts: cute.Tensor, tiles_before: cute.Tensor, row: tuple, lane: Int32
    ):
        """Write a row's work tiles for all query heads of this list: head by head, a sequence's rows side by side.

        row: index of the sequence's first row among all heads' rows, number of its rows, the sequence, the head, the
        row's index in the sequence and among the head's rows, and its start.
        """
        segment, rows, sequence, head, n, flat_row, start = row
        count = counts[head, flat_row]
        number = num_work_tiles(count, self.longest)
        first, end, own = tiles_before[segment], tiles_before[segment + rows], tiles_before[segment + n]
        first_tile = self.q_heads_per_list * first + own - first
        for i in cutlass.range(lane, number * self.q_heads_per_list, 32):
            copy, index = i // number, i % number
            at = first_tile + copy * (end - first) + index
            numbers = (
                sequence,
                head * self.q_heads_per_list + copy,
                n,
                count * index // number,
                count * (index + 1) // number,
                i,
                Int32(start & 0xFFFFFFFF),
                Int32(start >> 32),
            )
            for field in cutlass.range_constexpr(WORK_TILE):
                plan[at, field] = numbers[field]
