"""Masks of scores in forward over block lists and in the dq pass, applied at edges only.

`KeyMask` (SM90's steps of two blocks, the dq pass): the 64 rows of a warpgroup against a key block, in wgmma's
registers: a thread holds two rows, 8 apart, and of every 8 columns two neighbouring ones. The end of the keys, the
causal edge and a window leave each row a range of keys, so its registers are masked by the bits of one word.
`sees_all` is uniform over a warpgroup: a block without an edge costs a comparison or two.

`TailMask` (every other forward, SM100's too): the block in which the sequence ends can be any entry of a list; its
index is compared, uniformly over the CTA.

A branch around a step's mask is between the products in flight and the softmax, and costs 6 to 10 % of the time. So
`loop_over_list` branches where nothing is in flight: around the loop, if only the end of the keys is masked (never, if
all sequences have one length that is a multiple of the block), or around a step (`OpenStep`), with causal or a window.
"""

from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import or_
from typing import Any, Callable, Optional

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, const_expr

from flash_attn.cute import utils
from flash_attn.cute.lists.query_bits import words_for
from flash_attn.cute.lists.tiling import BIT_ROWS, ROWS
from flash_attn.cute.mask import call_mask_mod, r2p_bitmask_above, r2p_bitmask_below, sm90_col_to_r2p_idx
from flash_attn.cute.seqlen_info import SeqlenInfoQK
from flash_attn.cute.utils import AuxData

ROWS_OF_THREAD = 2


