"""The mask_mod of drawn masks: whatever a table says, so that one compiled kernel serves them all."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from flash_attn.cute import utils


@cute.jit
def looked_up(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
    """Query q of a sequence sees key kv iff ``aux_tensors[0][batch, q, kv]`` is not 0."""
    value = aux_tensors[0][utils.ssa_to_scalar(batch), utils.ssa_to_scalar(q_idx), utils.ssa_to_scalar(kv_idx)]
    return utils.scalar_to_ssa(value, cutlass.Int32) != 0
