"""Pooled queries of all tiles, and compressed keys, as rows of split fp16, in one launch.

A CTA sums a tile's tokens for as many heads as make 512 elements: 64 threads cover these, 16 bytes each, and four such
rows of threads share the tokens, with the loads of eight tokens in flight. The last CTAs split the keys. Rows of split
fp16 have 64 or 128 numbers, zeros behind those of a shorter row.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32, const_expr

from nsa_layer.kernels.launch import launch
from nsa_layer.kernels.select_by_tile import split_fp16
from nsa_layer.kernels.select_by_tile.query_tiles import tile_to_batch

Tensor = torch.Tensor

THREADS = 256
ROW = 64  # threads that cover 512 elements of a token
SHARES = THREADS // ROW  # rows of threads that share a tile's tokens
AT_ONCE = 8  # loads of a thread in flight


@dataclass(frozen=True)
class SplitRows:
    """Rows of split fp16.

    Attributes:
        rows: fp16 [R, H, 2 D]: hi, then lo.
        scale: fp32 [R, H], a power of two: ``x = (hi + lo) * scale * 2 ** KEYS_DOWN`` for a key, ``... / 2 **
            KEYS_DOWN`` for a query.
    """

    rows: Tensor
    scale: Tensor


class PooledQueries:
    """One launch of `pooled_queries`.

    Args:
        D: elements of a row of split fp16, padded.
        of_row: elements of a row of a query or key.
        own: pool a tile's own queries, not those up to its first.
    """

    shapes = "B T Hq D", "B blocks Hkv D", "starts", "tiles Hq D", "tiles Hq", "keys Hkv D", "keys Hkv"

    def __init__(self, D: int, of_row: int, own: bool) -> None:
        self.own = own
        self.lanes, self.vectors = D // split_fp16.VECTOR, of_row // split_fp16.VECTOR
        self.heads = ROW // self.lanes

    @cute.jit
    def __call__(self, *arguments):
        """q [B, T, Hq, D], fp32 keys [B, Tc, Hkv, D], starts of packed queries; split rows and their scales, of tiles
        and of keys; tokens of a tile, stream."""
        mQ, mK, mCu, mQ_rows, mQ_scale, mK_rows, mK_scale, q_tile, stream = arguments
        if const_expr(mCu is not None):
            mQ, mK = [cute.make_tensor(t.iterator, cute.prepend(t.layout, cute.make_layout(1))) for t in (mQ, mK)]
        head_groups = cute.ceil_div(mQ.shape[2], self.heads)
        key_rows = mK.shape[0] * mK.shape[1] * mK.shape[2]
        of_tiles = mQ_rows.shape[0] * head_groups
        tensors = (mQ, mK, mCu, mQ_rows, mQ_scale, mK_rows, mK_scale)
        self.kernel(tensors, q_tile, head_groups, of_tiles).launch(
            grid=[of_tiles + cute.ceil_div(key_rows, THREADS // self.lanes), 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, tensors: tuple, q_tile: Int32, head_groups: Int32, of_tiles: Int32):
        mQ, mK, mCu, mQ_rows, mQ_scale, mK_rows, mK_scale = tensors
        cta, _, _ = cute.arch.block_idx()
        sums = cutlass.utils.SmemAllocator().allocate_tensor(
            Float32, cute.make_layout((THREADS, split_fp16.VECTOR)), 16
        )
        if cta < of_tiles:
            self.mean(mQ, mCu, mQ_rows, mQ_scale, q_tile, cta // head_groups, cta % head_groups, sums)
        else:
            self.split_keys(mK, mK_rows, mK_scale, cta - of_tiles)

    @cute.jit
    def mean(
        self,
        mQ: cute.Tensor,
        mCu: cute.Tensor | None,
        mRows: cute.Tensor,
        mScale: cute.Tensor,
        q_tile: Int32,
        row: Int32,
        head_group: Int32,
        sums: cute.Tensor,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        column, share = tidx % ROW, tidx // ROW
        lane, h = column % self.lanes, head_group * self.heads + column // self.lanes
        Hq = mQ.shape[2]
        row_head = cutlass.min(h, Hq - 1)
        if const_expr(mCu is not None):
            sequence, tile, _ = tile_to_batch(mCu, q_tile, 1, row)
            if sequence < 0:  # there are fewer tiles than rows
                sequence, tile = Int32(0), Int32(0)
            b, base, T = Int32(0), mCu[sequence], mCu[sequence + 1] - mCu[sequence]
        else:
            T = mQ.shape[1]
            tiles = cute.ceil_div(T, q_tile)
            b, tile, base = row // tiles, row % tiles, Int32(0)
        first, end = tile * q_tile, cutlass.min((tile + 1) * q_tile, T)
        if const_expr(not self.own):
            end = first + 1
            first = cutlass.max(end - q_tile, 0)
        count = Float32(end - first)
        # A power of two from half of 1 / count on: scaled by it, a sum is in the range of fp32 where its mean is.
        down = split_fp16.float_of((253 << 23) - (split_fp16.bits_of(count) & (255 << 23)))
        total = cute.make_rmem_tensor((split_fp16.VECTOR,), Float32)
        total.fill(0.0)
        for token in cutlass.range(first + share, end, SHARES * AT_ONCE, unroll=1):
            # Past the end the last token is read again and not counted: a branch would delay the loads.
            tokens = [token + i * SHARES for i in range(AT_ONCE)]
            loaded = [self.load(mQ, b, base + cutlass.min(t, end - 1), row_head, lane) for t in tokens]
            for i in cutlass.range_constexpr(AT_ONCE):
                for c in cutlass.range_constexpr(split_fp16.VECTOR):
                    x = loaded[i][c].to(Float32) * down
                    total[c] += cutlass.select_((tokens[i] < end) & self.in_row(lane), x, Float32(0.0))
        for c in cutlass.range_constexpr(split_fp16.VECTOR):
            sums[tidx, c] = total[c]
        cute.arch.sync_threads()
        if share == 0:
            mean = []
            for c in cutlass.range_constexpr(split_fp16.VECTOR):
                shares = [sums[tidx + i * ROW, c] for i in range(SHARES)]
                mean.append(((shares[0] + shares[1]) + (shares[2] + shares[3])) / (count * down))
            scale = split_fp16.split(
                mean, self.lanes, mRows[row, row_head, None], lane, h < Hq, shift=split_fp16.KEYS_DOWN
            )
            if (h < Hq) & (lane == 0):
                mScale[row, h] = scale

    def load(self, mQ: cute.Tensor, b: Int32, token: Int32, h: Int32, lane: Int32) -> cute.Tensor:
        atom = cute.make_copy_atom(cute.nvgpu.CopyG2ROp(), mQ.element_type, num_bits_per_copy=128, invariant=True)
        loaded = cute.make_rmem_tensor((split_fp16.VECTOR,), mQ.element_type)
        cute.copy(atom, cute.local_tile(mQ[b, token, h, None], (split_fp16.VECTOR,), (self.clamped(lane),)), loaded)
        return loaded

    def in_row(self, lane: Int32) -> bool | Boolean:
        """True if a thread has elements of a query or key; other threads have padding."""
        return True if self.vectors == self.lanes else lane < self.vectors

    def clamped(self, lane: Int32) -> Int32:
        return lane if self.vectors == self.lanes else cutlass.min(lane, self.vectors - 1)

    @cute.jit
    def split_keys(self, mK: cute.Tensor, mRows: cute.Tensor, mScale: cute.Tensor, cta: Int32):
        tidx, _, _ = cute.arch.thread_idx()
        B, Tc, Hkv, _ = mK.shape
        lane = tidx % self.lanes
        number = cta * (THREADS // self.lanes) + tidx // self.lanes
        inside = number < B * Tc * Hkv
        number = cutlass.min(number, B * Tc * Hkv - 1)
        row, h = number // Hkv, number % Hkv
        loaded = cute.make_rmem_tensor((split_fp16.VECTOR,), Float32)
        vector = cute.local_tile(mK[row // Tc, row % Tc, h, None], (split_fp16.VECTOR,), (self.clamped(lane),))
        cute.autovec_copy(vector, loaded)
        share = [loaded[c] for c in range(split_fp16.VECTOR)]
        if const_expr(self.vectors < self.lanes):
            share = [Float32(cutlass.select_(self.in_row(lane), x, Float32(0.0))) for x in share]
        scale = split_fp16.split(share, self.lanes, mRows[row, h, None], lane, inside, shift=-split_fp16.KEYS_DOWN)
        if inside & (lane == 0):
            mScale[row, h] = scale


def pooled_queries(
    q: Tensor, k_mean: Tensor, *, q_tile: int, own: bool, tiles: int, cu_seqlens: Tensor | None = None
) -> tuple[SplitRows, SplitRows]:
    """The pooled query of each tile, its mean, and the compressed keys, as rows of split fp16.

    Args:
        q: [B, T, Hq, D], or packed [total, Hq, D]; fp16 or bf16.
        k_mean: fp32 [B, Tc, Hkv, D], packed [all, Hkv, D].
        own: the mean of a tile's own queries; otherwise of the `q_tile` queries up to its first (as many as there are).
        tiles: of all sequences, or more.

    Returns:
        Means with R = tiles, of one sequence after the other, and keys with R = B Tc; D is 64 or 128.
    """
    D = split_fp16.row_length(q.shape[-1])
    means = _empty_split_rows(tiles, q.shape[-2], D, q)
    keys = _empty_split_rows(k_mean.shape[:-2].numel(), k_mean.shape[-2], D, q)
    if tiles:
        outputs = (means.rows, means.scale, keys.rows, keys.scale)
        launch("pooled_queries", PooledQueries, (D, q.shape[-1], own), q, k_mean, cu_seqlens, *outputs, q_tile)
    return means, keys


def _empty_split_rows(R: int, H: int, D: int, like: Tensor) -> SplitRows:
    rows = torch.empty(R, H, 2 * D, dtype=torch.float16, device=like.device)
    return SplitRows(rows, torch.empty(R, H, dtype=torch.float32, device=like.device))
