"""Masks of scores in forward over block lists, and in the dq pass: at edges only.

`KeyMask` (SM90's steps of two blocks, the dq pass): the 64 queries of a warpgroup against a key block, in wgmma's
registers: a thread holds two rows, 8 apart, and of every 8 columns two neighbouring ones. The end of the keys, the
causal edge and a window leave a range of keys to each row, so a row of registers is masked with the bits of one word.
`sees_all` is the same for all threads of a warpgroup: a block without an edge costs a comparison or two.

`TailMask` (every other forward, SM100's too): the block that the sequence ends in can be any entry of a list. Its
number tells, uniformly over the CTA, and other blocks pay for nothing else.

A branch around a step's mask stands between the products in flight and the softmax, and costs 6 to 10 % of the time. So
`loop_over_list` branches where nothing is in flight: around the loop, where only the end of the keys could hide some of
them (none, if all sequences have one length that ends with a block), or around a step (`OpenStep`), with causal or a
window.
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
    """The edges of a warpgroup's rows; `first` is the first of them in the sequence.

    left, right: how many keys before and after its own one a query sees; None for all. Causal is right = 0.
    packed: how many query heads' rows alternate, a token's one after the other; `head` is then their key/value head.
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
        """A query's own key is the query plus this: the last query's is the last key, unless positions are given."""
        return self.seqlen.seqlen_k - self.seqlen.seqlen_q + self.seqlen.shift

    def row(self, r: int) -> Int32:
        """The query of the thread's r-th row, in the sequence."""
        return self._query(self.place(r))

    def place(self, r: int) -> Int32:
        """The thread's r-th row among those of the sequence: of packed heads, a token's one after the other."""
        return self.first + self.thread // 32 * 16 + self.thread % 32 // 4 + 8 * r

    def _query(self, place: Int32) -> Int32:
        return place if self.packed == 1 else place // self.packed

    def query_head(self, r: int) -> Int32:
        """The query head of the thread's r-th row."""
        return self.head if self.packed == 1 else self.head * self.packed + self.place(r) % self.packed

    def column(self, c: int) -> Int32:
        """The column of the thread's c-th register of a row, counted from the block's first key."""
        return self.thread % 4 * 2 + (c // 2 * 8 + c % 2)

    @cute.jit
    def sees_all(self, key: Int32, width: cutlass.Constexpr[int]) -> Boolean:
        """True if no edge hides one of the keys from one of the rows."""
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
        """Set to -inf what a block's keys may not give.

        scores: [2 rows, registers of a row]. key: the block's first. asked: whether the mask_mod counts here. at: the
        block's first column among the scores'. width: keys of the block.
        """
        if const_expr(self.mask_mod is not None):
            if asked and key < self.seqlen.seqlen_k:
                self._ask(scores, key, at // 4, width // 4)
        if not self.sees_all(key, width):
            self._hide_past_edges(scores, key, at // 4, width)

    def hidden(self, words: tuple[Int32, ...], r: int) -> Float32:
        """Infinite if the token of the thread's r-th row does not list a block, given by its words; else 0."""
        return Float32(cutlass.select_(self.lists(words, r), Float32(0.0), Float32.inf))

    def _token(self, query: Int32) -> Int32:
        """The query's place among the tokens that have rows in the tile."""
        return query - self._query(self.first // BIT_ROWS * BIT_ROWS)

    def parts(self, words: tuple[Int32, ...]) -> list[tuple[Int32, ...]]:
        """The words of a block as those of its parts, one or more, that tokens list one by one."""
        of_part = words_for(self.packed)
        return [words[i : i + of_part] for i in range(0, len(words), of_part)]

    def lists(self, words: tuple[Int32, ...], r: int) -> Boolean:
        """True if the token of the thread's r-th row lists the block, or a part of it."""
        return self.has_bit(tuple(reduce(or_, of) for of in zip(*self.parts(words))), r)

    def has_bit(self, words: tuple[Int32, ...], r: int) -> Boolean:
        """True if the token of the thread's r-th row lists a part of a block, given by its words."""
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
        """Set to -inf the parts of a block, of several, that a row's token does not list; the rest as for `hide`."""
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
        # Rows and keys past the ends are hidden anyway; tensors that a mask_mod reads may end there.
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
    """The first of a row's registers whose column, counted from the thread's first, is not below `column`."""
    return sm90_col_to_r2p_idx(cutlass.max(cutlass.min(column, width), 0))


@dataclass(frozen=True)
class TailMask:
    """A kernel's mask function, called as before, for blocks in any order.

    hides_end: whether the end of the keys is hidden in every block, or in none. None: in the block that the sequence
    ends in (or that lies behind it), whatever the kernel asks for.
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
    """One SM100 softmax step for a block of which nothing is known but its number.

    An unmasked step is another instruction stream (the hardware reduces the row maximum while
    loading), so here the whole step is branched over, not only the mask.
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
    """A kernel's step over one block of a list, called as before.

    step: the kernel's own, with ``mask_fn=None``.
    edges: of the warpgroup's rows.
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
        if asked["mask_seqlen"]:  # one block of a list: not worth a second copy of the step
            return step(state, mask_fn=masked)
        unmasked = None
        if asked.get("mask_mod") is not None:
            unmasked = partial(apply_mask, **{**asked, "mask_causal": False, "mask_local": False})
        inside = self.edges.sees_all(n_block * self.width, self.width)
        return _step(inside, step, state, unmasked, masked)


def loop_over_list(loop: Callable, step: Callable, state: Any, tail: TailMask, edges: Optional[KeyMask]) -> Any:
    """A kernel's loop over the blocks of a row, 128 keys at a step.

    loop: of the kernel, with ``mma_one_n_block=``, ``kv_consumer_state=`` and ``mask_fn=``. step: of the kernel, over
    one block. edges: of the warpgroup's rows; None for edges that a `KeyMask` does not know.

    Returns:
        the next state, and whether there was a block.
    """
    if edges is not None and (edges.left is not None or edges.right is not None):
        step = OpenStep(step, edges, tail.mask.tile_n)
    elif edges is not None and not (edges.seqlen.has_cu_seqlens_k or edges.seqlen.has_seqused_k):
        # All sequences are of one length: no list has blocks past this one's end that are for others.
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
