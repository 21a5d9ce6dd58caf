"""A CTA's tokens: their sequence, candidate blocks and visible keys."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from nsa_layer.kernels.token_topk.spec import TokenTopKSpec


@dataclass(frozen=True)
class Place:
    """A CTA's tokens, ``first .. first + tokens - 1``, by their positions among the keys of their sequence.

    Past the end of a packed sequence there may be places without tokens.

    Attributes:
        batch: 0 if packed.
        end: one past the sequence's last query.
        T: tokens of the sequence's keys.
        rows_before: the row of q where position 0 would be, below 0 if it is none of the queries'.
        keys_before: compressed keys of packed sequences before; else 0.
    """

    spec: cutlass.Constexpr[TokenTopKSpec]
    batch: Int32
    head: Int32
    first: Int32
    end: Int32
    T: Int32
    rows_before: Int32
    keys_before: Int32

    def last_token(self) -> Int32:
        return cutlass.min(self.first + self.spec.tokens, self.end) - 1

    def keys(self) -> Int32:
        """Compressed keys of the sequence."""
        spec = self.spec
        return cutlass.max(self.T - spec.size + spec.stride, 0) // spec.stride

    def keys_end(self, t: Int32) -> Int32:
        """One past the last key that token t sees."""
        spec = self.spec
        if not spec.causal:
            return self.keys()
        return cutlass.min(cutlass.max(t - spec.offset + spec.stride, 0) // spec.stride, self.keys())

    def blocks_end(self, t: Int32) -> Int32:
        """One past token t's last candidate block, forced blocks among them or not."""
        spec = self.spec
        if not spec.causal:
            return self.T // spec.block_size
        return (t + 1) // spec.block_size

    def candidates_end(self, t: Int32) -> Int32:
        """The same for causal lists without the forced blocks at their end."""
        if self.spec.causal and self.spec.force:
            return cutlass.max(t // self.spec.block_size - 1, 0)
        return self.blocks_end(t)

    def steps(self) -> Int32:
        if self.spec.most_room == 0:
            return Int32(0)
        steps = cute.ceil_div(self.candidates_end(self.last_token()), self.spec.blocks_a_step)
        return cutlass.select_(self.first < self.end, steps, Int32(0))

    def first_key(self, step: Int32) -> Int32:
        """The step's first compressed key; below 0 where keys before the sequence would reach into block 0."""
        return step * (self.spec.blocks_a_step * self.spec.keys_a_block) - self.spec.halo

    def is_candidate(self, block: Int32, t: Int32) -> Boolean:
        spec, own = self.spec, t // self.spec.block_size
        found = block < self.candidates_end(t)
        if const_expr(spec.force):
            found = found & (block > 0)
        if const_expr(spec.force and not spec.causal):
            found = found & ((block < own - 1) | (block > own))
        return found

    def is_open(self, step: Int32) -> Boolean:
        """True if all blocks of the step are candidates of all tokens, and all keys visible."""
        spec = self.spec
        begin = step * spec.blocks_a_step
        end = begin + spec.blocks_a_step
        key = self.first_key(step)
        found = (key >= 0) & (key + keys_of_step(spec) <= self.keys_end(self.first))
        found = found & (end <= self.candidates_end(self.first))
        if const_expr(spec.force):
            found = found & (begin > 0)
        if const_expr(spec.force and not spec.causal):
            low, high = self.first // spec.block_size - 1, self.last_token() // spec.block_size
            found = found & ((end <= low) | (begin > high))
        return found


def keys_of_step(spec: TokenTopKSpec) -> int:
    """Keys that a step's blocks are made of."""
    return spec.halo + spec.blocks_a_step * spec.keys_a_block
