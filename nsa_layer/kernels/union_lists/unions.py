"""Forward lists of query tiles: the union of their tokens' blocks, each entry with the tokens that list it as bits.

A CTA has a tile. It marks the blocks in a bitmap of the sequence's blocks in shared memory; prefix sums of its words'
popcounts give each block its index in the union; then every entry sets its token's bit there. Unions longer than the
capacity in shared memory are written in rounds, from the entries in registers.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Uint32, const_expr

from flash_attn.cute.lists.rows import sequence_at
from flash_attn.cute.utils import warp_prefix_sum
from nsa_layer.kernels.launch import launch
from nsa_layer.kernels.union_lists.sizes import tokens_of_tile, union_capacity, words_of_entry
from nsa_layer.support import UNION_BLOCK, UNION_ROWS

PER_THREAD = 8  # entries of lists, while 1,024 threads are enough for them
MOST_CAPACITY = 512  # entries of a union that are written in a round
BITMAP_WORDS = (32, 256, 2048, 16384)  # of 32 blocks


class Unions(NamedTuple):
    """Forward lists of tiles of rows, M = ceil(T * G / 128) of a sequence. Packed: without B, and M of all sequences.

    Attributes:
        counts: int32 [B, Hs, M].
        blocks: int32 [B, Hs, M, R], ascending, of 64 keys: a listed block of 128 is two of them. R is the most that a
            tile may have, `union_capacity`; past the count nothing is written.
        bits: int32 [B, Hs, M, R, W]: bit ``j % 32`` of word ``j // 32`` says that token ``128 * tile // G + j`` lists
            the block. W is 1 for up to 32 tokens, else 2 or 4. Of listed blocks of 32 or 16 keys an entry holds two or
            four, and has so many words for each, one block after the other.
    """

    counts: torch.Tensor
    blocks: torch.Tensor
    bits: torch.Tensor


class UnionLists:
    """The kernel of `union_lists`: a CTA makes the union of a tile.

    Args:
        n: entries of a token's list.
        G: heads of a token that are rows.
        block_size: keys of a listed block, a multiple of `UNION_BLOCK`, or a half or a quarter of it.
        q_tile: tokens that share a list.
        bitmap_words: 32 blocks each, enough for the longest sequence.
    """

    def __init__(self, n: int, G: int, block_size: int, q_tile: int, causal: bool, bitmap_words: int) -> None:
        self.n, self.G, self.block_size, self.q_tile = n, G, block_size, q_tile
        self.causal, self.bitmap_words = causal, bitmap_words
        # Entries of a block, and blocks of an entry: one of them is 1.
        self.parts, self.shares = max(1, block_size // UNION_BLOCK), max(1, UNION_BLOCK // block_size)
        self.words = words_of_entry(G, block_size)
        self.entries = tokens_of_tile(G) * n
        self.threads = min(1024, 32 * -(-self.entries // (32 * PER_THREAD)))
        self.capacity = min(MOST_CAPACITY, self.entries)
        starts = ("starts",) * 4
        self.shapes = f"B L H {n} *", *starts, "sequences", "B H M", "B H M R", f"B H M R {self.words}"

    @cute.jit
    def __call__(self, *arguments):
        """Lists [B, lists, H, n], packed [1, all lists, H, n]; starts of packed queries, keys, lists and tiles;
        positions of first queries; counts [B, H, M], packed [1, H, all M], blocks and bits of `Unions`; queries and
        keys of a sequence, not read where packed; stream."""
        tensors, (queries, keys, stream) = arguments[:9], arguments[9:]
        self.kernel(tensors, queries, keys).launch(
            grid=[cute.size(tensors[6].shape), 1, 1], block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, tensors: tuple, queries: Int32, keys: Int32):
        lists, cu_seqlens, cu_seqlens_k, cu_lists, cu_tiles, q_offset, counts, blocks, bits = tensors
        tidx, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        _, H, M = counts.shape
        head, batch, m = cta % H, cta // H // M, cta // H % M
        smem = cutlass.utils.SmemAllocator()
        bitmap = smem.allocate_tensor(Uint32, cute.make_layout(self.bitmap_words), byte_alignment=16)
        before = smem.allocate_tensor(Int32, cute.make_layout(self.bitmap_words), byte_alignment=16)
        union = smem.allocate_tensor(Int32, cute.make_layout(self.capacity), byte_alignment=16)
        tokens = smem.allocate_tensor(Uint32, cute.make_layout(self.capacity * self.words), byte_alignment=16)
        total = smem.allocate_tensor(Int32, cute.make_layout(1), byte_alignment=4)

        origin, T, S, tile, sequence = Int32(0), queries, keys, m, batch
        if const_expr(cu_seqlens is not None):
            sequence = sequence_at(cu_tiles, m)
            origin, tile = cu_lists[sequence], m - cu_tiles[sequence]
            T = cu_seqlens[sequence + 1] - cu_seqlens[sequence]
            S = cu_seqlens_k[sequence + 1] - cu_seqlens_k[sequence]
        ahead = Int32(0) if const_expr(q_offset is None) else q_offset[sequence]
        first = tile * UNION_ROWS // self.G
        last = cutlass.min((tile * UNION_ROWS + (UNION_ROWS - 1)) // self.G, T - 1)
        # One past the last entry that a row sees; a tile past the sequence's end has none.
        end = cute.ceil_div(S, UNION_BLOCK)
        if const_expr(self.causal):
            end = cutlass.min(end, (ahead + last) // UNION_BLOCK + 1)
        bitmap_words = cute.ceil_div(cute.ceil_div(end, self.parts), 32)
        for w in cutlass.range(tidx, bitmap_words, self.threads, unroll=1):
            bitmap[w] = Uint32(0)
        own = cute.make_rmem_tensor(-(-self.entries // self.threads), Int32)
        for i in cutlass.range_constexpr(cute.size(own)):
            x = tidx + i * self.threads
            t = first + x // self.n
            own[i] = Int32(-1)
            if x < self.entries and t <= last:
                own[i] = lists[batch, origin + t // self.q_tile, head, x % self.n]
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(cute.size(own)):
            blocks_end = cute.ceil_div(S, self.block_size)
            if const_expr(self.causal):
                position = ahead + first + (tidx + i * self.threads) // self.n
                blocks_end = cutlass.min(blocks_end, position // self.block_size + 1)
            if own[i] >= blocks_end:
                own[i] = Int32(-1)
            if own[i] >= 0:
                listed = own[i] // self.shares
                cute.arch.atomic_or(bitmap.iterator + (listed >> 5), Uint32(1) << Uint32(listed & 31), scope="cta")
        cute.arch.sync_threads()
        if cute.arch.warp_idx() == 0:
            self.count_before(bitmap, before, total, bitmap_words)
        cute.arch.sync_threads()

        size = total[0]
        for done in cutlass.range(0, size, self.capacity):
            here = cutlass.min(size - done, self.capacity)
            for i in cutlass.range(tidx, here * self.words, self.threads, unroll=1):
                tokens[i] = Uint32(0)
            cute.arch.sync_threads()
            for i in cutlass.range_constexpr(cute.size(own)):
                if own[i] >= 0:
                    listed, share = own[i] // self.shares, own[i] % self.shares
                    bit = Uint32(1) << Uint32(listed & 31)
                    earlier = cute.arch.popc(Uint32(bitmap[listed >> 5]) & (bit - 1))
                    index = before[listed >> 5] + Int32(earlier) - done
                    if index >= 0 and index < here:
                        token = (tidx + i * self.threads) // self.n
                        at = index * self.words + share * (self.words // self.shares) + (token >> 5)
                        cute.arch.atomic_or(tokens.iterator + at, Uint32(1) << Uint32(token & 31), scope="cta")
                        union[index] = listed
            cute.arch.sync_threads()
            written = here * self.parts
            if const_expr(self.parts > 1):  # of the last block, some parts may be past the end
                written = cutlass.min(written, written + end - (union[here - 1] + 1) * self.parts)
            first_entry = done * self.parts
            for i in cutlass.range(tidx, written, self.threads, unroll=1):
                blocks[batch, head, m, first_entry + i] = union[i // self.parts] * self.parts + i % self.parts
            for i in cutlass.range(tidx, written * self.words, self.threads, unroll=1):
                entry, word = i // self.words, i % self.words
                bits[batch, head, m, first_entry + entry, word] = Int32(tokens[entry // self.parts * self.words + word])
            if tidx == 0:
                counts[batch, head, m] = first_entry + written
            cute.arch.sync_threads()
        if size == 0 and tidx == 0:
            counts[batch, head, m] = Int32(0)

    @cute.jit
    def count_before(self, bitmap: cute.Tensor, before: cute.Tensor, total: cute.Tensor, words: Int32):
        """The number of set bits before each word, and in all words; by one warp."""
        lane, carried = cute.arch.lane_idx(), Int32(0)
        for start in cutlass.range(0, words, 32, unroll=1):
            at, number = start + lane, Int32(0)
            if at < words:
                number = Int32(cute.arch.popc(Uint32(bitmap[at])))
            through = warp_prefix_sum(number, lane)
            if at < words:
                before[at] = carried + through - number
            carried += cute.arch.shuffle_sync(through, 31)
        if lane == 0:
            total[0] = carried


def union_lists(
    block_indices: torch.Tensor,
    *,
    G: int,
    block_size: int,
    causal: bool,
    q_tile: int = 1,
    queries: int | None = None,
    keys: int | None = None,
    q_offset: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    cu_lists: torch.Tensor | None = None,
    cu_tiles: torch.Tensor | None = None,
    tiles: int | None = None,
) -> Unions:
    """Forward lists with bits, by tiles of 128 rows (token, head): row r is token ``r // G``, head ``r % G``.

    Args:
        block_indices: int32 [B, L, Hs, n], packed [lists of all sequences, Hs, n]; see the package.
        G: query heads that share a list.
        block_size: keys of a block: a multiple of 64, or 16 or 32.
        q_tile: tokens that share a list: token t of a sequence has list ``t // q_tile``.
        queries, keys: tokens of a sequence, packed of the longest; None: as many as lists, and as many as queries.
        q_offset: int32 [B], packed [sequences]: position of the first token among its sequence's keys; None: 0.
        cu_seqlens, cu_seqlens_k, cu_lists, cu_tiles: packed: int32 [sequences + 1] on the device; queries, keys, lists
            and tiles before each sequence. None for keys or lists: those of queries.
        tiles: packed: of all sequences, or more; tiles past the last sequence are empty.

    Raises:
        ValueError: a sequence has more than 524,288 blocks, or entries.
    """
    packed = cu_seqlens is not None
    lists = block_indices.unsqueeze(0) if packed else block_indices
    B, L, H, n = lists.shape
    queries = L if queries is None else queries
    keys = queries if keys is None else keys
    M = tiles if packed else -(-queries * G // UNION_ROWS)
    unit = max(block_size, UNION_BLOCK)
    need = -(-keys // (32 * unit))
    if need > BITMAP_WORDS[-1]:
        raise ValueError(f"a sequence may have {32 * BITMAP_WORDS[-1]} blocks of {unit}, got {keys} tokens")
    R = union_capacity(G, n, block_size, keys, q_tile)
    counts = lists.new_empty(B, H, M)
    blocks, bits = lists.new_empty(B, H, M, R), lists.new_empty(B, H, M, R, words_of_entry(G, block_size))
    if counts.numel():
        static = (n, G, block_size, q_tile, causal, next(words for words in BITMAP_WORDS if words >= need))
        of_keys, of_lists = (cu_seqlens if cu is None else cu for cu in (cu_seqlens_k, cu_lists))
        where = (cu_seqlens, of_keys, of_lists, cu_tiles, q_offset if causal else None)
        launch("union_lists", UnionLists, static, lists, *where, counts, blocks, bits, queries, keys)
    return Unions(*(x.select(0, 0) if packed else x for x in (counts, blocks, bits)))
