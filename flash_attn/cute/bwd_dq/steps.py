"""A warpgroup's steps over a tile's key blocks in the dq pass: products, which the two warpgroups issue alternately.

Both warpgroups loop over the same steps, so both reach each barrier equally often, and both release all stages. Where
entries have bits, a warpgroup multiplies only blocks that one of its tokens lists: a step with both as without bits, a
step with one block by itself, a step with none is skipped. At large head dimensions a step is one block, and with one
stage dS is multiplied before the next block is awaited. Where products go warp by warp every block is done by itself.
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

SCHEDULER_BARRIER = 1  # first named barrier: of the first warpgroup


class StageProducts(NamedTuple):
    """The three products of a warpgroup with a stage, or with one of its blocks.

    scores, dprobabilities, add_dq: issue it; ``B_idx=`` is the stage, or (part, stage).
    dS: the first operand of `add_dq`, in registers; that of a block is in the first ones of a stage's.
    """

    scores: Callable
    dprobabilities: Callable
    add_dq: Callable
    dS: cute.Tensor


class Block(NamedTuple):
    """A block of a step: its first key, its entry (`KeyLoop.entry`), and its bits if entries have them."""

    key: Int32
    entry: Int32
    words: tuple[Int32, ...]

    @staticmethod
    def one_of(first: Boolean, blocks: list["Block"]) -> "Block":
        """The first of two, or the second."""
        key, entry = (Int32(cutlass.select_(first, *pair)) for pair in zip(*(block[:2] for block in blocks)))
        words = tuple(Int32(cutlass.select_(first, *pair)) for pair in zip(*(block.words for block in blocks)))
        return Block(key, entry, words)


@dataclass(frozen=True)
class WarpgroupSteps:
    """One tile's steps, to a warpgroup."""

    stage: StageProducts  # stage, block: products with a stage; with bits also those with one of its blocks
    block: Optional[StageProducts]
    pipelines: tuple[pipeline_custom.PipelineTmaAsync, ...]  # of q, do, k and v
    loaded: bool  # False where q and do are there from the beginning
    group: Int32
    phase: Int32  # of the slots of q and do
    loop: KeyLoop
    mask: KeyMask
    rows: tuple[tuple[Float32, Float32], ...]  # lse_log2 and dpsum of the thread's rows
    scale_log2: Float32
    wait: Callable[[int], None]  # for products, all but the last so many
    stages: cutlass.Constexpr[int]  # of k and v

    @cute.jit
    def run_all(self, steps: Int32, state: pipeline.PipelineState):
        """All steps, one at least. Returns the state behind them."""
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
        """The same, of entries with bits."""
        loop = self.loop
        coming, coming_words = loop.entries(Int32(0)), loop.all_words(Int32(0))
        before = state.clone()
        pending = Boolean(False)  # dS of the step before has still to be multiplied
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
                    self.pass_by(state)
                elif first | second:
                    at = (cute.arch.make_warp_uniform(Int32(cutlass.select_(first, Int32(0), Int32(1)))), state.index)
                    acc_S, acc_dP = self.first_products(self.block, state, at)
                    self.finish(self.block, acc_S, acc_dP, [Block.one_of(first, blocks)], state)
                    self.last_product(self.block, state, at)
                else:
                    self.pass_by(state)
            pending = first & second & (self.stages > 1)
            before = state.clone()
            state.advance()
        self.release_queries()
        if pending:
            self.last_product(self.stage, before, before.index)
        return state

    @cute.jit
    def run_blocks(self, steps: Int32, state: pipeline.PipelineState):
        """The same, a block at a time and not alternating: registers are left to load operands of products ahead."""
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
        """All blocks of a step. words: of each, if entries have bits."""
        keys = [self.loop.first_key(entry, step, part) for part, entry in enumerate(entries)]
        return [Block(*of) for of in zip(keys, entries, words or [()] * len(entries))]

    def first_products(
        self, products: StageProducts, state: pipeline.PipelineState, at: Int32 | tuple[Int32, Int32]
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """S and dP, in flight, where no step before is pending. at: the stage, or (part, stage)."""
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
        """S and dP of a stage, in flight; the one before is added to dq meanwhile, and its k released."""
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
        """Add dS to dq, and release k. at: as in `first_products`."""
        products.add_dq(B_idx=at, wg_wait=0)
        self.pipelines[2].consumer_release(state)

    def pass_by(self, state: pipeline.PipelineState) -> None:
        """Skip a step, barriers included."""
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
        """From the products in flight, S and then dP, to dS as the first operand of dq. state: of v, to release it.

        In a row whose token does not list a block, it is hidden as in a row past the end: lse is +inf, exp2 gives 0.
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
    """Until the other warpgroup has issued its products."""
    cute.arch.barrier(barrier_id=SCHEDULER_BARRIER + group, number_of_threads=WARPGROUPS * THREADS)


def arrive_scheduler_barrier(group: Int32) -> None:
    cute.arch.barrier_arrive(barrier_id=SCHEDULER_BARRIER + 1 - group, number_of_threads=WARPGROUPS * THREADS)
