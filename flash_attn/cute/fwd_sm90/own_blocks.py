"""SM90 forward over unions of tokens' lists: each warpgroup multiplies only what its own tokens list.

The load warp brings every block of a tile's union (`lists.query_bits`) once, each into a stage of its own. A warpgroup
goes from one block that its tokens list to the next, and releases the stages between them unread: the two warpgroups
may be apart by as many blocks as there are stages. A step has two blocks, if both are within reach, or one, each with a
softmax of its own under products. A warpgroup may not wait for a block further on than there are stages: if none within
reach is listed, the last one is multiplied, with every row hidden.
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

Entry = tuple[Int32, ...]  # a block of keys, and its bits


@dataclass(frozen=True)
class OwnBlocks:
    """A warpgroup's way along a tile's union.

    pipelines: of k and of v. reach: how far ahead the next block may be, which is the number of stages.
    """

    loop: KeyLoop
    mask: KeyMask
    pipelines: tuple[Any, Any]
    reach: int

    @staticmethod
    def create(loop: KeyLoop, mask: KeyMask, pipelines: tuple[Any, Any], reach: int) -> OwnBlocks:
        return OwnBlocks(replace(loop, mask_idx=_held(loop.mask_idx), bits=_held(loop.bits)), mask, pipelines, reach)

    def ahead(self, place: Int32) -> Entry:
        """The entries behind `place`, one for each lane."""
        at = cutlass.min(place + 1 + cute.arch.lane_idx(), self.loop.count - 1)
        return (self.loop.mask_idx[at], *(self.loop.bits[at, word] for word in range(self.loop.words_per_entry)))

    def following(self, place: Int32, ahead: Entry) -> tuple[Int32, Int32, Entry, Entry]:
        """Positions of the next step's first and last block, the union's end if there is none, and their entries.

        ahead: of the place.
        """
        own = self.mask.any_lists(ahead[1:]) & (place + 1 + cute.arch.lane_idx() < self.loop.count)
        owned = cute.arch.vote_ballot_sync(own)
        first, second = (_lowest_bit(x) for x in (owned, owned & (owned - 1)))
        last = Int32(cutlass.select_(second < self.reach, second, cutlass.min(first, self.reach - 1)))
        first = cutlass.min(first, last)
        entries = (tuple(cute.arch.shuffle_sync(x, lane) for x in ahead) for lane in (first, last))
        positions = (cutlass.min(place + 1 + lane, self.loop.count) for lane in (first, last))
        return (*(cute.arch.make_warp_uniform(x) for x in positions), *entries)

    @cute.jit
    def pass_by(self, state: Any, blocks: Int32) -> Any:
        """Hand back so many stages. They have to be full first: a stage is handed back once for each load."""
        for _ in cutlass.range(blocks, unroll=1):
            for stages in self.pipelines:
                stages.consumer_wait(state, stages.consumer_try_wait(state))
                stages.consumer_release(state)
            state.advance()
        return state


@dataclass(frozen=True)
class BlockMask:
    """Hides what the rows of a warpgroup may not see of a block; a kernel calls it as it calls its mask function."""

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
    """A warpgroup's products: scores of a stage of keys, and probabilities (in `tOrP`) with a stage of values."""

    scores: Callable
    output: Callable
    acc_O: cute.Tensor
    tOrP: cute.Tensor
    softmax: UnionSoftmax
    sums: BlockSums | None = None

    def hidden_and_scaled(self, acc_S: cute.Tensor, mask: BlockMask) -> cute.Tensor:
        """Probabilities in place of a block's scores. Returns what the rows of the output are scaled by."""
        mask(acc_S)
        row_scale = self.softmax.online_softmax(acc_S)
        if self.sums is not None:
            self.sums.write(acc_S, mask.entry[1:], self.softmax)
        return row_scale

    def take(self, acc_S: cute.Tensor, row_scale: cute.Tensor) -> None:
        """Probabilities for the next product with values; no other may be under way."""
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
    """One block or two, as there are masks. Returns the state of the last one, whose values are still to be multiplied.

    values: the state of the block before. state: of the first block. between: blocks of others between the two.
    look_ahead: what to find out while products are under way.
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
    row_scale = products.hidden_and_scaled(acc_S, masks[0])
    warpgroup.wait_group(len(masks) - 1)
    pipeline_v.consumer_release(values)
    products.take(acc_S, row_scale)
    if const_expr(two):
        pipeline_v.consumer_wait(state, pipeline_v.consumer_try_wait(state))
        products.output(B_idx=state.index, zero_init=False, wg_wait=-1)
        warpgroup.wait_group(1)
        pipeline_k.consumer_release(last)
        row_scale = products.hidden_and_scaled(acc_S_of_last, masks[1])
        warpgroup.wait_group(0)
        pipeline_v.consumer_release(state)
        products.take(acc_S_of_last, row_scale)
    return last


@cute.jit
def compute_blocks(own: OwnBlocks, products: Products, state: Any, first_step: Callable, last_product: Callable):
    """A warpgroup: all blocks of a tile.

    first_step, last_product: of the kernel: scores of the first block; the last one's product with v.

    Returns:
        the next state, and whether there was a block.
    """
    adds, count, hidden = Boolean(False), own.loop.count, products.softmax.hidden
    sums = BlockSums.of(own.mask)
    products = replace(products, sums=sums)
    if count > 0:
        place, _, entry, _ = own.following(Int32(-1), own.ahead(Int32(-1)))
        state = own.pass_by(state, place)
        if place < count:
            ahead = own.ahead(place)
            scores: list[cute.Tensor] = []
            mask = partial(_noted, scores, BlockMask(own, entry, hidden))
            state = first_step(n_block=place, kv_consumer_state=state, mask_fn=mask)
            if const_expr(sums is not None):
                sums.write(scores[-1], entry[1:], products.softmax)
            first, last, entry, last_entry = own.following(place, ahead)
            ahead = own.ahead(last)
            while first < count:
                values = state.clone()
                state.advance()
                state = own.pass_by(state, first - place - 1)
                between, place = last - first - 1, last
                masks = BlockMask(own, entry, hidden), BlockMask(own, last_entry, hidden)
                found: list[tuple] = []
                look_ahead = partial(_look_ahead, found, own, place, ahead)
                if between >= 0:
                    state = _step(own, products, values, state, between, masks, not adds, look_ahead)
                    first, last, entry, last_entry, ahead = found[-1]
                else:
                    state = _step(own, products, values, state, between, masks[:1], not adds, look_ahead)
                    first, last, entry, last_entry, ahead = found[-1]
                adds = Boolean(True)
            state = last_product(kv_consumer_state=state, zero_init=not adds)
            adds = Boolean(True)
            state = own.pass_by(state, count - place - 1)
    return state, adds


def _look_ahead(found: list[tuple], own: OwnBlocks, place: Int32, ahead: Entry) -> None:
    coming = own.following(place, ahead)
    found.append((*coming, own.ahead(coming[1])))


def _noted(scores: list[cute.Tensor], mask: BlockMask, acc_S: cute.Tensor, **options: Any) -> None:
    """The mask, and a note of the registers that it hides scores in."""
    scores.append(acc_S)
    mask(acc_S, **options)


def _lowest_bit(x: Int32) -> Int32:
    """Its place; 32 if there is none."""
    return Int32(cute.arch.popc(Uint32(x & -x) - Uint32(1)))


def _held(tensor: cute.Tensor) -> cute.Tensor:
    """The tensor, whose address stays in registers: after a shuffle the compiler cannot work it out for each use."""
    address = Int64(tensor.iterator.toint())
    low, high = (cute.arch.shuffle_sync(Int32(x), 0) for x in (address, address >> 32))
    address = Int64(high) << 32 | Int64(Uint32(low))
    pointer = cute.make_ptr(tensor.element_type, address, cute.AddressSpace.gmem, assumed_align=4)
    return cute.make_tensor(pointer, tensor.layout)