@dataclass(frozen=True)
class KeyMask:
    """The masks of a warpgroup's 64 rows, of which `first` is the first, counted in the sequence.

    left, right: keys that a query sees before and after its own position; None for all. Causal is right = 0.
    packed: query heads packed into the rows, a token's one after the other; `head` is then their key/value head.
    """

    seqlen: SeqlenInfoQK
    batch: Int32
    head: Int32
    first: Int32
    thread: Int32  # of the warpgroup
    left: Optional[Int32]
    right: Optional[Int32]
    mask_mod: cutlass.Constexpr[Optional[Callable]]
    aux_data: AuxData
    packed: int = 1

    @property
    def shift(self) -> Int32:
        """Position of query 0 among the keys; by default such that the last query is at the last key."""
        return self.seqlen.seqlen_k - self.seqlen.seqlen_q + self.seqlen.shift

    def row(self, r: int) -> Int32:
        """The query of the thread's r-th row, counted in the sequence."""
        return self._query(self.packed_row(r))

    def packed_row(self, r: int) -> Int32:
        """The thread's r-th row, counted in the sequence over queries and packed heads: query * packed + head."""
        return self.first + self.thread // 32 * 16 + self.thread % 32 // 4 + 8 * r

    def _query(self, packed_row: Int32) -> Int32:
        return packed_row if self.packed == 1 else packed_row // self.packed

    def query_head(self, r: int) -> Int32:
        """The query head of the thread's r-th row."""
        return self.head if self.packed == 1 else self.head * self.packed + self.packed_row(r) % self.packed

    def column(self, c: int) -> Int32:
        """The column of the thread's c-th register of a row, counted from the block's first key."""
        return self.thread % 4 * 2 + (c // 2 * 8 + c % 2)

    @cute.jit
    def sees_all(self, key: Int32, width: cutlass.Constexpr[int]) -> Boolean:
        """True if every row of the warpgroup sees all keys of the block at `key`, mask_mod apart."""
        end = key + width
        seen = end <= self.seqlen.seqlen_k
        if const_expr(self.right is not None):
            seen = seen and end - 1 <= self._query(self.first) + self.shift + self.right
        if const_expr(self.left is not None):
            last = cutlass.min(self._query(self.first + (ROWS - 1)) + 1, self.seqlen.seqlen_q) - 1
            seen = seen and key >= last + self.shift - self.left
        return seen

    @cute.jit
    def hide(
        self, scores: cute.Tensor, key: Int32, asked: Boolean, at: cutlass.Constexpr[int], width: cutlass.Constexpr[int]
    ) -> None:
        """Set the masked scores of a key block to -inf.

        scores: [2 rows, registers of a row]. key: the block's first. asked: whether the mask_mod applies. at: the
        block's first column in the scores. width: keys of the block.
        """
        if const_expr(self.mask_mod is not None):
            if asked and key < self.seqlen.seqlen_k:
                self._ask(scores, key, at // 4, width // 4)
        if not self.sees_all(key, width):
            self._hide_past_edges(scores, key, at // 4, width)

    def hidden(self, words: tuple[Int32, ...], r: int) -> Float32:
        """+inf if the token of the thread's r-th row does not list the block with bits `words`, else 0."""
        return Float32(cutlass.select_(self.lists(words, r), Float32(0.0), Float32.inf))

    def _token(self, query: Int32) -> Int32:
        """The query's index among the tokens with rows in the tile, which is that of its bit."""
        return query - self._query(self.first // BIT_ROWS * BIT_ROWS)

    def parts(self, words: tuple[Int32, ...]) -> list[tuple[Int32, ...]]:
        """Split the words of a block into those of its parts, which have bits of their own: 1, 2 or 4."""
        of_part = words_for(self.packed)
        return [words[i : i + of_part] for i in range(0, len(words), of_part)]

    def lists(self, words: tuple[Int32, ...], r: int) -> Boolean:
        """True if the token of the thread's r-th row lists the block, or a part of it."""
        return self.has_bit(tuple(reduce(or_, of) for of in zip(*self.parts(words))), r)

    def has_bit(self, words: tuple[Int32, ...], r: int) -> Boolean:
        """True if the token of the thread's r-th row lists the part of a block with bits `words`."""
        token = self._token(self.row(r))
        word = words[0]
        for i in range(1, len(words)):
            word = Int32(cutlass.select_(token >= 32 * i, words[i], word))
        return (word >> (token & 31)) & 1 == 1

    def any_lists(self, words: tuple[Int32, ...]) -> Boolean:
        """True if a token with rows in the warpgroup lists the block, or a part of it."""
        first, last = (self._token(self._query(self.first + row)) for row in (0, ROWS - 1))
        found = Uint32(0)
        for part in self.parts(words):
            for i, word in enumerate(part):
                found = found | Uint32(word) & r2p_bitmask_above(first, i) & r2p_bitmask_below(last + 1, i)
        return found != 0

    @cute.jit
    def hide_parts(
        self, scores: cute.Tensor, words: tuple[Int32, ...], at: cutlass.Constexpr[int], width: cutlass.Constexpr[int]
    ) -> None:
        """Set to -inf the scores of parts of a block that a row's token does not list; arguments as for `hide`."""
        parts = self.parts(words)
        if const_expr(len(parts) > 1):
            count = width // 4 // len(parts)  # registers of a part
            for r in cutlass.range_constexpr(ROWS_OF_THREAD):
                for i in cutlass.range_constexpr(len(parts)):
                    listed = self.has_bit(parts[i], r)
                    for c in cutlass.range_constexpr(at // 4 + i * count, at // 4 + (i + 1) * count):
                        scores[r, c] = scores[r, c] if listed else -Float32.inf

    @cute.jit
    def _hide_past_edges(
        self, scores: cute.Tensor, key: Int32, begin: cutlass.Constexpr[int], width: cutlass.Constexpr[int]
    ) -> None:
        offset = key + self.thread % 4 * 2  # the key of the thread's first column
        for r in cutlass.range_constexpr(ROWS_OF_THREAD):
            own = self.row(r) + self.shift
            end = self.seqlen.seqlen_k
            if const_expr(self.right is not None):
                end = cutlass.min(end, own + self.right + 1)
            keep = r2p_bitmask_below(_register(end - offset, width), 0)
            if const_expr(self.left is not None):
                keep = keep & r2p_bitmask_above(_register(own - self.left - offset, width), 0)
            for c in cutlass.range_constexpr(width // 4):
                kept = Boolean(keep & (Uint32(1) << c))
                scores[r, begin + c] = scores[r, begin + c] if kept else -Float32.inf

    @cute.jit
    def _ask(
        self, scores: cute.Tensor, key: Int32, begin: cutlass.Constexpr[int], count: cutlass.Constexpr[int]
    ) -> None:
        # Clamp indices past the ends: those scores are masked anyway, and a mask_mod's tensors may end there.
        batch = utils.scalar_to_ssa(self.batch, Int32)
        for r in cutlass.range_constexpr(ROWS_OF_THREAD):
            head = utils.scalar_to_ssa(self.query_head(r), Int32)
            row = utils.scalar_to_ssa(cutlass.min(self.row(r), self.seqlen.seqlen_q - 1), Int32)
            for c in cutlass.range_constexpr(count):
                column = cutlass.min(key + self.column(c), self.seqlen.seqlen_k - 1)
                seen = call_mask_mod(
                    self.mask_mod, batch, head, row, utils.scalar_to_ssa(column, Int32), self.seqlen, self.aux_data
                )
                kept = Boolean(utils.ssa_to_scalar(seen))
                scores[r, begin + c] = scores[r, begin + c] if kept else -Float32.inf


@cute.jit
def _register(column: Int32, width: cutlass.Constexpr[int]) -> Int32:
    """Index of a row's first register whose column, relative to the thread's first, is at least `column`."""
    return sm90_col_to_r2p_idx(cutlass.max(cutlass.min(column, width), 0))


@dataclass(frozen=True)
class TailMask:
    """Wraps a kernel's mask function for blocks in any order: masks the end of the keys where a block reaches past it.

    hides_end: mask the end of the keys in every block (True), in none (False), or by block index (None), whatever
    `mask_seqlen` says.
    """

    mask_fn: partial  # a partial of an AttentionMask's apply method
    mask: object  # that AttentionMask
    hides_end: Optional[bool] = None

    def at_tail(self, n_block) -> Boolean:
        return (n_block + 1) * self.mask.tile_n > self.mask.seqlen_k

    def __call__(self, acc_S, n_block, mask_seqlen: bool, **options):
        if self.hides_end is not None:
            if self.hides_end or options.get("mask_mod") is not None:
                self.mask_fn(acc_S, n_block=n_block, mask_seqlen=self.hides_end, **options)
            return
        given = {**self.mask_fn.keywords, **options}
        # Causal and local masks compare with a limit anyway: taking the sequence's end into it is
        # cheaper than a branch. A mask_mod pays for every element, so it gets the branch.
        folded = given.get("mask_mod") is None and (given["mask_causal"] or given["mask_local"])
        if mask_seqlen or folded:
            self.mask_fn(acc_S, n_block=n_block, mask_seqlen=True, **options)
        else:
            _mask_one_block(acc_S, n_block, self.at_tail(n_block), partial(self.mask_fn, **options))


@cute.jit
def _mask_one_block(acc_S, n_block, at_tail: Boolean, mask_fn: Callable):
    if at_tail:
        mask_fn(acc_S, n_block=n_block, mask_seqlen=True)
    else:
        mask_fn(acc_S, n_block=n_block, mask_seqlen=False)


@cute.jit
def softmax_step_in_any_order(
    softmax_step: Callable,
    consumer_phase,
    corr_phase,
    sequence_phase,
    n_block,
    mask_fn: TailMask,
    check_q_boundary,
    allow_unmasked,
):
    """One SM100 softmax step for a block that may be the one in which the sequence ends.

    An unmasked step has other instructions (the hardware reduces the row maximum while loading), so the branch is
    around the whole step, not only around the mask.
    """
    masked = partial(mask_fn, check_q_boundary=check_q_boundary)
    phases = (consumer_phase, corr_phase, sequence_phase)
    if const_expr(not allow_unmasked or check_q_boundary is not False):
        phases = softmax_step(*phases, n_block, mask_fn=partial(masked, mask_seqlen=False))
    else:
        if mask_fn.at_tail(n_block):
            phases = softmax_step(*phases, n_block, mask_fn=partial(masked, mask_seqlen=True))
        else:
            phases = softmax_step(*phases, n_block, mask_fn=None)
    return phases


@dataclass(frozen=True)
class OpenStep:
    """Wraps a kernel's step over a block: one branch to an unmasked copy where no edge hides a key.

    step: the kernel's own, with ``mask_fn=None``.
    edges: the `KeyMask` of the warpgroup's rows.
    width: keys of a block.
    """

    step: Callable
    edges: KeyMask
    width: int

    def __call__(self, state: Any, *, n_block: Int32, mask_fn: partial, **given: Any) -> Any:
        """mask_fn: a partial of a `TailMask`, with a `mask_mod` or without."""
        apply_mask, asked = mask_fn.func.mask_fn, mask_fn.keywords
        step = partial(self.step, n_block=n_block, **given)
        masked = partial(apply_mask, **{**asked, "mask_seqlen": True})
        if asked["mask_seqlen"]:  # at most one block of a list: not worth a second copy of the step
            return step(state, mask_fn=masked)
        unmasked = None
        if asked.get("mask_mod") is not None:
            unmasked = partial(apply_mask, **{**asked, "mask_causal": False, "mask_local": False})
        inside = self.edges.sees_all(n_block * self.width, self.width)
        return _step(inside, step, state, unmasked, masked)


def loop_over_list(loop: Callable, step: Callable, state: Any, tail: TailMask, edges: Optional[KeyMask]) -> Any:
    """Run a kernel's loop over the blocks of a list, 128 keys per step, with masks at edges only.

    loop: the kernel's, with ``mma_one_n_block=``, ``kv_consumer_state=`` and ``mask_fn=``. step: the kernel's, over one
    block. edges: the `KeyMask` of the warpgroup's rows; None if it does not cover the call's masks.

    Returns:
        the next state, and whether there was a block.
    """
    if edges is not None and (edges.left is not None or edges.right is not None):
        step = OpenStep(step, edges, tail.mask.tile_n)
    elif edges is not None and not (edges.seqlen.has_cu_seqlens_k or edges.seqlen.has_seqused_k):
        # All sequences have one length, so no list has blocks past its end.
        whole, loop = edges.seqlen.seqlen_k % tail.mask.tile_n == 0, partial(loop, mma_one_n_block=step)
        return _one_of_two_loops(whole, loop, state, replace(tail, hides_end=False), replace(tail, hides_end=True))
    state, _, found = loop(mma_one_n_block=step, kv_consumer_state=state, mask_fn=tail)
    return state, found


@cute.jit
def _one_of_two_loops(whole: Boolean, loop: Callable, state: Any, open_mask: TailMask, mask: TailMask):
    found = Boolean(False)
    if whole:
        state, _, found = loop(kv_consumer_state=state, mask_fn=open_mask)
    else:
        state, _, found = loop(kv_consumer_state=state, mask_fn=mask)
    return state, found


@cute.jit
def _step(inside: Boolean, step: Callable, state: Any, open_mask: Optional[Callable], mask: Callable):
    if inside:
        state = step(state, mask_fn=open_mask)
    else:
        state = step(state, mask_fn=mask)
    return state
