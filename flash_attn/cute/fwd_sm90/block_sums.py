"""Log-sum-exp of each block that a token lists, written by forward over unions of tokens' lists (`lists.query_bits`).

Requested by ``aux_tensors=[sums]`` without a mask_mod: fp32 [tokens of all sequences, key/value heads, blocks * query
heads of a group], contiguous. A row writes one value per listed block of 64 keys, or per part of one that entries have
bits for, in the order of its list and in base 2: log2 of the sum of exp2(score * log2(e)). Minus the row's log-sum-exp
in base 2 it is log2 of the block's share of the probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from quack import layout_utils

from flash_attn.cute.fwd_sm90.masks import ROWS_OF_THREAD, KeyMask
from flash_attn.cute.fwd_sm90.union_softmax import UnionSoftmax


@dataclass(frozen=True)
class BlockSums:
    """Writes the log-sum-exps of blocks for a warpgroup's rows of a tile.

    written: int32 [1], blocks written so far of this thread's output row: its first row in even lanes, second in odd.
    """

    sums: cute.Tensor
    mask: KeyMask
    written: cute.Tensor

    @property
    def row(self) -> Int32:
        return self.mask.thread % ROWS_OF_THREAD

    @staticmethod
    def of(mask: KeyMask) -> Optional[BlockSums]:
        """For a new tile; None if the call does not request the sums."""
        if mask.aux_data.tensors is None or mask.mask_mod is not None:
            return None
        written = cute.make_rmem_tensor(1, Int32)
        written.fill(0)
        return BlockSums(mask.aux_data.tensors[0], mask, written)

    @cute.jit
    def write(self, probabilities: cute.Tensor, words: tuple[Int32, ...], softmax: UnionSoftmax) -> None:
        """Write the sums of the entry with bits `words`, whose probabilities `softmax` has just computed."""
        mask = self.mask
        if softmax.any_row([softmax.hidden[r] == 0.0 for r in range(ROWS_OF_THREAD)]):
            P, parts = layout_utils.reshape_acc_to_mn(probabilities), mask.parts(words)
            count = cute.size(P, mode=[1]) // len(parts)
            token = mask.row(self.row) + (
                mask.seqlen.offset_q if mask.seqlen.has_cu_seqlens_q else mask.batch * mask.seqlen.seqlen_q
            )
            is_second = self.row > 0
            top = cutlass.select_(is_second, softmax.top(1), softmax.top(0))
            for i in cutlass.range_constexpr(len(parts)):
                first, second = (_tree_sum([P[r, i * count + c] for c in range(count)]) for r in range(ROWS_OF_THREAD))
                other = cute.arch.shuffle_sync_bfly(cutlass.select_(is_second, first, second), 1)
                total = cutlass.select_(is_second, second, first) + other
                total += cute.arch.shuffle_sync_bfly(total, 2)
                if mask.has_bit(parts[i], self.row):
                    if mask.thread % 4 < ROWS_OF_THREAD:
                        column = self.written[0] * mask.packed + mask.packed_row(self.row) % mask.packed
                        self.sums[token, mask.head, column] = cute.math.log2(total, fastmath=True) + top
                    self.written[0] += 1


def _tree_sum(terms: list[Float32]) -> Float32:
    while len(terms) > 1:
        terms = [a + b for a, b in zip(terms[::2], terms[1::2])]
    return terms[0]
