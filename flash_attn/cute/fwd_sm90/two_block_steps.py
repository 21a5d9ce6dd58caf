"""SM90 forward over block lists in steps of 128 keys: a block of 128, or two of 64 that need not be neighbours.

With a tile of 64 keys shared memory bounds the first product, and each step's rescaling amortises over half the
arithmetic. So each of two blocks is loaded into half of a tile, with the loop, loads and mask of the dq pass (`loads`,
`masks`). The load warp and the warpgroups run the same loop; the kernel provides the steps.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Callable

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.utils import LayoutEnum
from quack import layout_utils, sm90_utils

from flash_attn.cute.fwd_sm90.loads import KeyLoop, TmaTensor
from flash_attn.cute.fwd_sm90.masks import KeyMask
from flash_attn.cute.lists.tiling import box_columns


def tma_of(load: cpasync.CopyBulkTensorTileG2SOp, mX: cute.Tensor, block_k: int, head_dim: int) -> TmaTensor:
    """TMA atom for k or v, [S, D, Hkv, B] (packed [total, D, Hkv]): boxes of `block_k` keys by `box_columns`."""
    box = (block_k, box_columns(head_dim))
    layout = sm90_utils.make_smem_layout(mX.element_type, LayoutEnum.ROW_MAJOR, box, major_mode_size=head_dim)
    return cpasync.make_tiled_tma_atom(load, mX, layout, box)


@cute.jit
def load_steps(loop: KeyLoop, state: Any, load_k: Callable, load_v: Callable):
    """The load warp: all steps of a tile, v one step behind k, in the order of use. Returns the next state."""
    if loop.count > 0:
        entries = loop.entries(Int32(0))
        coming = loop.entries(Int32(1))
        load_k(entries, state)
        for step in cutlass.range(1, loop.steps, unroll=1):
            before, behind = entries, state.clone()
            entries = coming
            coming = loop.entries(step + 1)
            state.advance()
            load_k(entries, state)
            load_v(before, behind)
        load_v(entries, state)
        state.advance()
    return state


@dataclass(frozen=True)
class StepMask:
    """Mask function of a kernel for one step: hides keys that a warpgroup's rows do not see."""

    loop: KeyLoop
    mask: KeyMask
    entries: tuple[Int32, ...]
    step: Int32

    def __call__(self, acc_S: cute.Tensor, n_block: Int32, mask_seqlen: bool = True) -> None:
        scores, width = layout_utils.reshape_acc_to_mn(acc_S), self.loop.block_k
        for part, entry in enumerate(self.entries):
            key = self.loop.first_key(entry, self.step, part)
            self.mask.hide(scores, key, entry & 1 == 0, part * width, width)


@cute.jit
def compute_steps(
    loop: KeyLoop,
    mask: KeyMask,
    state: Any,
    first_step: Callable,
    one_step: Callable,
    last_product: Callable,
    add_product: Callable,
):
    """Run a warpgroup over all steps of a tile.

    first_step, one_step, last_product: the kernel's: scores of the first step; scores of a step and the product of the
    one before with v; product of the last one with v. add_product: the product with v, for `one_step`.

    Returns:
        the next state, and whether there was a step.
    """
    adds = Boolean(False)
    if loop.count > 0:
        step_mask = partial(StepMask, loop, mask)
        entries = loop.entries(Int32(0))
        coming = loop.entries(Int32(1))
        state = first_step(n_block=Int32(0), kv_consumer_state=state, mask_fn=step_mask(entries, Int32(0)))
        for step in cutlass.range(1, loop.steps, unroll=1):
            entries = coming
            coming = loop.entries(step + 1)
            state = one_step(
                state,
                n_block=step,
                mma_pv_fn=partial(add_product, zero_init=not adds),
                mask_fn=step_mask(entries, step),
            )
            adds = Boolean(True)
        state = last_product(kv_consumer_state=state, zero_init=not adds)
        adds = Boolean(True)
    return state, adds
