"""A token's list, ascending: its ranked candidates and the forced blocks, merged by rank."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from nsa_layer.kernels.block_topk.register_topk import unpack_block
from nsa_layer.kernels.token_topk.candidates import Candidates


def forced_blocks(own: Int32) -> Int32:
    """Blocks 0, own - 1 and own, as far as they exist and differ."""
    return cutlass.min(own, 2) + 1


@cute.jit
def write_token_list(mList: cute.Tensor, mine: Candidates, kept: Int32, own: Int32, written: cutlass.Boolean):
    """Write [n] where `written`; own: the block of the token itself."""
    spec, lanes, width = mine.spec, mine.spec.lanes, cute.size(mList)
    forced = Int32(0)
    if const_expr(spec.force):
        forced = forced_blocks(own)
    places = [mine.member + lanes * i for i in range(-(-spec.n // lanes))]
    first = [mine.member + lanes * i for i in range(-(-3 // lanes) if spec.force else 0)]
    blocks = [unpack_block(mine.selected[cutlass.min(i, spec.n - 1)]) for i in places]
    blocks += [cutlass.select_(i > 0, own - (forced - 1 - i), Int32(0)) for i in first]
    before = [Int32(0) for _ in blocks]
    for i in cutlass.range(kept, unroll=4):
        block = unpack_block(mine.selected[i])
        for j in cutlass.range_constexpr(len(blocks)):
            before[j] += cutlass.select_(block < blocks[j], Int32(1), Int32(0))
    if written:
        for j in cutlass.range_constexpr(len(blocks)):
            if const_expr(j < len(places)):
                if places[j] < kept:
                    if const_expr(spec.force):
                        before[j] += 1 + cutlass.select_(blocks[j] > own, forced - 1, Int32(0))
                    mList[before[j]] = blocks[j]
            elif first[j - len(places)] < forced:
                mList[first[j - len(places)] + before[j]] = blocks[j]
        for i in cutlass.range(forced + kept + mine.member, width, lanes, unroll=1):
            mList[i] = Int32(-1)
