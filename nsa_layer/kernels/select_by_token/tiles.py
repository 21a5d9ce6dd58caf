"""Tiles of tokens: their sequence, candidate blocks and visible keys."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from flash_attn.cute.lists.rows import sequence_at
from nsa_layer.kernels.select_by_token.spec import TokenTopKSpec
from nsa_layer.kernels.varlen import tiles_and_batch


@dataclass(frozen=True)
class Tile:
    """A tile's tokens, ``first .. first + tokens - 1``, by their positions among the keys of their sequence.

    Past the end of a packed sequence there may be rows without tokens.

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
        if spec.own_is_candidate:
            return t // spec.block_size + 1
        return (t + 1) // spec.block_size

    def forced_blocks(self, own: Int32) -> Int32:
        """Forced blocks of a token in block `own`, as far as they exist and differ, whether listed or not."""
        spec, begun = self.spec, own
        if not spec.causal and spec.init > 1:  # there may be first blocks behind
            begun = cutlass.max(own, cutlass.min(cute.ceil_div(self.T, spec.block_size), spec.init) - 1)
        return cutlass.min(begun, spec.forced - 1) + 1

    def candidates_end(self, t: Int32) -> Int32:
        """The same for causal lists without the forced blocks at their end."""
        if self.spec.causal and self.spec.local:
            return cutlass.max(t // self.spec.block_size - (self.spec.local - 1), 0)
        return self.blocks_end(t)

    def steps(self) -> Int32:
        if self.spec.most_wanted == 0:
            return Int32(0)
        steps = cute.ceil_div(self.candidates_end(self.last_token()), self.spec.blocks_a_step)
        return cutlass.select_(self.first < self.end, steps, Int32(0))

    def first_key(self, step: Int32) -> Int32:
        """The step's first compressed key; below 0 where keys before the sequence would reach into block 0."""
        return step * (self.spec.blocks_a_step * self.spec.keys_a_block) - self.spec.halo

    def is_candidate(self, block: Int32, t: Int32) -> Boolean:
        spec, own = self.spec, t // self.spec.block_size
        inside = block < self.candidates_end(t)
        if const_expr(spec.init):
            inside = inside & (block > spec.init - 1)
        if const_expr(spec.local and not spec.causal):
            inside = inside & ((block < own - (spec.local - 1)) | (block > own))
        return inside

    def is_open(self, step: Int32) -> Boolean:
        """True if all blocks of the step are candidates of all tokens, and all keys visible."""
        spec = self.spec
        begin = step * spec.blocks_a_step
        end = begin + spec.blocks_a_step
        key = self.first_key(step)
        inside = (key >= 0) & (key + keys_of_step(spec) <= self.keys_end(self.first))
        inside = inside & (end <= self.candidates_end(self.first))
        if const_expr(spec.init):
            inside = inside & (begin > spec.init - 1)
        if const_expr(spec.local and not spec.causal):
            low = self.first // spec.block_size - (spec.local - 1)
            high = self.last_token() // spec.block_size
            inside = inside & ((end <= low) | (begin > high))
        return inside


@dataclass(frozen=True)
class Tiles:
    """All tiles of a call: a sequence's last tokens first, since they have most keys; key/value heads side by side.

    Attributes:
        mQ, mIndices: [B, T, Hq, D] and int32 [B, T, Hkv, n]; packed without B.
        starts: of packed queries, their compressed keys, and the tokens these are made of; positions of first queries.
        S: tokens of a sequence's keys, where they are more than the queries.
    """

    spec: cutlass.Constexpr[TokenTopKSpec]
    mQ: cute.Tensor
    mIndices: cute.Tensor
    starts: tuple[cute.Tensor | None, ...]
    S: Int32

    def groups(self) -> Int32:
        """Tiles of one head."""
        tiles, batches = tiles_and_batch(self.mQ, self.starts[0], self.spec.tokens)
        return Int32(tiles * batches)

    def heads(self) -> Int32:
        return self.mIndices.shape[cute.rank(self.mIndices) - 2]

    def tiles(self) -> Int32:
        return self.groups() * self.heads()

    @cute.jit
    def of(self, tile: Int32) -> Tile:
        spec, S, (mCu, mCu_blocks, mCu_keys, mOffset) = self.spec, self.S, self.starts
        Hkv = self.heads()
        head, number = tile % Hkv, self.groups() - 1 - tile // Hkv
        batch, rows_before, keys_before = Int32(0), Int32(0), Int32(0)
        if const_expr(spec.packed):
            sequence = sequence_at(mCu, number, spec.tokens)
            rows_before, keys_before = mCu[sequence], mCu_blocks[sequence]
            first = (number - rows_before // spec.tokens - sequence) * spec.tokens
            end = mCu[sequence + 1] - rows_before
            S = end if const_expr(mCu_keys is None) else mCu_keys[sequence + 1] - mCu_keys[sequence]
        else:
            batches = Int32(self.mQ.shape[0])
            sequence = batch = number % batches
            first, end = number // batches * spec.tokens, Int32(self.mQ.shape[1])
        if const_expr(mOffset is None):
            S = end
        else:
            offset = mOffset[sequence]
            first, end, rows_before = first + offset, end + offset, rows_before - offset
        return Tile(spec, batch, head, first, end, S, rows_before, keys_before)


def keys_of_step(spec: TokenTopKSpec) -> int:
    """Keys that a step's blocks are made of."""
    return spec.halo + spec.blocks_a_step * spec.keys_a_block
