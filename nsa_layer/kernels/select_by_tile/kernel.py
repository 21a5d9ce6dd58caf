"""Block top-k: scores of pooled queries against compressed keys in registers, and each tile's best blocks.

A CTA of 8 warps, 32 rows by 64 keys each, streams keys through shared memory with cp.async. Rows are permuted so that a
thread's four rows are heads of one tile: up to four heads a group are summed without another thread. The package's
docstring gives the algorithm.
"""

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from flash_attn.cute.utils import LOG2_E
from nsa_layer.config import NSAConfig
from nsa_layer.kernels.launch import launch
from nsa_layer.kernels.select_by_tile import register_topk
from nsa_layer.kernels.select_by_tile.epilogue import num_wanted, write_block_list
from nsa_layer.kernels.select_by_tile.online_softmax import exp2, finish_row_sums, row_shift, update_row_sums
from nsa_layer.kernels.select_by_tile.pooled_queries import pooled_queries
from nsa_layer.kernels.select_by_tile.query_tiles import blocks_end, eligible, local_range, tile_to_batch
from nsa_layer.kernels.select_by_tile.register_topk import RegisterTopK
from nsa_layer.kernels.select_by_tile.spec import ROWS, TopKSpec
from nsa_layer.kernels.select_by_tile.split_fp16 import (
    THREADS,
    TILE,
    VECTOR,
    WARPS_M,
    WARPS_N,
    copy_row,
    row_copy,
    row_length,
    rows_layout,
    split_gemm,
    tiled_mma,
)

Tensor = torch.Tensor

STAGES = 2
COLUMNS = tuple(register_topk.column(i) for i in range(register_topk.COLUMNS))  # of a thread, from its first
KEYS_IN_L2 = 32 << 20  # bytes


