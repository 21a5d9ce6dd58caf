"""The gradient of index keys: a CTA has a block of them, and goes through the tokens that list it, in order.

A thread finds where its token lists the block, and so the key and the factor of its query; then streams of as many
threads as there are dimensions add such products to sums of their own in shared memory, which are added up at the end.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from flash_attn.cute.lists.rows import sequence_at
from nsa_layer.kernels.csr import WORK_TILE

MOST_THREADS = 256
SHARED = 128 * 1024  # bytes of sums
AHEAD = 8  # loads of a thread before it waits for the first


class IndexKeyGradient:
    """Best tokens and gradients of scores -> the gradient of k_index.

    Args:
        n: blocks of a list.
        init: first blocks, which are forced.
    """

    def __init__(self, D: int, n: int, block_size: int, init: int) -> None:
        self.D, self.n, self.block_size, self.init = D, n, block_size, init
        self.streams = max(1, min(MOST_THREADS // D, SHARED // (4 * block_size * D)))
        self.threads = self.streams * D
        self.vector = math.gcd(n, 4)  # entries of a list that are loaded at a time
        of_lists, pairs = f"B T H {n} @{4 * self.vector}", ("pairs", f"work_tiles {WORK_TILE}", "ends")
        self.shapes = "B T H D", of_lists, of_lists, *pairs, "starts", "starts", "starts", "B S Hk D"

    @cute.jit
    def __call__(self, *arguments):
        """q_index, best tokens, gradients of scores; three tensors of `KeyPairs`; starts of packed queries, keys and
        blocks; gradient of k_index; stream. Packed tensors have a batch of one."""
        tensors, stream = arguments[:-1], arguments[-1]
        best, ends, dk = tensors[1], tensors[5], tensors[9]
        blocks = (ends.shape[0] - 1) // (best.shape[0] * best.shape[2])
        self.kernel(tensors, blocks).launch(
            grid=[blocks * dk.shape[0] * dk.shape[2], 1, 1], block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, tensors: tuple, blocks: Int32):
        q, best, dz, pair_tokens, work_tiles, ends, cu, cu_keys, cu_blocks, dk = tensors
        tidx, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        number, kv_head, batch = cta % blocks, cta // blocks % dk.shape[2], cta // blocks // dk.shape[2]
        block, before, keys_before, keys = number, Int32(0), Int32(0), Int32(dk.shape[1])
        if const_expr(cu is not None):
            sequence = sequence_at(cu_blocks, number)
            block, before, keys_before = number - cu_blocks[sequence], cu[sequence], cu_keys[sequence]
            keys = cu_keys[sequence + 1] - keys_before
        smem = cutlass.utils.SmemAllocator()
        layout = cute.make_ordered_layout((self.D, self.block_size, self.streams), order=(0, 1, 2))
        sums = smem.allocate_tensor(Float32, layout, byte_alignment=16)
        rows, keys_in_block, factors = (
            smem.allocate_tensor(of, cute.make_layout(self.threads), byte_alignment=16)
            for of in (Int32, Int32, Float32)
        )
        dim, stream = tidx % self.D, tidx // self.D
        values = cute.make_rmem_tensor((AHEAD,), Float32)
        for key in cutlass.range(self.block_size):
            sums[dim, key, stream] = Float32(0.0)
        if block >= self.init and block * self.block_size < keys:
            heads = best.shape[2] // dk.shape[2]  # of lists, that share the keys
            for member in cutlass.range(heads, unroll=1):
                head = kv_head * heads + member
                row = (batch * best.shape[2] + head) * blocks + number
                begin, end = work_tiles[ends[row], 1], work_tiles[ends[row + 1] - 1, 2]
                of_head = tuple(x[batch, None, head, None] for x in (q, best, dz))
                for first in cutlass.range(begin, end, self.threads, unroll=1):
                    count = cutlass.min(end - first, self.threads)
                    found = cute.domain_offset(first, pair_tokens), count, before, block * self.block_size
                    cute.arch.sync_threads()
                    self.find(of_head[1:], found, rows, keys_in_block, factors)
                    cute.arch.sync_threads()
                    last = cutlass.min((stream + 1) * self.D, count)
                    for at in cutlass.range(stream * self.D, last, AHEAD, unroll=1):
                        for i in cutlass.range_constexpr(AHEAD):
                            values[i] = of_head[0][rows[at + i], dim].to(Float32)
                        for i in cutlass.range_constexpr(AHEAD):
                            sums[dim, keys_in_block[at + i], stream] += factors[at + i] * values[i]
        cute.arch.sync_threads()
        for i in cutlass.range(tidx, self.D * self.block_size, self.threads):
            key, total = block * self.block_size + i // self.D, Float32(0.0)
            for of in cutlass.range_constexpr(self.streams):
                total += sums[i % self.D, i // self.D, of]
            if key < keys:
                dk[batch, keys_before + key, kv_head, i % self.D] = total.to(dk.element_type)

    @cute.jit
    def find(self, of_head: tuple, pairs: tuple, rows: cute.Tensor, keys_in_block: cute.Tensor, factors: cute.Tensor):
        """Rows of tokens, their best keys in the block, and gradients of the scores, 0 past the last token."""
        best, dz = of_head
        tokens, count, before, first_key = pairs
        tidx = cute.arch.thread_idx()[0]
        row = before + tokens[cutlass.min(tidx, count - 1)]
        own = cute.make_rmem_tensor((self.vector, AHEAD), Int32)
        key, entry, factor = Int32(0), Int32(-1), Float32(0.0)
        loads = self.n // self.vector
        for first in cutlass.range_constexpr(0, loads, AHEAD):
            for i in cutlass.range_constexpr(min(AHEAD, loads - first)):
                cute.autovec_copy(cute.local_tile(best[row, None], (self.vector,), (first + i,)), own[None, i])
            for i in cutlass.range_constexpr(min(AHEAD, loads - first)):
                for e in cutlass.range_constexpr(self.vector):
                    at = own[e, i] - first_key
                    is_here = (at >= 0) & (at < self.block_size)
                    key = cutlass.select_(is_here, at, key)
                    entry = cutlass.select_(is_here, Int32((first + i) * self.vector + e), entry)
        if (entry >= 0) & (tidx < count):
            factor = dz[row, entry]
        rows[tidx], keys_in_block[tidx], factors[tidx] = row, key, factor
