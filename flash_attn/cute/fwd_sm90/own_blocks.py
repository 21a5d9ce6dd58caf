"""SM90 forward over unions of tokens' lists: each warpgroup multiplies only blocks that its own tokens list.

The load warp loads every block of a tile's union (`lists.query_bits`) once, each into its own stage. A warpgroup skips
from one block that its tokens list to the next, and releases the stages between them unread; the two warpgroups may be
as many blocks apart as there are stages. A step has two blocks, or one if the second is out of reach, each with a
softmax that overlaps products. A warpgroup cannot wait for a block further ahead than there are stages: if none within
reach is listed, it multiplies the last one within reach, with every row masked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import warpgroup
from quack import layout_utils

from flash_attn.cute import utils
from flash_attn.cute.fwd_sm90.block_sums import BlockSums
from flash_attn.cute.fwd_sm90.loads import KeyLoop
from flash_attn.cute.fwd_sm90.masks import ROWS_OF_THREAD, KeyMask
from flash_attn.cute.fwd_sm90.union_softmax import UnionSoftmax

Entry = tuple[Int32, ...]  # a key block, and its words of bits


@dataclass(frozen=True)
class OwnBlocks:
    """A warpgroup's iteration over the blocks of a tile's union that its own tokens list.

    pipelines: of k and of v. reach: the most positions that the next block may be ahead: the number of stages.
    """

    loop: KeyLoop
    mask: KeyMask
    pipelines: tuple[Any, Any]
    reach: int

    @staticmethod
    def create(loop: KeyLoop, mask: KeyMask, pipelines: tuple[Any, Any], reach: int) -> OwnBlocks:
        return OwnBlocks(replace(loop, mask_idx=_held(loop.mask_idx), bits=_held(loop.bits)), mask, pipelines, reach)

    def ahead(self, position: Int32) -> Entry:
        """The 32 entries after `position`, one per lane."""
        at = cutlass.min(position + 1 + cute.arch.lane_idx(), self.loop.count - 1)
        return (self.loop.mask_idx[at], *(self.loop.bits[at, word] for word in range(self.loop.words_per_entry)))

    def following(self, position: Int32, ahead: Entry) -> tuple[Int32, Int32, Entry, Entry]:
        """Positions of the next step's first and last block (the union's end if there is none), and their entries.

        ahead: `self.ahead(position)`.
        """
        own = self.mask.any_lists(ahead[1:]) & (position + 1 + cute.arch.lane_idx() < self.loop.count)
        owned = cute.arch.vote_ballot_sync(own)
        first, second = (_lowest_bit(x) for x in (owned, owned & (owned - 1)))
        last = Int32(cutlass.select_(second < self.reach, second, cutlass.min(first, self.reach - 1)))
        first = cutlass.min(first, last)
        entries = (tuple(cute.arch.shuffle_sync(x, lane) for x in ahead) for lane in (first, last))
        positions = (cutlass.min(position + 1 + lane, self.loop.count) for lane in (first, last))
        return (*(cute.arch.make_warp_uniform(x) for x in positions), *entries)

    @cute.jit
    def pass_by(self, state: Any, blocks: Int32) -> Any:
        """Release the next `blocks` stages unread, each once it is full: the producer expects one release per load."""
        for _ in cutlass.range(blocks, unroll=1):
            for stages in self.pipelines:
                stages.consumer_wait(state, stages.consumer_try_wait(state))
                stages.consumer_release(state)
            state.advance()
        return state


@dataclass(frozen=True)
class BlockMask:
    """Mask function of a kernel for one block: hides keys that a row does not see, and rows that do not list it."""

    own: OwnBlocks
    entry: Entry
    hidden: cute.Tensor

    def __call__(self, acc_S: cute.Tensor, n_block: Int32 | None = None, mask_seqlen: bool = True) -> None:
        (block, *words), width = self.entry, self.own.loop.block_k
        scores = layout_utils.reshape_acc_to_mn(acc_S)
        self.own.mask.hide(scores, block * width, Boolean(True), 0, width)
        self.own.mask.hide_parts(scores, tuple(words), 0, width)
        for r in range(ROWS_OF_THREAD):
            self.hidden[r] = self.own.mask.hidden(tuple(words), r)


@dataclass(frozen=True)
class Products:
    """A warpgroup's products S = q k^T and o += P v (P in `tOrP`) with a stage each, and its softmax."""

    scores: Callable
    output: Callable
    acc_O: cute.Tensor
    tOrP: cute.Tensor
    softmax: UnionSoftmax
    sums: BlockSums | None = None

    def mask_and_softmax(self, acc_S: cute.Tensor, mask: BlockMask) -> cute.Tensor:
        """Overwrite a block's scores with probabilities. Returns the scale factors of the output's rows."""
        mask(acc_S)
        row_scale = self.softmax.online_softmax(acc_S)
        if self.sums is not None:
            self.sums.write(acc_S, mask.entry[1:], self.softmax)
        return row_scale

    def rescale_and_convert(self, acc_S: cute.Tensor, row_scale: cute.Tensor) -> None:
        """Rescale o, and move probabilities to `tOrP`; no product with v may be in flight."""
        utils.cvt_f16(layout_utils.reshape_acc_to_frgA(acc_S), self.tOrP)
        self.softmax.rescale_O(self.acc_O, row_scale)


