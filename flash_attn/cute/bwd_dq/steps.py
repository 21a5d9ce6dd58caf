"""A warpgroup's loop over a tile's key blocks in the dq pass; the two warpgroups issue products alternately.

Both warpgroups loop over the same steps, so both arrive at each barrier equally often, and both release all stages.
Where entries have bits, a warpgroup multiplies only blocks that one of its tokens lists: both blocks of a step at once,
one alone, or none. At large head dimensions a step is one block, and with a single stage dS k is computed before the
next block is awaited. With mma.sync every block is multiplied alone.
"""

from dataclasses import dataclass
from typing import Callable, NamedTuple, Optional

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr, pipeline
from quack import layout_utils

from flash_attn.cute import pipeline as pipeline_custom
from flash_attn.cute import utils
from flash_attn.cute.bwd_dq.spec import THREADS, WARPGROUPS
from flash_attn.cute.fwd_sm90.loads import NOWHERE, KeyLoop
from flash_attn.cute.fwd_sm90.masks import ROWS_OF_THREAD, KeyMask

SCHEDULER_BARRIER = 1  # named barrier of the first warpgroup; the next one is the second's


class StageProducts(NamedTuple):
    """A warpgroup's three products S, dP and dq with a whole stage of k and v, or with one block of a stage.

    scores, dprobabilities, add_dq: issue a product; ``B_idx=`` is the stage, or (part, stage).
    dS: the A operand of `add_dq`, in registers; that of a block is the first registers of a stage's.
    """

    scores: Callable
    dprobabilities: Callable
    add_dq: Callable
    dS: cute.Tensor


class Block(NamedTuple):
    """A block of a step: its first key, its entry (`KeyLoop.entry`), and its words of bits, if any."""

    key: Int32
    entry: Int32
    words: tuple[Int32, ...]

    @staticmethod
    def one_of(first: Boolean, blocks: list["Block"]) -> "Block":
        """The first of two blocks if `first`, else the second."""
        key, entry = (Int32(cutlass.select_(first, *pair)) for pair in zip(*(block[:2] for block in blocks)))
        words = tuple(Int32(cutlass.select_(first, *pair)) for pair in zip(*(block.words for block in blocks)))
        return Block(key, entry, words)


