"""mask_mods and a score_mod for attention calls, each with the same rule on index tensors for the reference."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from flash_attn.cute import utils


@cute.jit
def thirds(batch, head, q, kv, seqlen_info, aux_tensors):
    return (q + kv) % 3 != 0


@cute.jit
def keyed(batch, head, q, kv, seqlen_info, aux_tensors):
    return utils.scalar_to_ssa(aux_tensors[0][kv[0]], cutlass.Int32) != 0


@cute.jit
def halves(batch, head, q, kv, seqlen_info, aux_tensors):
    return kv * 2 + 1 <= q


@cute.jit
def table(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
    """Whatever a table [B, queries, keys] says, so that one compiled kernel serves all drawn masks."""
    value = aux_tensors[0][utils.ssa_to_scalar(batch), utils.ssa_to_scalar(q_idx), utils.ssa_to_scalar(kv_idx)]
    return utils.scalar_to_ssa(value, cutlass.Int32) != 0


@cute.jit
def double(score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
    return score + score


@cute.jit
def double_bwd(grad, score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
    return grad + grad


MASK_MODS = {
    "thirds": (thirds, lambda b, q, kv, aux: (q + kv) % 3 != 0),
    "halves": (halves, lambda b, q, kv, aux: kv * 2 + 1 <= q),
    "keyed": (keyed, lambda b, q, kv, aux: aux[0].to(q.device)[kv].ne(0).expand(len(q), -1)),
    "table": (table, lambda b, q, kv, aux: aux[0][b, : len(q), : kv.shape[1]].bool().to(q.device)),
}
