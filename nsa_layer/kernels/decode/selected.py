"""Third launch of a step: the selected branch, over pieces of the listed blocks.

A thread block has up to 16 query heads of one token and key/value head; it makes the token's list of the second
launch's candidates.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from nsa_layer.kernels.block_topk.register_topk import unpack_block
from nsa_layer.kernels.decode.choice import candidates, rank_of
from nsa_layer.kernels.decode.compressed import LOG2_E, Stored
from nsa_layer.kernels.decode.places import Lengths, Pieces
from nsa_layer.kernels.decode.spec import KEYS, MOST_PARTS, ROWS, THREADS, DecodeSpec
from nsa_layer.kernels.decode.tokens import attend_tokens
from nsa_layer.kernels.decode.warp_rows import shared_partial


class SelectedDecode:
    """The kernel."""

    shapes = (
        "Bq Tq Hq D", "P S Hkv D", "P S Hkv D", "B np *", "B *", "Bs *", "B *", "B T Hkv parts n", "B Hkv R pieces 2",
        "B Hkv R pieces D", "B Hkv", "B T Hkv width",
    )  # fmt: skip

    def __init__(self, spec: DecodeSpec) -> None:
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK_cache: cute.Tensor,
        mV_cache: cute.Tensor,
        mPages: cute.Tensor | None,
        mIdx: cute.Tensor | None,
        mCu: cute.Tensor | None,
        mLengths: cute.Tensor,
        mBest: cute.Tensor,  # int64 [B, T, Hkv, parts, spec.chosen]
        mStats: cute.Tensor,
        mAcc: cute.Tensor,
        mValid: cute.Tensor,
        mLists: cute.Tensor | None,  # int32 [B, T, Hkv, spec.list_width]
        room: Int32,
        compressed_room: Int32,
        cmp: Int32,
        slc: Int32,
        parts: Int32,
        softmax_scale: Float32,
        stream,
    ):
        spec = self.spec
        lengths = Lengths(spec, mLengths, mCu, mIdx, room, compressed_room, Int32(mQ.shape[1]))
        tokens = Stored((mK_cache, mV_cache), (None, None), mPages)
        B, Hkv, _, _, _ = mStats.shape
        pieces = Pieces(cmp, slc, Int32(0), parts)
        self.kernel(mQ, tokens, lengths, pieces, mBest, mStats, mAcc, mValid, mLists, softmax_scale * LOG2_E).launch(
            grid=[slc * -(-spec.G // ROWS) * spec.T, Hkv, B],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=2,
            preferred_smem_carveout=50,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        tokens: Stored,
        lengths: Lengths,
        pieces: Pieces,
        mBest: cute.Tensor,
        mStats: cute.Tensor,
        mAcc: cute.Tensor,
        mValid: cute.Tensor,
        mLists: cute.Tensor | None,
        scale_log2: Float32,
    ):
        spec = self.spec
        tidx, _, _ = cute.arch.thread_idx()
        x, head, b = cute.arch.block_idx()
        smem = SmemAllocator()
        shared = shared_partial(smem, spec.D)
        sList = smem.allocate_tensor(Int32, cute.make_layout(spec.list_width), byte_alignment=16)
        sBest = smem.allocate_tensor(Int64, cute.make_layout(MOST_PARTS * spec.chosen), byte_alignment=16)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        tiles, found = -(-spec.G // ROWS), pieces.parts * spec.chosen
        piece, tile, token = x % pieces.slc, x // pieces.slc % tiles, x // (pieces.slc * tiles)
        # Loaded whether they count or not, beside what tells.
        for i in cutlass.range(tidx, found, THREADS, unroll=2):
            sBest[i] = mBest[b, token, head, i // spec.chosen, i % spec.chosen]
        sequence = lengths.of(b)
        if (mValid[b, head] != 0) & (token < sequence.T):
            t = sequence.position(token)
            first, count = tile * ROWS, cutlass.min(spec.G - tile * ROWS, ROWS)
            partial = mStats[b, head, None, None, None], mAcc[b, head, None, None, None]
            listed = self.make_list(t, found, sBest, sList)
            if const_expr(mLists is not None):
                if piece == 0 and tile == 0:
                    write_list(mLists[b, token, head, None], sList, listed)
            groups = listed * (spec.block_size // KEYS)
            attend_tokens(spec, tokens, sList, groups, piece, pieces.slc, pieces.cmp + piece, mQ, sequence, t, token,
                          head, first, count, scale_log2, shared, partial)  # fmt: skip

    @cute.jit
    def make_list(self, t: Int32, found: Int32, sBest: cute.Tensor, sList: cute.Tensor) -> Int32:
        """Token t's blocks, in any order, in shared memory; returns their number."""
        spec = self.spec
        tidx, _, _ = cute.arch.thread_idx()
        begin, end = candidates(spec, t)
        own, forced = t // spec.block_size, Int32(0)
        if const_expr(spec.force):
            forced = cutlass.min(own, 2) + 1
            if tidx < forced:
                sList[tidx] = cutlass.select_(tidx == 2, Int32(0), own - tidx)
        cute.arch.sync_threads()
        room = cutlass.max(spec.n - forced, 0)
        for i in cutlass.range(tidx, found, THREADS, unroll=1):
            rank = rank_of(sBest, i, found)
            if (rank < room) & (sBest[i] >= 0):
                sList[forced + rank] = unpack_block(sBest[i])
        cute.arch.sync_threads()
        return forced + cutlass.min(room, end - begin)


@cute.jit
def write_list(to: cute.Tensor, sList: cute.Tensor, listed: Int32):
    """The list in ascending order, padded with -1."""
    tidx, _, _ = cute.arch.thread_idx()
    width = cute.size(sList)
    if tidx < width:
        to[tidx] = Int32(-1)
    cute.arch.sync_threads()
    if tidx < listed:
        rank = Int32(0)
        for i in cutlass.range(listed, unroll=1):
            rank += cutlass.select_(sList[i] < sList[tidx], Int32(1), Int32(0))
        to[rank] = sList[tidx]