@dataclass(frozen=True)
class WarpgroupSteps:
    """A warpgroup's steps over one tile."""

    stage: StageProducts  # with a stage, and where entries have bits with a block
    block: Optional[StageProducts]
    pipelines: tuple[pipeline_custom.PipelineTmaAsync, ...]  # of q, do, k and v
    loaded: bool  # whether q and do come by TMA; else they are in shared memory before
    group: Int32  # index of the warpgroup
    phase: Int32  # of the slots of q and do
    loop: KeyLoop
    mask: KeyMask
    rows: tuple[tuple[Float32, Float32], ...]  # lse_log2 and dpsum of the thread's rows
    scale_log2: Float32
    wait: Callable[[int], None]  # until at most that many products are in flight
    stages: cutlass.Constexpr[int]  # of k and v

    @cute.jit
    def run_all(self, steps: Int32, state: pipeline.PipelineState):
        """Run the steps, at least one, of lists without bits. Returns the advanced state."""
        loop = self.loop
        coming = loop.entries(Int32(0))
        acc_S, acc_dP = self.first_products(self.stage, state, state.index)
        entries = coming
        coming = loop.entries(Int32(1))
        self.finish(self.stage, acc_S, acc_dP, self.blocks(Int32(0), entries), state)
        for step in cutlass.range(1, steps, unroll=1):
            before = state.clone()
            state.advance()
            acc_S, acc_dP = self.next_products(before, state)
            entries = coming
            coming = loop.entries(step + 1)
            self.finish(self.stage, acc_S, acc_dP, self.blocks(step, entries), state)
        self.release_queries()
        self.last_product(self.stage, state, state.index)
        state.advance()
        return state

    @cute.jit
    def run_listed(self, steps: Int32, state: pipeline.PipelineState):
        """Run the steps of lists with bits: multiply only listed blocks. Returns the advanced state."""
        loop = self.loop
        coming, coming_words = loop.entries(Int32(0)), loop.all_words(Int32(0))
        before = state.clone()
        pending = Boolean(False)  # the step before has not yet added dS k to dq
        for step in cutlass.range(steps, unroll=1):
            entries, words = coming, coming_words
            coming, coming_words = loop.entries(step + 1), loop.all_words(step + 1)
            blocks = self.blocks(step, entries, words)
            listed = [self.mask.any_lists(block.words) for block in blocks]
            first, second = listed[0], listed[-1]
            if first & second:
                if const_expr(self.stages == 1):
                    acc_S, acc_dP = self.first_products(self.stage, state, state.index)
                    self.finish(self.stage, acc_S, acc_dP, blocks, state)
                    self.last_product(self.stage, state, state.index)
                elif pending:
                    acc_S, acc_dP = self.next_products(before, state)
                    self.finish(self.stage, acc_S, acc_dP, blocks, state)
                else:
                    acc_S, acc_dP = self.first_products(self.stage, state, state.index)
                    self.finish(self.stage, acc_S, acc_dP, blocks, state)
            else:
                if pending:
                    self.last_product(self.stage, before, before.index)
                if const_expr(loop.parts == 1):
                    self.skip_step(state)
                elif first | second:
                    at = (cute.arch.make_warp_uniform(Int32(cutlass.select_(first, Int32(0), Int32(1)))), state.index)
                    acc_S, acc_dP = self.first_products(self.block, state, at)
                    self.finish(self.block, acc_S, acc_dP, [Block.one_of(first, blocks)], state)
                    self.last_product(self.block, state, at)
                else:
                    self.skip_step(state)
            pending = first & second & (self.stages > 1)
            before = state.clone()
            state.advance()
        self.release_queries()
        if pending:
            self.last_product(self.stage, before, before.index)
        return state

    @cute.jit
    def run_blocks(self, steps: Int32, state: pipeline.PipelineState):
        """`run_listed` for mma.sync: a block at a time, unordered, with registers left to prefetch operands."""
        loop = self.loop
        coming, coming_words = loop.entries(Int32(0)), loop.all_words(Int32(0))
        if const_expr(self.loaded):
            for slots in self.pipelines[:2]:
                slots.consumer_wait_w_index_phase(self.group, self.phase)
        for step in cutlass.range(steps, unroll=1):
            entries, words = coming, coming_words
            coming, coming_words = loop.entries(step + 1), loop.all_words(step + 1)
            blocks = self.blocks(step, entries, words)
            for stages in self.pipelines[2:]:
                stages.consumer_wait(state)
            for part in cutlass.range_constexpr(len(blocks)):
                if self.mask.any_lists(blocks[part].words) & (blocks[part].key < NOWHERE):
                    at = (Int32(part), state.index)
                    acc_S, acc_dP = self.block.scores(B_idx=at), self.block.dprobabilities(B_idx=at)
                    self.finish(self.block, acc_S, acc_dP, [blocks[part]], None)
                    self.block.add_dq(B_idx=at)
            for stages in self.pipelines[2:]:
                stages.consumer_release(state)
            state.advance()
        self.release_queries()
        return state

    def blocks(self, step: Int32, entries: tuple[Int32, ...], words: Optional[tuple] = None) -> list[Block]:
        """The blocks of a step. words: their bits, if entries have any."""
        keys = [self.loop.first_key(entry, step, part) for part, entry in enumerate(entries)]
        return [Block(*of) for of in zip(keys, entries, words or [()] * len(entries))]

    def first_products(
        self, products: StageProducts, state: pipeline.PipelineState, at: Int32 | tuple[Int32, Int32]
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """Issue S and dP, where no dS of the step before is pending. at: the stage, or (part, stage)."""
        pipeline_q, pipeline_do, pipeline_k, pipeline_v = self.pipelines
        if const_expr(self.loaded):
            pipeline_q.consumer_wait_w_index_phase(self.group, self.phase)
        pipeline_k.consumer_wait(state)
        await_scheduler_barrier(self.group)
        acc_S = products.scores(B_idx=at)
        if const_expr(self.loaded):
            pipeline_do.consumer_wait_w_index_phase(self.group, self.phase)
        pipeline_v.consumer_wait(state)
        acc_dP = products.dprobabilities(B_idx=at)
        arrive_scheduler_barrier(self.group)
        return acc_S, acc_dP

    def next_products(
        self, before: pipeline.PipelineState, state: pipeline.PipelineState
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """Add the pending dS k of stage `before` to dq and release its k; issue S and dP of stage `state`."""
        _, _, pipeline_k, pipeline_v = self.pipelines
        await_scheduler_barrier(self.group)
        self.stage.add_dq(B_idx=before.index)
        pipeline_k.consumer_wait(state)
        acc_S = self.stage.scores(B_idx=state.index)
        self.wait(1)
        pipeline_k.consumer_release(before)
        pipeline_v.consumer_wait(state)
        acc_dP = self.stage.dprobabilities(B_idx=state.index)
        arrive_scheduler_barrier(self.group)
        return acc_S, acc_dP

    def last_product(
        self, products: StageProducts, state: pipeline.PipelineState, at: Int32 | tuple[Int32, Int32]
    ) -> None:
        """Add dS k to dq, and release k. at: as in `first_products`."""
        products.add_dq(B_idx=at, wg_wait=0)
        self.pipelines[2].consumer_release(state)

    def skip_step(self, state: pipeline.PipelineState) -> None:
        """Release a step's stage unread, and arrive at its barriers."""
        for stages in self.pipelines[2:]:
            stages.consumer_wait(state)
            stages.consumer_release(state)
        await_scheduler_barrier(self.group)
        arrive_scheduler_barrier(self.group)

    def release_queries(self) -> None:
        if const_expr(self.loaded):
            for slots in self.pipelines[:2]:
                slots.consumer_release_w_index(self.group)

    @cute.jit
    def finish(
        self,
        products: StageProducts,
        acc_S: cute.Tensor,
        acc_dP: cute.Tensor,
        blocks: list[Block],
        state: Optional[pipeline.PipelineState],
    ):
        """From S and dP in flight to dS, the A operand of dq, in ``products.dS``. state: releases its stage of v.

        A row whose token does not list a block is masked like a row past the end: with lse = +inf, P = exp2(..) = 0.
        """
        S, dP = layout_utils.reshape_acc_to_mn(acc_S), layout_utils.reshape_acc_to_mn(acc_dP)
        columns, width = cute.size(S, mode=[1]) // len(blocks), self.loop.block_k
        self.wait(1)
        for part in cutlass.range_constexpr(len(blocks)):
            self.mask.hide(S, blocks[part].key, blocks[part].entry & 1 == 0, part * width, width)
            self.mask.hide_parts(S, blocks[part].words, part * width, width)
        for r in cutlass.range_constexpr(ROWS_OF_THREAD):
            for part in cutlass.range_constexpr(len(blocks)):
                lse, words = self.rows[r][0], blocks[part].words
                if const_expr(len(words) > 0):
                    lse = Float32(cutlass.select_(self.mask.lists(words, r), lse, Float32.inf))
                for c in cutlass.range_constexpr(part * columns, (part + 1) * columns):
                    S[r, c] = cute.math.exp2(S[r, c] * self.scale_log2 - lse, fastmath=True)
        self.wait(0)
        if const_expr(state is not None):
            self.pipelines[3].consumer_release(state)
        for r in cutlass.range_constexpr(ROWS_OF_THREAD):
            dpsum = self.rows[r][1]
            for c in cutlass.range_constexpr(cute.size(S, mode=[1])):
                S[r, c] = S[r, c] * (dP[r, c] - dpsum)
        utils.cvt_f16(layout_utils.reshape_acc_to_frgA(acc_S), products.dS)


def await_scheduler_barrier(group: Int32) -> None:
    """Wait until the other warpgroup has issued its products."""
    cute.arch.barrier(barrier_id=SCHEDULER_BARRIER + group, number_of_threads=WARPGROUPS * THREADS)


def arrive_scheduler_barrier(group: Int32) -> None:
    cute.arch.barrier_arrive(barrier_id=SCHEDULER_BARRIER + 1 - group, number_of_threads=WARPGROUPS * THREADS)
