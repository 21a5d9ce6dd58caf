"""Row sums of the dq pass of SM90 backward: read, or computed from o and left for the dk and dv pass.

`shared_backward` says what they are and how they lie. Where they are computed no other kernel has to go before the dq
pass: a row's o and do are read by the four threads that hold the row's scores, 16 bytes at a time.
"""

import math
from dataclasses import dataclass
from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from flash_attn.cute.dq_output import Place, rows_of_head
from flash_attn.cute.key_mask import ROWS_OF_THREAD, KeyMask


@dataclass(frozen=True)
class RowSums:
    """lse_log2 and dpsum of a tile, to a warpgroup.

    Attributes:
        lse_log2, dpsum: fp32 [B, Hq, rows], packed [Hq, rows]; read, or with `out` written.
        out, dout: [T, D, Hq, B], packed [total, D, Hq].
        lse: fp32 [B, Hq, T], packed [Hq, total].
        start: as in `DqSpec`.
        mask: of the warpgroup, which knows its rows.
    """

    lse_log2: cute.Tensor
    dpsum: cute.Tensor
    out: Optional[cute.Tensor]
    dout: Optional[cute.Tensor]
    lse: Optional[cute.Tensor]
    head_dim: cutlass.Constexpr[int]
    start: cutlass.Constexpr[int]
    place: Place
    mask: KeyMask

    @cute.jit
    def of_thread(self) -> tuple[tuple[Float32, Float32], ...]:
        """Both of each of the thread's rows; +inf and 0, which make dS 0, past the end of the sequence."""
        mask, seqlen = self.mask, self.mask.seqlen
        lse_log2, dpsum = [rows_of_head(t, self.place, seqlen) for t in (self.lse_log2, self.dpsum)]
        found = cute.make_rmem_tensor((ROWS_OF_THREAD, 2), Float32)
        if const_expr(self.out is not None):
            self._compute(found)
            end = self._end()
            for r in cutlass.range_constexpr(ROWS_OF_THREAD):
                if mask.row(r) < end and mask.thread % 4 == 0:
                    lse_log2[mask.row(r)], dpsum[mask.row(r)] = found[r, 0], found[r, 1]
        else:
            for r in cutlass.range_constexpr(ROWS_OF_THREAD):
                found[r, 0], found[r, 1] = Float32.inf, Float32(0.0)
                if mask.row(r) < seqlen.seqlen_q:
                    found[r, 0], found[r, 1] = lse_log2[mask.row(r)], dpsum[mask.row(r)]
        return tuple((found[r, 0], found[r, 1]) for r in range(ROWS_OF_THREAD))

    def _end(self) -> Int32:
        """Rows that belong to the sequence, those past its queries included."""
        if const_expr(not self.mask.seqlen.has_cu_seqlens_q):
            return Int32(self.dpsum.shape[2])
        return (self.mask.seqlen.seqlen_q + (self.start - 1)) // self.start * self.start

    @cute.jit
    def _compute(self, found: cute.Tensor):
        mask, seqlen = self.mask, self.mask.seqlen
        o, do = [
            seqlen.offset_batch_Q(t, self.place.batch, dim=3)[None, None, self.place.head]
            for t in (self.out, self.dout)
        ]
        lse = seqlen.offset_batch_Q(self.lse, self.place.batch, dim=2)[None, self.place.head]
        rows = cute.make_rmem_tensor((8, self.head_dim // 32, 2, ROWS_OF_THREAD), o.element_type)
        rows.fill(0)
        for r in cutlass.range_constexpr(ROWS_OF_THREAD):
            found[r, 0] = Float32.inf
            if mask.row(r) < seqlen.seqlen_q:
                found[r, 0] = lse[mask.row(r)] * math.log2(math.e)
                for i, source in enumerate((o, do)):
                    for fours in cutlass.range_constexpr(self.head_dim // 32):
                        vector = cute.local_tile(source[mask.row(r), None], (8,), (4 * fours + mask.thread % 4,))
                        cute.autovec_copy(vector, rows[None, fours, i, r])
        for r in cutlass.range_constexpr(ROWS_OF_THREAD):
            products = rows[None, None, 0, r].load().to(Float32) * rows[None, None, 1, r].load().to(Float32)
            part = products.reduce(cute.ReductionOp.ADD, init_val=Float32(0.0), reduction_profile=0)
            found[r, 1] = cute.arch.warp_reduction_sum(part, threads_in_group=4)
            found[r, 0] = found[r, 0] if found[r, 0] != -Float32.inf else Float32(0.0)
