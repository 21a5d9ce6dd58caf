"""The kernel of `token_topk`: one warpgroup a CTA; the package's docstring gives the algorithm.

Keys are the rows of a product, (token, head) pairs its columns: lane x of a quad has columns ``8 j + 2 x + i``, which
are numbered ``c = 2 j + i`` in the thread and hold its tokens' heads one after another.
"""

import math
from functools import partial

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from flash_attn.cute.multiply.form import by_warp
from nsa_layer.config import NSAConfig
from nsa_layer.kernels.block_topk.online_softmax import exp2
from nsa_layer.kernels.launch import launch
from nsa_layer.kernels.token_topk import candidates
from nsa_layer.kernels.token_topk.place import Place
from nsa_layer.kernels.token_topk.products import Products, operand_layout
from nsa_layer.kernels.token_topk.spec import (
    KEYS,
    MOST_BLOCKS,
    MOST_HEADS,
    QUAD,
    STAGES,
    THREADS,
    WARP,
    WARPS,
    TokenTopKSpec,
)
from nsa_layer.kernels.token_topk.step_values import StepValues
from nsa_layer.kernels.token_topk.token_list import forced_blocks, write_token_list
from nsa_layer.kernels.varlen_rows import sequence_of, tiles_and_batch
from nsa_layer.support import device_arch

Tensor = torch.Tensor

LOG2_E = math.log2(math.e)
VECTOR = 8  # elements of q in one copy
SCORES_READ, SCORES_WRITTEN = 1, 2  # named barriers


