"""Where SM90 forward over block lists does without a mask: for a whole walk, or for a step.

Which blocks an edge runs through shows at run time alone. A branch inside a step, around its mask, stands between the
products in flight and the softmax, and costs as much as masking every block: 6 to 10 % of the time, whether it is ever
taken. So the code is there twice, and the branch is where nothing is in flight:

- around the walk, where only the end of the keys could hide some of them (and a mask_mod): if all sequences are of one
  length, and it ends with a block, none is hidden;
- around a step, where every block may have an edge: with causal, or a window.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Optional

import cutlass.cute as cute
from cutlass import Boolean, Int32

from flash_attn.cute.key_mask import KeyMask
from flash_attn.cute.tail_mask import TailMask


@dataclass(frozen=True)
class EndMask:
    """Called as a `TailMask`: hides the end of the keys in every block, or nowhere, and what a mask_mod hides."""

    mask_fn: partial
    hides_end: bool

    def __call__(self, acc_S: cute.Tensor, n_block: Int32, mask_seqlen: bool, **options: Any) -> None:
        if self.hides_end or options.get("mask_mod") is not None:
            self.mask_fn(acc_S, n_block=n_block, mask_seqlen=self.hides_end, **options)


@dataclass(frozen=True)
class OpenStep:
    """A kernel's step over one block of a list, called as before.

    step: the kernel's own; takes ``mask_fn=None``.
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


def walk_list(walk: Callable, step: Callable, state: Any, tail: TailMask, edges: Optional[KeyMask]) -> Any:
    """A kernel's walk over the blocks of a row, 128 keys at a step.

    Args:
        walk: of the kernel: takes ``mma_one_n_block=``, ``kv_consumer_state=`` and ``mask_fn=``.
        step: of the kernel, over one block.
        edges: of the warpgroup's rows; None for edges that a `KeyMask` does not know.

    Returns:
        the next state, and whether there was a block.
    """
    if edges is None:
        return _walk(partial(walk, mma_one_n_block=step), state, tail)
    if edges.left is not None or edges.right is not None:
        return _walk(partial(walk, mma_one_n_block=OpenStep(step, edges, tail.mask.tile_n)), state, tail)
    seqlen, walk = edges.seqlen, partial(walk, mma_one_n_block=step)
    if seqlen.has_cu_seqlens_k or seqlen.has_seqused_k:
        return _walk(walk, state, tail)  # blocks past the end may be listed, for other sequences
    whole = seqlen.seqlen_k % tail.mask.tile_n == 0
    return _walk_of_two(whole, walk, state, *(EndMask(tail.mask_fn, hides_end) for hides_end in (False, True)))


@cute.jit
def _walk(walk: Callable, state: Any, mask: Callable):
    state, _, found = walk(kv_consumer_state=state, mask_fn=mask)
    return state, found


@cute.jit
def _walk_of_two(whole: Boolean, walk: Callable, state: Any, open_mask: EndMask, mask: EndMask):
    found = Boolean(False)
    if whole:
        state, _, found = walk(kv_consumer_state=state, mask_fn=open_mask)
    else:
        state, _, found = walk(kv_consumer_state=state, mask_fn=mask)
    return state, found


@cute.jit
def _step(inside: Boolean, step: Callable, state: Any, open_mask: Optional[Callable], mask: Callable):
    if inside:
        state = step(state, mask_fn=open_mask)
    else:
        state = step(state, mask_fn=mask)
    return state
