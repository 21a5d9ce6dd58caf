"""Prologue and epilogue of a warpgroup's 64 rows of dq: row sums, initial accumulator, and dq in q's dtype.

The accumulator has wgmma's register layout: for 64 rows by 8 columns, then by thread, then by register, so a thread
reads 16 bytes at a time. Rows of rounded dq are contiguous, but of every 8 columns a thread holds 2: the threads of a
quad exchange pairs, so that each reads and stores 16 bytes at a time.

Row sums (`shared_backward`) are read, or computed from o and do and written for the dk and dv pass, which saves the
preprocess kernel.
"""

import math
from dataclasses import dataclass
from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from flash_attn.cute import utils
from flash_attn.cute.bwd_dq.spec import THREADS
from flash_attn.cute.fwd_sm90.masks import ROWS_OF_THREAD, KeyMask


def rows_of_head(tensor: cute.Tensor, mask: KeyMask, head: Int32, width: int = 1) -> cute.Tensor:
    """The fp32 values of a sequence and query head, `width` per row, from the sequence's first row on."""
    if not mask.seqlen.has_cu_seqlens_q:
        return tensor[mask.batch, head, None]
    return cute.domain_offset((Int64(mask.seqlen.padded_offset_q) * width,), tensor[head, None])


def vector_of_row(tensor: cute.Tensor, mask: KeyMask, r: int, fours: int) -> cute.Tensor:
    """The thread's 8 of columns 32 * fours .. 32 * fours + 31 in its r-th row of a sequence, [T, D, Hq]."""
    return cute.local_tile(tensor[mask.row(r), None, mask.query_head(r)], (8,), (4 * fours + mask.thread % 4,))


