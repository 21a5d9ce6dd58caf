"""The epilogue: a token's list, ascending, merged from its best candidates and the forced blocks by rank."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from nsa_layer.kernels.select_by_tile.register_topk import unpack_block
from nsa_layer.kernels.select_by_tile.split_fp16 import float_of
from nsa_layer.kernels.select_by_token.candidates import Candidates
from nsa_layer.kernels.select_by_token.spec import NONNEGATIVE, TokenTopKSpec
from nsa_layer.kernels.select_by_token.tiles import Tile


def forced_block_of_token(spec: TokenTopKSpec, i: Int32, own: Int32, forced: Int32) -> Int32:
    """The i-th forced block of the list of a token in block `own`; the earliest are omitted if n does not hold them."""
    if spec.forced > spec.n:
        i += cutlass.max(cutlass.min(own + 1, spec.forced) - spec.n, 0)
    if spec.init == 0:
        return own - (forced - 1 - i)
    return cutlass.select_(i > spec.init - 1, own - (forced - 1 - i), Int32(0) if spec.init == 1 else i)


@cute.jit
def write_token_list(
    mList: cute.Tensor,
    mScores: cute.Tensor | None,
    mine: Candidates,
    kept: Int32,
    own: Int32,
    work_tile: Tile,
    written: Boolean,
):
    """Write a token's list [n] if `written`, and to mScores the index' scores of blocks that are not forced."""
    spec, lanes, width = mine.spec, mine.spec.lanes, cute.size(mList)
    forced = Int32(0)
    if const_expr(spec.forced):
        forced = work_tile.forced_blocks(own)
    positions = [mine.member + lanes * i for i in range(-(-spec.n // lanes))]
    first = [mine.member + lanes * i for i in range(-(-min(spec.forced, spec.n) // lanes))]
    entries = [mine.selected[cutlass.min(i, spec.n - 1)] for i in positions]
    blocks = list(map(unpack_block, entries))
    blocks += [forced_block_of_token(spec, i, own, forced) for i in first]
    if const_expr(spec.forced > spec.n):
        forced = cutlass.min(forced, spec.n)
    before = [Int32(0) for _ in blocks]
    for i in cutlass.range(kept, unroll=4):
        block = unpack_block(mine.selected[i])
        for j in cutlass.range_constexpr(len(blocks)):
            before[j] += cutlass.select_(block < blocks[j], Int32(1), Int32(0))
    if written:
        for j in cutlass.range_constexpr(len(blocks)):
            if const_expr(j < len(positions)):
                if positions[j] < kept:
                    if const_expr(spec.forced):
                        before[j] += spec.init + cutlass.select_(blocks[j] > own, forced - spec.init, Int32(0))
                    mList[before[j]] = blocks[j]
                    if const_expr(mScores is not None):
                        mScores[before[j]] = score_of(Int32(entries[j] >> 32))
            elif first[j - len(positions)] < forced:
                mList[first[j - len(positions)] + before[j]] = blocks[j]
        for i in cutlass.range(forced + kept + mine.member, width, lanes, unroll=1):
            mList[i] = Int32(-1)


def score_of(bits: Int32) -> Float32:
    """The score that 31 bits stand for, which order as scores of any sign do; without the last bit of fp32."""
    ordered = (bits - NONNEGATIVE) << 1
    return float_of(cutlass.select_(ordered < 0, ordered ^ 0x7FFFFFFF, ordered))
