"""Masking the end of the keys wherever a block list puts it.

A list of key blocks may come in any order, so the block that the sequence ends in can be any entry,
not only the one a kernel visits first. Which one it is shows in the block's number alone: the test
is uniform over the CTA, and a block inside the sequence pays for nothing else.
"""

from dataclasses import dataclass
from functools import partial
from typing import Callable

import cutlass.cute as cute
from cutlass import Boolean, const_expr


@dataclass(frozen=True)
class TailMask:
    """A kernel's mask function, called as before, for blocks in any order.

    `mask_fn` is a partial of an AttentionMask's apply method, `mask` that AttentionMask. Where the
    kernel asks for no sequence mask, the block that the sequence ends in (or that lies behind it)
    gets one all the same.
    """

    mask_fn: partial
    mask: object

    def at_tail(self, n_block) -> Boolean:
        return (n_block + 1) * self.mask.tile_n > self.mask.seqlen_k

    def __call__(self, acc_S, n_block, mask_seqlen: bool, **options):
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
    if const_expr(not allow_unmasked or check_q_boundary is not False):
        consumer_phase, corr_phase, sequence_phase = softmax_step(
            consumer_phase,
            corr_phase,
            sequence_phase,
            n_block,
            mask_fn=partial(masked, mask_seqlen=False),
        )
    else:
        if mask_fn.at_tail(n_block):
            consumer_phase, corr_phase, sequence_phase = softmax_step(
                consumer_phase,
                corr_phase,
                sequence_phase,
                n_block,
                mask_fn=partial(masked, mask_seqlen=True),
            )
        else:
            consumer_phase, corr_phase, sequence_phase = softmax_step(
                consumer_phase, corr_phase, sequence_phase, n_block, mask_fn=None
            )
    return consumer_phase, corr_phase, sequence_phase