@dataclass(frozen=True)
class DqOutput:
    """A warpgroup's 64 rows of dq of one tile."""

    dq: cute.Tensor  # [T, D, Hq, B], packed [total, D, Hq]
    accum: Optional[cute.Tensor]  # fp32 [B, Hq, rows * D], packed [Hq, rows * D]; dq starts from it. None: from 0
    onto_dq: cutlass.Constexpr[bool]  # as in `DqSpec`
    head_dim: cutlass.Constexpr[int]
    softmax_scale: Float32
    mask: KeyMask  # of the warpgroup: its rows

    @cute.jit
    def start(self, acc_dQ: cute.Tensor):
        """Set the registers of dq to 0 or to `accum`."""
        acc_dQ.fill(0.0)
        if const_expr(self.accum is not None):
            if self.mask.first < self.mask.seqlen.seqlen_q:
                registers = cute.make_tensor(acc_dQ.iterator, cute.make_layout((4, self.head_dim // 8)))
                cute.autovec_copy(self._accumulator(), registers)

    def _accumulator(self) -> cute.Tensor:
        """The thread's values of the warpgroup's rows in `accum`, in register order: [4, D / 8]."""
        rows = rows_of_head(self.accum, self.mask, self.mask.head, width=self.head_dim)
        begin = rows.iterator + (Int64(self.mask.first) * self.head_dim + self.mask.thread * 4)
        layout = cute.make_layout((4, self.head_dim // 8), stride=(1, 4 * THREADS))
        return cute.make_tensor(begin.align(16), layout)

    @cute.jit
    def write(self, acc_dQ: cute.Tensor):
        seqlen, lane = self.mask.seqlen, self.mask.thread % 4
        dq = seqlen.offset_batch_Q(self.dq, self.mask.batch, dim=3)
        if const_expr(self.onto_dq):
            held = self._held(dq, acc_dQ)
            acc_dQ.store(acc_dQ.load() * self.softmax_scale + held.load().to(Float32))
        else:
            acc_dQ.store(acc_dQ.load() * self.softmax_scale)
        pairs = self._pairs(utils.cvt_f16(acc_dQ, dq.element_type))
        for r in cutlass.range_constexpr(ROWS_OF_THREAD):
            for fours in cutlass.range_constexpr(self.head_dim // 32):
                vector = cute.make_rmem_tensor((8,), dq.element_type)
                words = cute.recast_tensor(vector, Int32)
                for i, word in enumerate(exchanged([pairs[r, 4 * fours + i] for i in range(4)], lane)):
                    words[i] = word
                if self.mask.row(r) < seqlen.seqlen_q:
                    cute.autovec_copy(vector, vector_of_row(dq, self.mask, r, fours))

    @cute.jit
    def _held(self, dq: cute.Tensor, acc_dQ: cute.Tensor) -> cute.Tensor:
        """The old values of dq, in the order of the accumulator's registers; 0 past the sequence's end."""
        held = cute.make_rmem_tensor(acc_dQ.layout, dq.element_type)
        pairs, lane = self._pairs(held), self.mask.thread % 4
        pairs.fill(0)
        # All loads are in flight before the first is waited for.
        for r in cutlass.range_constexpr(ROWS_OF_THREAD):
            if self.mask.row(r) < self.mask.seqlen.seqlen_q:
                for fours in cutlass.range_constexpr(self.head_dim // 32):
                    vector = cute.make_rmem_tensor((8,), dq.element_type)
                    cute.autovec_copy(vector_of_row(dq, self.mask, r, fours), vector)
                    words = cute.recast_tensor(vector, Int32)
                    for i in cutlass.range_constexpr(4):
                        pairs[r, 4 * fours + i] = words[i]
        for r in cutlass.range_constexpr(ROWS_OF_THREAD):
            for fours in cutlass.range_constexpr(self.head_dim // 32):
                for i, word in enumerate(exchanged([pairs[r, 4 * fours + i] for i in range(4)], lane)):
                    pairs[r, 4 * fours + i] = word
        return held

    def _pairs(self, fragment: cute.Tensor) -> cute.Tensor:
        """32-bit registers, each two neighbouring columns: [2 rows, D / 8]."""
        words = cute.recast_tensor(fragment, Int32)
        return cute.make_tensor(words.iterator, cute.make_layout((ROWS_OF_THREAD, self.head_dim // 8)))


def exchanged(x: list[Int32], lane: Int32) -> list[Int32]:
    """Transpose the 4 x 4 values of a quad: thread i returns the i-th value of each of its four threads."""
    x = list(x)
    for bit in (1, 2):
        upper = lane & bit != 0
        for i in (i for i in range(4) if i & bit == 0):
            sent = Int32(cutlass.select_(upper, x[i], x[i | bit]))
            got = cute.arch.shuffle_sync_bfly(sent, offset=bit)
            low, high = x[i], x[i | bit]
            x[i], x[i | bit] = Int32(cutlass.select_(upper, got, low)), Int32(cutlass.select_(upper, high, got))
    return x


@dataclass(frozen=True)
class RowSums:
    """lse_log2 and dpsum of a warpgroup's 64 rows: read, or computed and written."""

    lse_log2: cute.Tensor  # lse_log2, dpsum: fp32 [B, Hq, rows], packed [Hq, rows]; with `out` written, else read
    dpsum: cute.Tensor
    out: Optional[cute.Tensor]  # out, dout: [T, D, Hq, B], packed [total, D, Hq]
    dout: Optional[cute.Tensor]
    lse: Optional[cute.Tensor]  # fp32 [B, Hq, T], packed [Hq, total]
    head_dim: cutlass.Constexpr[int]
    start: cutlass.Constexpr[int]  # as in `DqSpec`
    mask: KeyMask  # of the warpgroup: its rows

    @cute.jit
    def of_thread(self) -> tuple[tuple[Float32, Float32], ...]:
        """(lse_log2, dpsum) of each of the thread's rows; past the end of the sequence +inf and 0, for dS = 0."""
        mask, seqlen = self.mask, self.mask.seqlen
        heads = [mask.query_head(r) for r in range(ROWS_OF_THREAD)]
        lse_log2, dpsum = [[rows_of_head(t, mask, head) for head in heads] for t in (self.lse_log2, self.dpsum)]
        found = cute.make_rmem_tensor((ROWS_OF_THREAD, 2), Float32)
        if const_expr(self.out is not None):
            self._compute(found)
            end = self._end()
            for r in cutlass.range_constexpr(ROWS_OF_THREAD):
                if mask.row(r) < end and mask.thread % 4 == 0:
                    lse_log2[r][mask.row(r)], dpsum[r][mask.row(r)] = found[r, 0], found[r, 1]
        else:
            for r in cutlass.range_constexpr(ROWS_OF_THREAD):
                found[r, 0], found[r, 1] = Float32.inf, Float32(0.0)
                if mask.row(r) < seqlen.seqlen_q:
                    found[r, 0], found[r, 1] = lse_log2[r][mask.row(r)], dpsum[r][mask.row(r)]
        return tuple((found[r, 0], found[r, 1]) for r in range(ROWS_OF_THREAD))

    def _end(self) -> Int32:
        """Exclusive end of the sequence's rows of dpsum, padding included."""
        if const_expr(not self.mask.seqlen.has_cu_seqlens_q):
            return Int32(self.dpsum.shape[2])
        return (self.mask.seqlen.seqlen_q + (self.start - 1)) // self.start * self.start

    @cute.jit
    def _compute(self, found: cute.Tensor):
        mask, seqlen = self.mask, self.mask.seqlen
        o, do = [seqlen.offset_batch_Q(t, mask.batch, dim=3) for t in (self.out, self.dout)]
        lse = seqlen.offset_batch_Q(self.lse, mask.batch, dim=2)
        rows = cute.make_rmem_tensor((8, self.head_dim // 32, 2, ROWS_OF_THREAD), o.element_type)
        rows.fill(0)
        for r in cutlass.range_constexpr(ROWS_OF_THREAD):
            found[r, 0] = Float32.inf
            if mask.row(r) < seqlen.seqlen_q:
                found[r, 0] = lse[mask.row(r), mask.query_head(r)] * math.log2(math.e)
                for i, source in enumerate((o, do)):
                    for fours in cutlass.range_constexpr(self.head_dim // 32):
                        cute.autovec_copy(vector_of_row(source, mask, r, fours), rows[None, fours, i, r])
        for r in cutlass.range_constexpr(ROWS_OF_THREAD):
            products = rows[None, None, 0, r].load().to(Float32) * rows[None, None, 1, r].load().to(Float32)
            part = products.reduce(cute.ReductionOp.ADD, init_val=Float32(0.0), reduction_profile=0)
            found[r, 1] = cute.arch.warp_reduction_sum(part, threads_in_group=4)
            found[r, 0] = found[r, 0] if found[r, 0] != -Float32.inf else Float32(0.0)