@cute.jit
def _step(
    own: OwnBlocks,
    products: Products,
    values: Any,
    state: Any,
    between: Int32,
    masks: tuple[BlockMask, ...],
    zero_init: Boolean,
    look_ahead: Callable[[], None],
) -> Any:
    """One block or two, as many as masks. Returns the state of the last block, whose product with v is still to do.

    values: state of the block before. state: of the first block. between: skipped blocks between the two. look_ahead:
    called while products are in flight.
    """
    pipeline_k, pipeline_v = own.pipelines
    two = len(masks) == 2
    pipeline_k.consumer_wait(state, pipeline_k.consumer_try_wait(state))
    acc_S = products.scores(B_idx=state.index, wg_wait=-1)
    pipeline_v.consumer_wait(values, pipeline_v.consumer_try_wait(values))
    products.output(B_idx=values.index, zero_init=zero_init, wg_wait=-1)
    last = state
    if const_expr(two):
        last = state.clone()
        last.advance()
        last = own.pass_by(last, between)
        pipeline_k.consumer_wait(last, pipeline_k.consumer_try_wait(last))
        acc_S_of_last = products.scores(B_idx=last.index, wg_wait=-1)
    look_ahead()
    warpgroup.wait_group(len(masks))
    pipeline_k.consumer_release(state)
    row_scale = products.mask_and_softmax(acc_S, masks[0])
    warpgroup.wait_group(len(masks) - 1)
    pipeline_v.consumer_release(values)
    products.rescale_and_convert(acc_S, row_scale)
    if const_expr(two):
        pipeline_v.consumer_wait(state, pipeline_v.consumer_try_wait(state))
        products.output(B_idx=state.index, zero_init=False, wg_wait=-1)
        warpgroup.wait_group(1)
        pipeline_k.consumer_release(last)
        row_scale = products.mask_and_softmax(acc_S_of_last, masks[1])
        warpgroup.wait_group(0)
        pipeline_v.consumer_release(state)
        products.rescale_and_convert(acc_S_of_last, row_scale)
    return last


@cute.jit
def compute_blocks(own: OwnBlocks, products: Products, state: Any, first_step: Callable, last_product: Callable):
    """Run a warpgroup over all blocks of a tile.

    first_step, last_product: the kernel's: scores of the first block; product of the last one with v.

    Returns:
        the next state, and whether there was a block.
    """
    adds, count, hidden = Boolean(False), own.loop.count, products.softmax.hidden
    sums = BlockSums.of(own.mask)
    products = replace(products, sums=sums)
    if count > 0:
        position, _, entry, _ = own.following(Int32(-1), own.ahead(Int32(-1)))
        state = own.pass_by(state, position)
        if position < count:
            ahead = own.ahead(position)
            scores: list[cute.Tensor] = []
            mask = partial(_noted, scores, BlockMask(own, entry, hidden))
            state = first_step(n_block=position, kv_consumer_state=state, mask_fn=mask)
            if const_expr(sums is not None):
                sums.write(scores[-1], entry[1:], products.softmax)
            first, last, entry, last_entry = own.following(position, ahead)
            ahead = own.ahead(last)
            while first < count:
                values = state.clone()
                state.advance()
                state = own.pass_by(state, first - position - 1)
                between, position = last - first - 1, last
                masks = BlockMask(own, entry, hidden), BlockMask(own, last_entry, hidden)
                found: list[tuple] = []
                look_ahead = partial(_look_ahead, found, own, position, ahead)
                if between >= 0:
                    state = _step(own, products, values, state, between, masks, not adds, look_ahead)
                    first, last, entry, last_entry, ahead = found[-1]
                else:
                    state = _step(own, products, values, state, between, masks[:1], not adds, look_ahead)
                    first, last, entry, last_entry, ahead = found[-1]
                adds = Boolean(True)
            state = last_product(kv_consumer_state=state, zero_init=not adds)
            adds = Boolean(True)
            state = own.pass_by(state, count - position - 1)
    return state, adds


def _look_ahead(found: list[tuple], own: OwnBlocks, position: Int32, ahead: Entry) -> None:
    coming = own.following(position, ahead)
    found.append((*coming, own.ahead(coming[1])))


def _noted(scores: list[cute.Tensor], mask: BlockMask, acc_S: cute.Tensor, **options: Any) -> None:
    """Apply the mask, and append the scores' registers to `scores`."""
    scores.append(acc_S)
    mask(acc_S, **options)


def _lowest_bit(x: Int32) -> Int32:
    """Index of the lowest set bit; 32 if there is none."""
    return Int32(cute.arch.popc(Uint32(x & -x) - Uint32(1)))


def _held(tensor: cute.Tensor) -> cute.Tensor:
    """The tensor with its address in registers: the compiler cannot recompute the result of a shuffle at each use."""
    address = Int64(tensor.iterator.toint())
    low, high = (cute.arch.shuffle_sync(Int32(x), 0) for x in (address, address >> 32))
    address = Int64(high) << 32 | Int64(Uint32(low))
    pointer = cute.make_ptr(tensor.element_type, address, cute.AddressSpace.gmem, assumed_align=4)
    return cute.make_tensor(pointer, tensor.layout)