class TokenTopK:
    """One launch of `token_topk`."""

    shapes = ("B T Hq D", "B Tc Hkv D", "B Hq T", "starts", "starts", "B T Hkv n", "starts", "sequences")

    def __init__(self, spec: TokenTopKSpec) -> None:
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [B, T, Hq, D], packed [total, Hq, D]
        mK: cute.Tensor,  # [B, Tc, Hkv, D], packed [all, Hkv, D]
        mLSE: cute.Tensor,  # fp32 [B, Hq, T], packed [Hq, total]
        mCu: cute.Tensor | None,
        mCu_blocks: cute.Tensor | None,
        mIndices: cute.Tensor,  # int32 [B, T, Hkv, n], packed [total, Hkv, n]
        mCu_keys: cute.Tensor | None,  # starts of tokens of keys, where these are others than the queries'
        mOffset: cute.Tensor | None,  # int32 [B], packed [sequences]
        S: Int32,
        softmax_scale: Float32,
        stream: cuda.CUstream,
    ):
        spec, dtype = self.spec, mQ.element_type
        by_key = [0, 2, 1] if const_expr(spec.packed) else [1, 3, 2, 0]
        mK = cute.make_tensor(mK.iterator, cute.select(mK.layout, mode=by_key))
        box = (KEYS, spec.D)
        sQ_layout, sK_layout = operand_layout(dtype, spec.columns, spec.D, 1), operand_layout(dtype, *box, STAGES)
        one = cute.select(sK_layout, mode=[0, 1])
        tma = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), mK, one, box)
        Hkv = mIndices.shape[cute.rank(mIndices) - 2]
        tiles, batches = tiles_and_batch(mQ, mCu, spec.tokens)
        groups, starts = Int32(tiles * batches), (mCu, mCu_blocks, mCu_keys, mOffset)
        self.kernel(mQ, tma, mLSE, starts, mIndices, S, groups, softmax_scale * LOG2_E, (sQ_layout, sK_layout)).launch(
            grid=[groups * Hkv, 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=2,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        tma: tuple[cute.CopyAtom, cute.Tensor],
        mLSE: cute.Tensor,
        starts: tuple[cute.Tensor | None, ...],
        mIndices: cute.Tensor,
        S: Int32,
        groups: Int32,
        scale_log2: Float32,
        layouts: tuple[cute.ComposedLayout, cute.ComposedLayout],
    ):
        spec, dtype = self.spec, mQ.element_type
        atom, mK = tma
        tidx, _, _ = cute.arch.thread_idx()
        warp, lane = cute.arch.make_warp_uniform(tidx // WARP), tidx % WARP
        if warp == 0:
            cpasync.prefetch_descriptor(atom)
        place = self.place(mQ, starts, mIndices, S, groups)

        smem = SmemAllocator()
        barriers = smem.allocate_array(Int64, STAGES)
        sQ, sK = [
            smem.allocate_tensor(dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner) for layout in layouts
        ]
        scores_layout = cute.make_layout(
            (KEYS, spec.tokens_a_warp, WARPS), stride=(1, spec.token_words, spec.warp_words)
        )
        sScores = smem.allocate_tensor(Float32, scores_layout, byte_alignment=16)
        sColumns = smem.allocate_tensor(Int64, cute.make_ordered_layout((spec.capacity, WARP, WARPS), order=(1, 0, 2)))
        sSelected = smem.allocate_tensor(Int64, cute.make_layout((spec.n, WARP // spec.lanes, WARPS)))
        if warp == 0:
            for stage in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(barriers + stage, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        steps = place.steps()
        if warp == 0:
            for stage in cutlass.range_constexpr(STAGES):
                if stage < steps:
                    self.load_keys(atom, mK, sK, barriers, place, Int32(stage), Int32(stage))

        # The token whose list this lane helps to keep.
        token = lane // spec.lanes
        number = warp * spec.tokens_a_warp + token
        kept_here = (token < spec.tokens_a_warp) & (number < spec.tokens)
        t = place.first + cutlass.min(number, spec.tokens - 1)
        own = t // spec.block_size
        room = Int32(spec.n)
        if const_expr(spec.force):
            room = cutlass.max(spec.n - forced_blocks(own), 0)
        columns = (sColumns[None, None, warp], sSelected[None, None, warp])
        mine = candidates.no_candidates(spec, *columns, room, lane)

        if steps > 0:
            self.load_queries(mQ, sQ, place)
            shifts = self.shifts(mLSE, place)
            token_scores = sScores[None, cutlass.min(token, spec.tokens_a_warp - 1), warp]
            values = StepValues(spec, token_scores, place, t, lane % spec.lanes)
            cute.arch.cp_async_wait_group(0)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_threads()

            products = Products.of(sK, sQ, tidx, spec.by_warp)
            cute.arch.mbarrier_wait(barriers, 0)
            products.start(Int32(0))
            hand_over = partial(self.hand_over, products, shifts, scale_log2, sScores, warp, lane)
            for step in cutlass.range(steps - 1, unroll=1):
                hand_over()
                stage = (step + 1) % STAGES
                cute.arch.mbarrier_wait(barriers + stage, (step + 1) // STAGES % 2)
                products.start(stage)
                if (warp == 0) & (step + STAGES < steps):
                    self.load_keys(atom, mK, sK, barriers, place, step + STAGES, step % STAGES)
                values.add_to(mine, step)
            hand_over()
            values.add_to(mine, steps - 1)

        kept = Int32(0)
        if steps > 0:
            kept = candidates.select(mine)
        written = kept_here & (t < place.end)
        row = place.rows_before + cutlass.min(t, place.end - 1)
        mList = (
            mIndices[row, place.head, None] if const_expr(spec.packed) else mIndices[place.batch, row, place.head, None]
        )
        write_token_list(mList, mine, kept, own, written)

    def place(
        self,
        mQ: cute.Tensor,
        starts: tuple[cute.Tensor | None, ...],
        mIndices: cute.Tensor,
        S: Int32,
        groups: Int32,
    ) -> Place:
        """The last tokens of a sequence first, since they have most keys; key/value heads side by side."""
        spec, (mCu, mCu_blocks, mCu_keys, mOffset) = self.spec, starts
        cta, _, _ = cute.arch.block_idx()
        Hkv = mIndices.shape[cute.rank(mIndices) - 2]
        head, number = cta % Hkv, groups - 1 - cta // Hkv
        batch, rows_before, keys_before = Int32(0), Int32(0), Int32(0)
        if const_expr(spec.packed):
            sequence = sequence_of(mCu, number, spec.tokens)
            rows_before, keys_before = mCu[sequence], mCu_blocks[sequence]
            first = (number - rows_before // spec.tokens - sequence) * spec.tokens
            end = mCu[sequence + 1] - rows_before
            S = end if const_expr(mCu_keys is None) else mCu_keys[sequence + 1] - mCu_keys[sequence]
        else:
            batches = Int32(mQ.shape[0])
            sequence = batch = number % batches
            first, end = number // batches * spec.tokens, Int32(mQ.shape[1])
        if const_expr(mOffset is None):
            S = end
        else:
            offset = mOffset[sequence]
            first, end, rows_before = first + offset, end + offset, rows_before - offset
        return Place(spec, batch, head, first, end, S, rows_before, keys_before)

    @cute.jit
    def load_keys(
        self,
        atom: cute.CopyAtom,
        mK: cute.Tensor,
        sK: cute.Tensor,
        barriers: cute.Pointer,
        place: Place,
        step: Int32,
        stage: Int32,
    ):
        """Load a step's keys, by one warp; rows before the first and past the last key of the tensor are 0."""
        spec = self.spec
        if const_expr(spec.packed):
            keys = mK[None, None, place.head]
        else:
            keys = mK[None, None, place.head, place.batch]
        keys = cute.domain_offset((place.keys_before + place.first_key(step), 0), keys)
        gK = cute.local_tile(keys, (KEYS, spec.D), (0, 0))
        sX, gX = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(sK, 0, 2), cute.group_modes(gK, 0, 2)
        )
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barriers + stage, KEYS * spec.D * 2)
        cute.copy(atom, gX, sX[None, stage], tma_bar_ptr=barriers + stage)

    def column_place(self, place: Place, column: Int32) -> tuple[Int32, Int32]:
        """(token, head) of a column of the product; clamped to what there is."""
        spec = self.spec
        x, c = column // 2 % QUAD, column // 8 * 2 + column % 2
        token = x // spec.share * spec.tokens_a_warp + cutlass.min(c // spec.heads, spec.tokens_a_warp - 1)
        head = x % spec.share * spec.heads + c % spec.heads
        t = cutlass.min(place.first + cutlass.min(token, spec.tokens - 1), place.end - 1)
        return place.rows_before + t, place.head * spec.G + cutlass.min(head, spec.G - 1)

    @cute.jit
    def load_queries(self, mQ: cute.Tensor, sQ: cute.Tensor, place: Place):
        spec = self.spec
        tidx, _, _ = cute.arch.thread_idx()
        lanes = spec.D // VECTOR
        atom = cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), mQ.element_type, num_bits_per_copy=128
        )
        threads = cute.make_ordered_layout((THREADS // lanes, lanes), order=(1, 0))
        copy = cute.make_tiled_copy_tv(atom, threads, cute.make_layout((1, VECTOR)))
        tQsQ = copy.get_slice(tidx).partition_D(sQ[None, None, 0])
        for i in cutlass.range_constexpr(spec.columns * lanes // THREADS):
            row, head = self.column_place(place, tidx // lanes + i * (THREADS // lanes))
            source = mQ[row, head, None] if const_expr(spec.packed) else mQ[place.batch, row, head, None]
            source = cute.local_tile(source, (VECTOR,), (tidx % lanes,))
            target = tQsQ[None, i, 0]
            cute.copy(copy, cute.make_tensor(source.iterator, target.layout), target)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def shifts(self, mLSE: cute.Tensor, place: Place) -> cute.Tensor:
        """For each of this thread's columns -log2 of what exponentials are divided by; -inf where there is no head."""
        spec = self.spec
        x = cute.arch.lane_idx() % QUAD
        shifts = cute.make_rmem_tensor((spec.own_columns,), Float32)
        for c in cutlass.range_constexpr(spec.own_columns):
            row, head = self.column_place(place, c // 2 * 8 + 2 * x + c % 2)
            lse = mLSE[head, row] if const_expr(spec.packed) else mLSE[place.batch, head, row]
            there = x % spec.share * spec.heads + c % spec.heads < spec.G
            shifts[c] = cutlass.select_(there, -lse * LOG2_E, -Float32.inf)
        return shifts

    def hand_over(
        self,
        products: Products,
        shifts: cute.Tensor,
        scale_log2: Float32,
        sScores: cute.Tensor,
        warp: Int32,
        lane: Int32,
    ) -> None:
        """Write a step's sums, once its products are there and the last step's sums have been read."""
        products.finish()
        sums = self.sum_groups(products, shifts, scale_log2)
        cute.arch.barrier(barrier_id=SCORES_READ, number_of_threads=THREADS)
        self.store_sums(sums, sScores, warp, lane)
        cute.arch.barrier(barrier_id=SCORES_WRITTEN, number_of_threads=THREADS)

    def sum_groups(self, products: Products, shifts: cute.Tensor, scale_log2: Float32) -> list[list[Float32]]:
        """Probabilities summed over a group, of this thread's two keys and each of its tokens."""
        spec, sums = self.spec, []
        for row in range(2):
            sums.append([])
            for token in range(spec.tokens_a_warp):
                total = None
                for c in range(token * spec.heads, (token + 1) * spec.heads):
                    p = exp2(cute.math.fma(products.score(row, c), scale_log2, shifts[c]))
                    total = p if total is None else total + p
                step = 1
                while step < spec.share:
                    total += cute.arch.shuffle_sync_bfly(total, step)
                    step *= 2
                sums[row].append(total)
        return sums

    @cute.jit
    def store_sums(self, sums: list[list[Float32]], sScores: cute.Tensor, warp: Int32, lane: Int32):
        spec = self.spec
        owner = lane % QUAD // spec.share
        for row in cutlass.range_constexpr(2):
            for token in cutlass.range_constexpr(spec.tokens_a_warp):
                sScores[16 * warp + lane // QUAD + 8 * row, token, owner] = sums[row][token]


def takes(config: NSAConfig, G: int) -> bool:
    """True if `token_topk` takes a call with G query heads a group."""
    keys = config.block_size // config.stride + config.span // config.stride - 1
    return G <= MOST_HEADS and config.block_counts <= MOST_BLOCKS and keys <= KEYS


@torch.no_grad()
def token_topk(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    *,
    config: NSAConfig,
    causal: bool,
    softmax_scale: float,
    cu_seqlens: Tensor | None = None,
    cu_blocks: Tensor | None = None,
    lengths: tuple[int, ...] | None = None,
    q_offset: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_k: int | None = None,
) -> Tensor:
    """The blocks listed for each token and key/value head, in calls that `takes` is true for.

    Args:
        q: [B, T, Hq, D], or packed [total, Hq, D]; fp16 or bf16, D 64 or 128.
        k_cmp: [B, Tc, Hkv, D], packed [all, Hkv, D]: the compressed branch's keys, like q.
        lse: fp32 [B, Hq, T], packed [Hq, total]: the compressed branch's log-sum-exp, -inf where a row sees no key.
        cu_seqlens, cu_blocks: packed only: int32, where sequences start in q, and in k_cmp.
        lengths: packed only: the sequences' lengths, as the host knows them.
        q_offset: int32 [B], packed [sequences]: the position of each sequence's first query among its keys, where there
            are more keys than queries. None: as many, from 0.
        cu_seqlens_k: packed, with q_offset: int32, where the tokens that compressed keys are made of start.
        max_seqlen_k: with q_offset: tokens of a sequence's keys; packed: of the longest.

    Returns:
        int32 [B, T, Hkv, n], ascending, padded with -1 (packed [total, Hkv, n]); n is ``config.list_width`` of the
        longest sequence of keys.
    """
    Hq, D, Hkv = q.shape[-2], q.shape[-1], k_cmp.shape[-2]
    packed = lengths is not None
    spec = TokenTopKSpec(
        D, Hq // Hkv, config.block_counts, causal, config.force_blocks, packed,
        config.block_size, config.span, config.stride, config.offset, by_warp(device_arch(q.device.index)),
    )  # fmt: skip
    S = max_seqlen_k if q_offset is not None else max(lengths, default=0) if packed else q.shape[1]
    indices = torch.empty(*q.shape[:-2], Hkv, config.list_width(S), dtype=torch.int32, device=q.device)
    if indices.numel():
        if not k_cmp.shape[-3]:  # nothing is loaded, but a descriptor needs a row
            k_cmp = k_cmp.new_empty(*k_cmp.shape[:-3], 1, Hkv, D)
        tensors = (q, k_cmp, lse, cu_seqlens, cu_blocks, indices, cu_seqlens_k, q_offset)
        launch("token_topk", TokenTopK, (spec,), *tensors, S, float(softmax_scale))
    return indices
