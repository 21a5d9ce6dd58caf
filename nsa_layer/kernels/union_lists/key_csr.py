"""The tokens that list each block, in CSR, and work tiles over its rows: a counting sort of pairs (block, token).

Four launches: pairs of every block in every chunk of tokens; sums over the chunks; starts and work tiles; the tokens.
No atomic decides an order. Counts of chunks take no more memory than one entry of each list.

A CTA has a chunk and a range of blocks, and goes through the chunk 32 tokens at a time. Every entry sets its token's
bit in a word of its block in shared memory; the word then says how many of the 32 tokens list the block, and which
rank among them a token has. Two sets of words alternate, so that one is cleared while the next is filled.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Uint32, const_expr

from flash_attn.cute.bwd_dkdv.spec import KeyPairs
from flash_attn.cute.lists.rows import sequence_at
from nsa_layer.kernels.csr import WORK_TILE, RowStarts
from nsa_layer.kernels.launch import launch
from nsa_layer.kernels.union_lists.sizes import CHUNKS, most_partials

STEP = 32  # tokens: the bits of a word
MOST_THREADS = 512
LEAST_CHUNK = 256  # tokens
CAPACITIES = 1024, 4096, 16384  # blocks of a CTA's range: the least that holds all blocks, or the largest
MOST_PAIRS = 2**31 - 1


class TokenPairs:
    """Counts of each block's pairs in each chunk of tokens or, if `starts` are given, the tokens in CSR.

    Args:
        n: entries of a list.
        block_size: keys of a block.
        q_tile: tokens that share a list.
        parts: query heads of a key/value head that have lists of their own; else 1. "Token" then is a token's head.
        capacity: blocks of a CTA's range.
    """

    def __init__(self, n: int, block_size: int, q_tile: int, parts: int, causal: bool, capacity: int) -> None:
        self.n, self.block_size, self.q_tile, self.parts = n, block_size, q_tile, parts
        self.causal, self.capacity = causal, capacity
        self.threads = min(MOST_THREADS, STEP * n)
        starts = ("starts",) * 3
        self.shapes = f"B L H {n} *", *starts, "sequences", "segments chunks N", "ends", "pairs"

    @cute.jit
    def __call__(self, *arguments):
        """Lists [B, lists, H * parts, n], packed [1, all lists, H * parts, n]; starts of packed queries, lists and
        blocks; positions of first queries; counts [B * H, chunks, N] of pairs, with starts of the chunks before; starts
        [B * H * N + 1] and tokens, or None; tokens, packed of all sequences; tokens of a chunk, a multiple of STEP."""
        tensors, (queries, chunk, stream) = arguments[:8], arguments[8:]
        segments, chunks, N = tensors[5].shape
        self.kernel(tensors, queries * self.parts, chunk).launch(
            grid=[chunks * cute.ceil_div(N, self.capacity) * segments, 1, 1], block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, tensors: tuple, end: Int32, chunk: Int32):
        lists, cu_seqlens, cu_lists, cu_blocks, q_offset, counts, starts, tokens = tensors
        _, chunks, N = counts.shape
        tidx, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        ranges = cute.ceil_div(N, self.capacity)
        H = lists.shape[2] // self.parts
        segment, at = cta // ranges // chunks, cta // ranges % chunks
        batch, head = segment // H, segment % H
        low = cta % ranges * self.capacity
        high = cutlass.min(low + self.capacity, N)
        smem = cutlass.utils.SmemAllocator()
        words = smem.allocate_tensor(Uint32, cute.make_layout(2 * self.capacity), byte_alignment=16)
        cursors = smem.allocate_tensor(Int32, cute.make_layout(self.capacity), byte_alignment=16)
        for i in cutlass.range(tidx, high - low, self.threads):
            words[i] = Uint32(0)
            words[self.capacity + i] = Uint32(0)
            cursors[i] = Int32(0)
            if const_expr(starts is not None):
                cursors[i] = starts[segment * N + low + i] + counts[segment, at, low + i]
        first = at * chunk
        end = cutlass.min(first + chunk, end)
        mLists = cute.domain_offset((0, head * self.parts, 0), lists[batch, None, None, None])
        own, positions, ranks, coming = (
            cute.make_rmem_tensor(-(-STEP * self.n // self.threads), Int32) for _ in range(4)
        )
        self.read(mLists, (cu_seqlens, cu_lists), first, end, coming)
        cute.arch.sync_threads()
        for step in cutlass.range(cute.ceil_div(end - first, STEP)):
            filled = cute.domain_offset(step % 2 * self.capacity, words)
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
                        tokens[cursors[own[i]] + ranks[i]] = positions[i]
                cute.arch.sync_threads()
            for i in cutlass.range_constexpr(cute.size(own)):
                counted = own[i] >= 0
                if const_expr(tokens is not None):
                    counted = ranks[i] == 0  # the exchange is for one thread
                if counted:
                    word = cute.arch.atomic_exch(filled.iterator + own[i], Uint32(0), scope="cta")
                    if word != 0:  # so for the first thread only
                        cursors[own[i]] += Int32(cute.arch.popc(word))
        if const_expr(tokens is None):
            cute.arch.sync_threads()
            for i in cutlass.range(tidx, high - low, self.threads):
                counts[segment, at, low + i] = cursors[i]

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
        """Entries as blocks of the CTA's range, -1 outside of it, and their tokens' positions."""
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
    """Counts of each block's pairs in each chunk -> sums over the chunks before it, in place, and over all chunks."""

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


