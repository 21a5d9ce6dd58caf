"""The key blocks that a tile of queries walks on SM90: in the dq pass of backward, and in forward by `list_steps`.

All warps of a CTA walk the same blocks in the same order: mask blocks from the first to the last, then
full ones. A step of the walk is `STEP` keys: one block of 128, or two of 64 that need not be neighbours.
Where two do not come out even, the last step's second block is missing: its half of the step is loaded
with the first block once more, so that nothing undefined is multiplied, and hidden by the mask.
"""

from dataclasses import dataclass
from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from flash_attn.cute.block_sparsity import BlockSparseTensors
from flash_attn.cute.dq_spec import STEP
from flash_attn.cute.list_rows import entry_at, find_row

NOWHERE = 1 << 30  # a key past the end of every sequence


@dataclass(frozen=True)
class KeyWalk:
    """The entries of one row of forward lists: `mask_count` mask blocks, then full ones, `count` in all."""

    count: Int32
    mask_count: Int32
    mask_idx: cute.Tensor
    full_idx: Optional[cute.Tensor]
    block_k: int

    @staticmethod
    def create(tensors: BlockSparseTensors, batch: Int32, head: Int32, block: Int32, block_k: int) -> "KeyWalk":
        """block: of queries, in its sequence."""
        row = find_row(tensors, tensors.cu_total_m_blocks, batch, head, block)
        mask_count, mask_idx = row.count(tensors.mask_block_cnt), row.entries(tensors.mask_block_idx)
        if tensors.full_block_cnt is None:
            return KeyWalk(mask_count, mask_count, mask_idx, None, block_k)
        count = mask_count + row.count(tensors.full_block_cnt)
        return KeyWalk(count, mask_count, mask_idx, row.entries(tensors.full_block_idx, full=True), block_k)

    @property
    def parts(self) -> int:
        """Blocks of a step."""
        return STEP // self.block_k

    @property
    def steps(self) -> Int32:
        return (self.count + (self.parts - 1)) // self.parts

    @cute.jit
    def entry(self, step: Int32, part: cutlass.Constexpr[int]) -> Int32:
        """2 * block + is_full for a part of a step; past the walk's end, for its last block."""
        place = cutlass.min(step * self.parts + part, self.count - 1)
        return entry_at(place, self.mask_count, self.mask_idx, self.full_idx)

    def entries(self, step: Int32) -> tuple[Int32, ...]:
        """`entry` for all parts of a step."""
        return tuple(self.entry(step, part) for part in range(self.parts))

    def first_key(self, entry: Int32, step: Int32, part: int) -> Int32:
        """Where the part's keys begin in the sequence; `NOWHERE` for a block that is missing."""
        key = (entry >> 1) * self.block_k
        if part == 0:
            return key
        return Int32(cutlass.select_(step * self.parts + part < self.count, key, Int32(NOWHERE)))