class BlockTopK:
    """One launch of `block_topk`."""

    shapes = (
        *("tiles Hq D", "tiles Hq", "keys Hkv D", "keys Hkv", "starts", "starts"),
        *("batch lists list_tiles n", "batch lists list_tiles"),
    )

    def __init__(self, spec: TopKSpec) -> None:
        self.spec = spec

    @cute.jit
    def __call__(self, *arguments):
        """Split fp16 rows [tiles, Hq, 2 D] and scales of queries, those of keys, starts of tokens and of keys, lists
        [B, Hkv, tiles of a sequence, n], packed [1, Hkv, all tiles, n], their counts; numbers of `kernel`; stream."""
        tensors, (*numbers, stream) = arguments[:8], arguments[8:]
        groups, indices = numbers[0], tensors[6]
        self.kernel(tensors, tuple(numbers)).launch(
            grid=[groups * indices.shape[1], 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, tensors: tuple, numbers: tuple):
        """numbers: groups of tiles, one a CTA, of all sequences; T, and the others as unpacked below."""
        mQ, mQ_scale, mK, mK_scale, mCu, mCu_blocks, mIndices, mCounts = tensors
        groups, T, block_size, q_tile, block_counts, keys_a_block, softmax_scale, heads_first = numbers
        spec = self.spec
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        lane, warp_id = tidx % 32, cute.arch.make_warp_uniform(tidx // 32)
        warp_m, warp_n = warp_id % WARPS_M, warp_id // WARPS_M

        # Longest first. All heads of a tile side by side balance best; head after head keeps a head's keys in L2.
        Hkv = mIndices.shape[1]
        head, number = cta // groups, cta % groups
        if heads_first != 0:
            head, number = cta % Hkv, cta // Hkv
        number = groups - 1 - number
        if const_expr(spec.packed):
            sequence, group, tiles_before = tile_to_batch(mCu, q_tile, spec.tiles, number)
            there = sequence >= 0  # else past the last sequence's groups
            if not there:
                self.empty_lists(mIndices, mCounts, head, tiles_before + group, groups - number + group)
            sequence = cutlass.max(sequence, 0)
            T = mCu[sequence + 1] - mCu[sequence]
            keys_before, out = mCu_blocks[sequence], Int32(0)
            M = cutlass.select_(there, cute.ceil_div(T, q_tile), Int32(0))
            list_before = tiles_before
        else:
            M = cute.ceil_div(T, q_tile)
            sequence, group = number % mIndices.shape[0], number // mIndices.shape[0]
            tiles_before, list_before, out = sequence * M, Int32(0), sequence
            keys_before = sequence * (mK.shape[0] // mIndices.shape[0])
        sizes = (T, M, block_size, q_tile, block_counts)
        first_tile = group * spec.tiles
        last_tile = cutlass.min(first_tile + spec.tiles, M) - 1
        end = blocks_end(last_tile * q_tile, T, block_size, spec.causal)

        smem = cutlass.utils.SmemAllocator()
        layout_A, layout_B = rows_layout(spec.D, 1), rows_layout(spec.D // spec.parts, STAGES)
        sA = smem.allocate_tensor(Float16, layout_A.outer, 1024, layout_A.inner)
        list_bytes = spec.tiles * WARPS_N * register_topk.QUAD * spec.share * 8
        region = smem.allocate(max(cute.cosize(layout_B) * 2, list_bytes), 1024)
        sB = cute.make_tensor(cute.recast_ptr(region, layout_B.inner, Float16), layout_B.outer)
        list_shape = (register_topk.QUAD * spec.share * WARPS_N, spec.tiles)
        sLists = cute.make_tensor(cute.recast_ptr(region, dtype=Int64), cute.make_layout(list_shape))
        sScale = smem.allocate_tensor(Float32, cute.make_layout((TILE, STAGES)), 16)
        sSums = smem.allocate_tensor(Float32, cute.make_layout((TILE, WARPS_N, 2)), 16)

        # Tile, head and factor of each of a thread's rows.
        tiles, factors, ends, counted = [], [], [], []
        for i in cutlass.range_constexpr(ROWS):
            tile, g = spec.tile_and_head(i // 2, i % 2, warp_m, lane // 4)
            tiles.append(first_tile + tile)
            counted.append(g < spec.G)
            rows_end = blocks_end(tiles[i] * q_tile, T, block_size, spec.causal)
            ends.append(cutlass.select_(tiles[i] < M, rows_end, Int32(0)))
            asked = tiles_before + cutlass.min(tiles[i], M - 1)
            factor = mQ_scale[asked, head * spec.G + cutlass.min(g, spec.G - 1)]
            factors.append(factor * (softmax_scale * LOG2_E) if const_expr(spec.softmax) else factor)
        best = []
        for t in cutlass.range_constexpr(spec.lists):
            wanted = num_wanted(tiles[t * (ROWS // spec.lists)], sizes, spec)
            best.append(register_topk.empty_topk(spec.share, wanted))

        steps = cute.ceil_div(end, TILE)
        whole = blocks_end(first_tile * q_tile, T, block_size, spec.causal) // TILE  # steps of candidates alone
        middle = steps - 1 if const_expr(spec.softmax) else Int32(0)
        rounds = steps + middle if const_expr(spec.softmax) else steps
        load = (mK, mK_scale, sB, sScale, head, keys_before, keys_a_block, end)
        # Of each row: the highest score, in the keys' scale alone, and the sum of exponentials, in the end its inverse.
        highest, sums = (cute.make_rmem_tensor((ROWS,), Float32) for _ in range(2))
        highest.fill(-Float32.inf)
        sums.fill(0.0)
        acc = cute.make_rmem_tensor(tiled_mma().partition_shape_C((TILE, TILE)), Float32)
        first_column = 8 * warp_n + 2 * (lane % 4)
        if rounds > 0:
            self.load_queries(mQ, sA, head, first_tile, tiles_before, M)
        self.load_round(load, Int32(0), rounds, steps, middle)
        self.load_round(load, Int32(1), rounds, steps, middle)
        cute.arch.cp_async_wait_group(1)
        cute.arch.sync_threads()
        for i in cutlass.range(rounds, unroll=1):
            at = i * spec.parts  # of the parts of all rounds
            for part in cutlass.range_constexpr(spec.parts - 1):
                split_gemm(sA, sB, acc, at % STAGES, part)
                self.next_round(load, at, rounds, steps, middle)
                at += 1
            split_gemm(sA, sB, acc, at % STAGES, spec.parts - 1)
            scales = [sScale[first_column + c, at % STAGES] for c in COLUMNS]
            first = self.step_of(i, steps, middle) * TILE + first_column
            late = self.is_late(warp_n, i, middle)
            if late:
                self.next_round(load, at, rounds, steps, middle)
            if const_expr(spec.softmax):
                if i < whole:
                    update_row_sums(acc, scales, factors, COLUMNS, first, None, highest, sums)
                elif i <= middle:
                    update_row_sums(acc, scales, factors, COLUMNS, first, ends, highest, sums)
                if i == middle:
                    finish_row_sums(sSums, factors, highest, sums, counted, 16 * warp_m + lane // 4, warp_n)
            if i >= middle:
                self.insert_all(best, acc, scales, factors, highest, sums, first, tiles, ends, sizes)
            if not late:
                self.next_round(load, at, rounds, steps, middle)

        cute.arch.sync_threads()
        self.store_lists(best, sLists, warp_m, warp_n, lane)
        cute.arch.sync_threads()
        for t in cutlass.range(warp_id, spec.tiles, THREADS // 32, unroll=1):
            if first_tile + t < M:
                row = list_before + first_tile + t
                wanted = num_wanted(first_tile + t, sizes, spec)
                lists = (mIndices[out, head, row, None], mCounts[out, head, None])
                write_block_list(sLists[None, t], *lists, first_tile + t, row, wanted, sizes, spec)

    def is_late(self, warp_n: Int32, i: Int32, middle: Int32) -> Boolean:
        """True for one of two warps of a scheduler: it reads its scores while the other multiplies for the next round.

        Not in the middle round, in which all warps exchange their sums.
        """
        if const_expr(self.spec.softmax):
            return (warp_n == 1) & (i != middle)
        return warp_n == 1

    @cute.jit
    def next_round(self, load: tuple, i: Int32, rounds: Int32, steps: Int32, middle: Int32):
        """Wait for all warps' products and for the keys of the next round, or its next part; start to load those
        after them into the free stage."""
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        self.load_round(load, i + STAGES, rounds, steps, middle)

    @cute.jit
    def load_round(self, load: tuple, i: Int32, rounds: Int32, steps: Int32, middle: Int32):
        parts = self.spec.parts
        if i < rounds * parts:
            self.load_keys(load, self.step_of(i // parts, steps, middle), i % parts, i % STAGES)
        cute.arch.cp_async_commit_group()

    def step_of(self, i: Int32, steps: Int32, middle: Int32) -> Int32:
        """The tile of keys of round i: ascending up to the middle one, then descending; a single pass descends."""
        if const_expr(self.spec.softmax):
            return cutlass.select_(i <= middle, i, 2 * middle - i)
        return steps - 1 - i

    @cute.jit
    def load_queries(
        self, mQ: cute.Tensor, sA: cute.Tensor, head: Int32, first_tile: Int32, tiles_before: Int32, M: Int32
    ):
        spec, copy = self.spec, row_copy(self.spec.D)
        tidx, _, _ = cute.arch.thread_idx()
        lanes = spec.D // VECTOR
        tAsA = copy.get_slice(tidx).partition_D(sA)
        for i in cutlass.range_constexpr(TILE * lanes // THREADS):
            r = tidx // lanes + i * (THREADS // lanes)
            tile, g = spec.tile_and_head(r // 64, r // 8 % 2, r // 16 % 4, r % 8)
            # Rows past the last tile or head load valid memory and are never counted.
            row = tiles_before + cutlass.min(first_tile + tile, M - 1)
            source = mQ[row, head * spec.G + cutlass.min(g, spec.G - 1), None]
            copy_row(copy, source, tAsA, tidx % lanes, i, 0)

    @cute.jit
    def load_keys(self, load: tuple, step: Int32, part: Int32, stage: Int32):
        mK, mK_scale, sB, sScale, head, keys_before, keys_a_block, end = load
        width = self.spec.D // self.spec.parts
        copy, lanes = row_copy(width), width // VECTOR
        tidx, _, _ = cute.arch.thread_idx()
        lane = part * lanes + tidx % lanes
        tBsB = copy.get_slice(tidx).partition_D(sB)
        for i in cutlass.range_constexpr(TILE * lanes // THREADS):
            block = cutlass.min(step * TILE + tidx // lanes + i * (THREADS // lanes), end - 1)
            copy_row(copy, mK[keys_before + block * keys_a_block, head, None], tBsB, lane, i, 2 * stage)
        if tidx < TILE:
            row = keys_before + cutlass.min(step * TILE + tidx, end - 1) * keys_a_block
            atom = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=32)
            source = cute.local_tile(mK_scale[row, None], (1,), (head,))
            cute.copy(atom, source, cute.local_tile(sScale[None, stage], (1,), (tidx,)))

    @cute.jit
    def insert_all(
        self,
        best: list[RegisterTopK],
        acc: cute.Tensor,
        scales: list[Float32],
        factors: list[Float32],
        highest: cute.Tensor,
        sums: cute.Tensor,
        first: Int32,
        tiles: list[Int32],
        ends: list[Int32],
        sizes: tuple[Int32, ...],
    ):
        """Insert the importances of a tile of keys into the lists of a thread's query tiles."""
        spec, q_tile = self.spec, sizes[3]
        rows = ROWS // spec.lists
        shifts = [row_shift(highest[r], factors[r]) for r in range(ROWS)]
        for t in cutlass.range_constexpr(spec.lists):
            keys = cute.make_rmem_tensor((len(COLUMNS),), Int32)
            local = local_range(tiles[t * rows] * q_tile, sizes, spec)
            for i in cutlass.range_constexpr(len(COLUMNS)):
                total = Float32(0.0)
                for r in cutlass.range_constexpr(t * rows, (t + 1) * rows):
                    score = acc[(i % 2, r % 2), r // 2, i // 2]
                    if const_expr(spec.softmax):
                        total = cute.math.fma(
                            exp2(cute.math.fma(score * scales[i], factors[r], shifts[r])), sums[r], total
                        )
                    else:
                        total = score * scales[i] * factors[r]  # in this order, or it overflows: see `split_fp16`
                for bit in cutlass.range_constexpr(spec.lane_bits):
                    total += cute.arch.shuffle_sync_bfly(total, 16 >> bit)
                free = eligible(first + COLUMNS[i], ends[t * rows], local, spec)
                keys[i] = cutlass.select_(free, register_topk.orderable_bits(total), Int32(register_topk.WORST_SCORE))
            register_topk.insert(best[t], keys, first)

    @cute.jit
    def empty_lists(self, mIndices: cute.Tensor, mCounts: cute.Tensor, head: Int32, first: Int32, step: Int32):
        """Write every `step`-th list from `first` on, past those of the last sequence, as empty."""
        tidx, _, _ = cute.arch.thread_idx()
        for row in cutlass.range(first, mIndices.shape[2], step, unroll=1):
            for i in cutlass.range(tidx, mIndices.shape[3], THREADS, unroll=1):
                mIndices[0, head, row, i] = Int32(-1)
            if tidx == 0:
                mCounts[0, head, row] = Int32(0)

    @cute.jit
    def store_lists(self, best: list[RegisterTopK], sLists: cute.Tensor, warp_m: Int32, warp_n: Int32, lane: Int32):
        spec = self.spec
        for t in cutlass.range_constexpr(spec.lists):
            r = t * (ROWS // spec.lists)
            tile, g = spec.tile_and_head(r // 2, r % 2, warp_m, lane // 4)
            if g < ROWS:  # threads of a tile's further heads have the same list
                for s in cutlass.range_constexpr(spec.share):
                    entry = best[t].entries[s]
                    entry = cutlass.select_(entry == register_topk.CLOSED, Int64(register_topk.EMPTY), entry)
                    sLists[(warp_n * register_topk.QUAD + lane % 4) * spec.share + s, tile] = entry


@torch.no_grad()
def block_topk(
    q: Tensor,
    k_mean: Tensor,
    *,
    config: NSAConfig,
    causal: bool,
    softmax_scale: float,
    cu_seqlens: Tensor | None = None,
    cu_blocks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Select the blocks of each query tile, as `eager.select_blocks` defines them.

    Args:
        q: [B, T, Hq, D], or packed [total, Hq, D]; fp16 or bf16.
        k_mean: fp32 [B, Tc, Hkv, D], all compressed keys; packed [all, Hkv, D].
        cu_seqlens, cu_blocks: packed only: int32, where sequences start in q, and in k_mean.

    Returns:
        int32 [B, Hkv, M, n], ascending, padded with -1, and the lists' lengths, [B, Hkv, M]. Packed without B, with M
        and n for any lengths; lists behind the last tile's are empty.
    """
    Hq, Hkv = q.shape[-2], k_mean.shape[-2]
    share, packed = -(-config.block_counts // register_topk.QUAD), cu_seqlens is not None
    forced = (config.init_blocks, config.local_blocks, config.forces_too_many)
    T = q.shape[-3]
    spec = TopKSpec(row_length(q.shape[-1]), Hq // Hkv, share, causal, *forced, packed)
    if packed:  # an upper bound of groups, and one more, so that some CTA empties the lists behind
        B, sequences = 1, len(cu_seqlens) - 1
        M = config.num_tiles(T, sequences)
        groups = (M + sequences * (spec.tiles - 1)) // spec.tiles + 1
    else:
        B, M = q.shape[0], config.num_tiles(T)
        groups = -(-M // spec.tiles) * B
    queries, keys = pooled_queries(q, k_mean, q_tile=config.q_tile, own=not causal, tiles=M * B, cu_seqlens=cu_seqlens)
    indices = torch.empty(B, Hkv, M, config.list_width(T), dtype=torch.int32, device=q.device)
    counts = torch.empty(indices.shape[:-1], dtype=torch.int32, device=q.device)
    if counts.numel():
        numbers = (groups, T, config.block_size, config.q_tile, config.block_counts)
        heads_first = int(keys.rows.numel() * 2 <= KEYS_IN_L2)
        more = (config.block_size // config.stride, float(softmax_scale), heads_first)
        tensors = (queries.rows, queries.scale, keys.rows, keys.scale, cu_seqlens, cu_blocks, indices, counts)
        launch("block_topk", BlockTopK, (spec,), *tensors, *numbers, *more)
    return (indices.squeeze(0), counts.squeeze(0)) if packed else (indices, counts)
