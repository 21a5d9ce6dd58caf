"""Importances of a step's blocks, for the token whose candidates a lane keeps."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from nsa_layer.kernels.select_by_tile.split_fp16 import bits_of
from nsa_layer.kernels.select_by_token import candidates
from nsa_layer.kernels.select_by_token.candidates import Candidates
from nsa_layer.kernels.select_by_token.spec import CHUNK, FOUR, TokenTopKSpec
from nsa_layer.kernels.select_by_token.tiles import Tile


@dataclass(frozen=True)
class StepValues:
    """The blocks of a step that one lane scores.

    Attributes:
        scores: fp32 [KEYS] in shared memory: sums over the group of the token's probabilities, at each key's
            `spec.position`.
        t: the token.
        member: index of the lane among those that share the token.
    """

    spec: cutlass.Constexpr[TokenTopKSpec]
    scores: cute.Tensor
    work_tile: Tile
    t: Int32
    member: Int32

    def block(self, i: Int32) -> Int32:
        """The lane's i-th block, from the step's first on; neighbours, with similar scores, go to different lanes."""
        return i * self.spec.lanes + self.member

    def value(self, step: Int32, i: int, masked: bool) -> Float32:
        """Importance of the lane's i-th block; if masked, keys that the token does not see count as 0."""
        spec, work_tile = self.spec, self.work_tile
        block = self.block(Int32(i))
        total = Float32(0.0)
        for at, weight in enumerate(spec.weights):
            key = block * spec.keys_a_block + at
            if spec.blocks_a_step % spec.lanes:
                key = cutlass.min(key, cute.size(self.scores) - 1)  # past the step's last block
            if spec.in_fours:
                score = self.scores[FOUR * (i // FOUR * spec.lanes + self.member) + i % FOUR]
            else:
                score = self.scores[key]
            if masked:
                key = work_tile.first_key(step) + key
                score = cutlass.select_((key >= 0) & (key < work_tile.keys_end(self.t)), score, Float32(0.0))
            total = cute.math.fma(score, Float32(weight), total)
        return total if len(spec.weights) > 1 else score

    @cute.jit
    def all_bits(self, step: Int32) -> cute.Tensor:
        """Bits of all importances; -1 for blocks that are no candidates."""
        spec, work_tile = self.spec, self.work_tile
        values = cute.make_rmem_tensor((spec.values,), Float32)
        if const_expr(spec.in_fours):
            for i in cutlass.range_constexpr(spec.values // FOUR):
                source = cute.local_tile(self.scores, (FOUR,), (i * spec.lanes + self.member,))
                cute.autovec_copy(source, cute.local_tile(values, (FOUR,), (i,)))
        else:
            for i in cutlass.range_constexpr(spec.values):
                values[i] = self.value(step, i, False)
        bits = cute.make_rmem_tensor((spec.values,), Int32)
        for i in cutlass.range_constexpr(spec.values):
            bits[i] = bits_of(values[i])
        if not work_tile.is_open(step):
            for i in cutlass.range_constexpr(spec.values):
                there = work_tile.is_candidate(step * spec.blocks_a_step + self.block(Int32(i)), self.t)
                bits[i] = cutlass.select_(there, bits_of(self.value(step, i, True)), Int32(-1))
        if const_expr(spec.blocks_a_step % spec.lanes):
            last = spec.values - 1
            bits[last] = cutlass.select_(self.block(Int32(last)) < spec.blocks_a_step, bits[last], Int32(-1))
        return bits

    @cute.jit
    def add_to(self, mine: Candidates, step: Int32, bits: cute.Tensor):
        """Add the step's blocks, scored by `all_bits`, to the lane's candidates; called by all lanes of a warp."""
        first = step * self.spec.blocks_a_step
        for begin in cutlass.range_constexpr(0, self.spec.values, CHUNK):
            size = min(CHUNK, self.spec.values - begin)
            chunk = cute.make_rmem_tensor((size,), Int32)
            for i in cutlass.range_constexpr(size):
                chunk[i] = bits[begin + i]
            candidates.add(mine, chunk, [first + self.block(Int32(begin + i)) for i in range(size)])
