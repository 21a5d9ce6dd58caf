"""Kernels of `key_csr`: pairs (block, token) of a chunk of tokens, counted or written, and sums over chunks.

A CTA has a chunk and a range of blocks, and goes through the chunk 32 tokens at a time. Every entry sets its token's
bit in a word of its block in shared memory; the word then says how many of the 32 tokens list the block, and which
place among them a token has. Two sets of words take turns, so that one is cleared while the next is filled.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from flash_attn.cute.lists.rows import sequence_at

STEP = 32  # tokens: the bits of a word
MOST_THREADS = 512


class TokenPairs:
    """Pairs of each block in each chunk of tokens or, given where rows start, the tokens at their places.

    Args:
        n: entries of a list.
        block_size: keys of a block.
        q_tile: tokens that share a list.
        parts: query heads of a key/value head that have lists of their own; else 1. "Token" then is a token's head.
        room: blocks of a CTA's range.
    """

    def __init__(self, n: int, block_size: int, q_tile: int, parts: int, causal: bool, room: int) -> None:
        self.n, self.block_size, self.q_tile, self.parts = n, block_size, q_tile, parts
        self.causal, self.room = causal, room
        self.threads = min(MOST_THREADS, STEP * n)
        starts = ("starts",) * 3
        self.shapes = f"B L H {n} *", *starts, "sequences", "segments chunks N", "ends", "pairs"

    @cute.jit
    def __call__(
        self,
        lists: cute.Tensor,  # [B, lists, H * parts, n]; packed [1, all lists, H * parts, n]
        cu_seqlens: cute.Tensor | None,  # [sequences + 1]
        cu_lists: cute.Tensor | None,  # the same of lists
        cu_blocks: cute.Tensor | None,  # of blocks
        q_offset: cute.Tensor | None,  # [B], packed [sequences]
        counts: cute.Tensor,  # [B * H, chunks, N]: pairs; if they are to be written, pairs of the chunks before
        starts: cute.Tensor | None,  # [B * H * N + 1]
        tokens: cute.Tensor | None,  # as many as tokens have entries
        queries: Int32,  # tokens, packed of all sequences
        chunk: Int32,  # tokens, a multiple of STEP
        stream,
    ):
        ranges = cute.ceil_div(counts.shape[2], self.room)
        tensors = (lists, cu_seqlens, cu_lists, cu_blocks, q_offset, counts, starts, tokens)
        self.kernel(tensors, queries * self.parts, chunk).launch(
            grid=[counts.shape[1] * ranges * counts.shape[0], 1, 1], block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, tensors: tuple, end: Int32, chunk: Int32):
        lists, cu_seqlens, cu_lists, cu_blocks, q_offset, counts, starts, tokens = tensors
        _, chunks, N = counts.shape
        tidx, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        ranges = cute.ceil_div(N, self.room)
        H = lists.shape[2] // self.parts
        segment, at = cta // ranges // chunks, cta // ranges % chunks
        batch, head = segment // H, segment % H
        low = cta % ranges * self.room
        high = cutlass.min(low + self.room, N)
        smem = cutlass.utils.SmemAllocator()
        words = smem.allocate_tensor(Uint32, cute.make_layout(2 * self.room), byte_alignment=16)
        places = smem.allocate_tensor(Int32, cute.make_layout(self.room), byte_alignment=16)
        for i in cutlass.range(tidx, high - low, self.threads):
            words[i] = Uint32(0)
            words[self.room + i] = Uint32(0)
            places[i] = Int32(0)
            if const_expr(starts is not None):
                places[i] = starts[segment * N + low + i] + counts[segment, at, low + i]
        first = at * chunk
        end = cutlass.min(first + chunk, end)
        mLists = cute.domain_offset((0, head * self.parts, 0), lists[batch, None, None, None])
        own, positions, ranks, coming = (
            cute.make_rmem_tensor(-(-STEP * self.n // self.threads), Int32) for _ in range(4)
        )
        self.read(mLists, (cu_seqlens, cu_lists), first, end, coming)
        cute.arch.sync_threads()
        for step in cutlass.range(cute.ceil_div(end - first, STEP)):
            filled = cute.domain_offset(step % 2 * self.room, words)
            token = first + step * STEP
            self.locate(coming, token, (cu_seqlens, cu_blocks, q_offset, batch, low, high), own, positions)
            self.read(mLists, (cu_seqlens, cu_lists), token + STEP, end, coming)
            for i in cutlass.range_constexpr(cute.size(own)):
                if own[i] >= 0:
                    cute.arch.atomic_or(filled.iterator + own[i], self.bit(i), scope="cta")
            cute.arch.sync_threads()
            if const_expr(tokens is not None):
                for i in cutlass.range_constexpr(cute.size(own)):
                    ranks[i] = Int32(-1)
                    if own[i] >= 0:
                        ranks[i] = Int32(cute.arch.popc(Uint32(filled[own[i]]) & (self.bit(i) - 1)))
                        tokens[places[own[i]] + ranks[i]] = positions[i]
                cute.arch.sync_threads()
            for i in cutlass.range_constexpr(cute.size(own)):
                counted = own[i] >= 0
                if const_expr(tokens is not None):
                    counted = ranks[i] == 0  # the others would find nothing
                if counted:
                    word = cute.arch.atomic_exch(filled.iterator + own[i], Uint32(0), scope="cta")
                    if word != 0:  # one thread has it, whichever was first
                        places[own[i]] += Int32(cute.arch.popc(word))
        if const_expr(tokens is None):
            cute.arch.sync_threads()
            for i in cutlass.range(tidx, high - low, self.threads):
                counts[segment, at, low + i] = places[i]

    def bit(self, i: int) -> Uint32:
        """The bit of the token that a thread's i-th entry belongs to."""
        return Uint32(1) << Uint32((cute.arch.thread_idx()[0] + i * self.threads) // self.n)

    @cute.jit
    def read(self, lists: cute.Tensor, starts: tuple, first: Int32, end: Int32, entries: cute.Tensor):
        """A thread's entries of the STEP tokens from `first` on; -1 past the last token."""
        cu_seqlens, cu_lists = starts
        for i in cutlass.range_constexpr(cute.size(entries)):
            x = cute.arch.thread_idx()[0] + i * self.threads
            at = first + x // self.n
            entries[i] = Int32(-1)
            if x < STEP * self.n and at < end:
                token = at // self.parts
                if const_expr(self.q_tile > 1 and cu_seqlens is not None):
                    sequence = sequence_at(cu_seqlens, token)
                    token = cu_lists[sequence] + (token - cu_seqlens[sequence]) // self.q_tile
                elif const_expr(self.q_tile > 1):
                    token = token // self.q_tile
                entries[i] = lists[token, at % self.parts, x % self.n]

    @cute.jit
    def locate(self, entries: cute.Tensor, first: Int32, span: tuple, own: cute.Tensor, positions: cute.Tensor):
        """Entries as places in the CTA's range, -1 if they have none there, and their tokens' positions."""
        cu_seqlens, cu_blocks, q_offset, sequence, low, high = span
        for i in cutlass.range_constexpr(cute.size(own)):
            positions[i] = first + (cute.arch.thread_idx()[0] + i * self.threads) // self.n
            own[i] = Int32(-1)
            if entries[i] >= 0:
                before, end, of = Int32(0), high, sequence
                if const_expr(cu_seqlens is not None):
                    of = sequence_at(cu_seqlens, positions[i] // self.parts)
                    before, end = cu_blocks[of], cu_blocks[of + 1] - cu_blocks[of]
                    positions[i] -= cu_seqlens[of] * self.parts
                if const_expr(self.causal):
                    ahead = Int32(0) if const_expr(q_offset is None) else q_offset[of]
                    end = cutlass.min(end, (ahead + positions[i] // self.parts) // self.block_size + 1)
                row = before + entries[i]
                if entries[i] < end and row >= low and row < high:
                    own[i] = row - low


class ChunkSums:
    """Pairs of each block in each chunk -> of all chunks before it, in place, and of all chunks."""

    shapes = "segments chunks N", "rows"
    threads = 128

    @cute.jit
    def __call__(self, counts: cute.Tensor, totals: cute.Tensor, stream):
        """counts: [B * H, chunks, N]. totals: [B * H * N]."""
        grid = [cute.ceil_div(totals.shape[0], self.threads), 1, 1]
        self.kernel(counts, totals).launch(grid=grid, block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, counts: cute.Tensor, totals: cute.Tensor):
        row = cute.arch.block_idx()[0] * self.threads + cute.arch.thread_idx()[0]
        if row < totals.shape[0]:
            own = counts[row // counts.shape[2], None, row % counts.shape[2]]
            total = Int32(0)
            for chunk in cutlass.range(counts.shape[1], unroll=8):
                number = own[chunk]
                own[chunk] = total
                total += number
            totals[row] = total