def pairs_by_block(
    block_indices: torch.Tensor,
    *,
    block_size: int,
    causal: bool,
    cap: int,
    q_tile: int = 1,
    heads: int | None = None,
    queries: int | None = None,
    keys: int | None = None,
    q_offset: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_lists: torch.Tensor | None = None,
    cu_blocks: torch.Tensor | None = None,
    blocks: int | None = None,
) -> KeyPairs:
    """The tokens that list each block, by list head; behind the last token and the last work tile nothing is written.

    Args:
        block_indices: int32 [B, L, Hs, n], packed [lists of all sequences, Hs, n]; see the package.
        block_size: keys of a block.
        cap: tokens of a work tile at most.
        q_tile: tokens that share a list: token t of a sequence has list ``t // q_tile``.
        heads: heads of the rows, each with the tokens of Hs / heads neighbouring lists, see `KeyPairs.by_head`: tokens
            are ``position * (Hs / heads) + index of the list``. None: Hs.
        queries, keys: tokens of a sequence, packed of all queries; None: as many as lists, and as many as queries.
        q_offset: int32 [B], packed [sequences]: position of the first token among its sequence's keys; None: 0.
        cu_seqlens, cu_lists, cu_blocks: packed: int32 [sequences + 1] on the device; queries, lists and blocks before
            each sequence. None for lists: those of queries.
        blocks: packed: of all sequences, or more.

    Raises:
        ValueError: the tokens' lists have 2^31 entries or more.
    """
    packed = cu_seqlens is not None
    lists = block_indices.unsqueeze(0) if packed else block_indices
    B, L, Hs, n = lists.shape
    H, T = Hs if heads is None else heads, L if queries is None else queries
    entries = B * T * Hs * n
    if entries > MOST_PAIRS:
        raise ValueError(f"block_indices may have {MOST_PAIRS} entries, got {entries}: pass fewer heads")
    N = blocks if packed else -(-(T if keys is None else keys) // block_size)
    parts = Hs // H
    chunk = max(LEAST_CHUNK, -(-T * parts // (CHUNKS * STEP)) * STEP)
    counts, totals = lists.new_empty(B * H, -(-T * parts // chunk), N), lists.new_empty(B * H * N)
    starts, row_tiles = lists.new_empty(B * H * N + 1), lists.new_empty(B * H * N + 1)
    tokens, work_tiles = lists.new_empty(entries), lists.new_empty(entries // cap + B * H * N, WORK_TILE)
    static = (n, block_size, q_tile, parts, causal, next((size for size in CAPACITIES if size >= N), CAPACITIES[-1]))
    of_lists = cu_seqlens if cu_lists is None else cu_lists
    arguments = (lists, cu_seqlens, of_lists, cu_blocks, q_offset if causal else None, counts)
    launch("token_pairs", TokenPairs, static, *arguments, None, None, T, chunk)
    launch("chunk_sums", ChunkSums, (), counts, totals)
    launch("row_starts", RowStarts, (cap, True), totals, starts, row_tiles, work_tiles, None, 0)
    launch("token_pairs", TokenPairs, static, *arguments, starts, tokens, T, chunk)
    partials = most_partials(entries, cap)
    return KeyPairs(tokens, work_tiles, row_tiles, partials, block_size, cu_blocks, parts > 1)
