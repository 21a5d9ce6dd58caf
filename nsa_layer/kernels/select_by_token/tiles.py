"""Tiles of tokens: their sequence, candidate blocks and visible keys."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from flash_attn.cute.lists.rows import sequence_at
from nsa_layer.kernels.select_by_token.spec import TokenTopKSpec
from nsa_layer.kernels.varlen import compressed_end, compressed_length, tiles_and_batch


@dataclass(frozen=True)
class Tile:
    """A work tile: tokens ``first .. first + tokens - 1``, as positions among the keys of their sequence, of one head.

    Tokens from `end` on do not exist: if packed, a tile may have none.

    Attributes:
        batch: sequence of a batch; 0 if packed.
        end: one past the position of the sequence's last query.
        T: keys of the sequence, before compression.
        rows_before: row of q minus position, the same for all queries of the sequence; may be negative.
        keys_before: compressed keys of earlier packed sequences; else 0.
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
        return compressed_length(self.T, spec.size, spec.stride)

    def keys_end(self, t: Int32) -> Int32:
        """One past the last key that token t sees."""
        spec = self.spec
        if not spec.causal:
            return self.keys()
        return cutlass.min(compressed_end(t, spec.offset, spec.stride), self.keys())

    def blocks_end(self, t: Int32) -> Int32:
        """One past the last complete block, if causal at token t; past t's own block if `own_is_candidate`."""
        spec = self.spec
        if not spec.causal:
            return self.T // spec.block_size
        if spec.own_is_candidate:
            return t // spec.block_size + 1
        return (t + 1) // spec.block_size

    def forced_blocks(self, own: Int32) -> Int32:
        """Number of distinct forced blocks of a token in block `own`, which may exceed n."""
        spec, begun = self.spec, own
        if not spec.causal and spec.init > 1:  # the first blocks may lie behind the token
            begun = cutlass.max(own, cutlass.min(cute.ceil_div(self.T, spec.block_size), spec.init) - 1)
        return cutlass.min(begun, spec.forced - 1) + 1

    def candidates_end(self, t: Int32) -> Int32:
        """One past token t's last candidate block: `blocks_end`, if causal without the forced local blocks."""
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
        """True if all blocks of the step are candidates of all the tile's tokens, which see all its keys: no mask."""
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
    """All work tiles of a call, longest first: from a sequence's end; key/value heads are neighbours.

    Attributes:
        mQ, mIndices: [B, T, Hq, D] and int32 [B, T, Hkv, n]; packed without B.
        starts: starts of packed queries, compressed keys, and keys; positions of first queries.
        S: keys of a sequence, read where queries have offsets.
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
    """Compressed keys that overlap a step's blocks."""
    return spec.halo + spec.blocks_a_step * spec.keys_a_block
