"""The dq pass of block-sparse backward, on SM90 and partly SM100: query-stationary, without atomics, deterministic.

A CTA has 128 queries of one head, loops over the *forward* list of their block, and accumulates dq in registers,

    S = q k^T,   P = exp2(S * scale * log2(e) - lse_log2),   dP = do v^T,   dS = P * (dP - dpsum),   dq += dS k.

That is 3 of backward's 5 matmuls; dk and dv are left to another kernel. Steps have 128 keys, one block or two of 64.

Over lists with a bit for each token (`lists/query_bits`) a CTA has 128 rows, (token, head) pairs of one key/value head,
or of one query head with lists of its own; a row whose token does not list a block gets P = 0 there. SM100 runs these
lists too, by mma.sync (`mma.product`).

`dpsum`, `lse_log2` and the fp32 accumulator are those of `shared_backward`; dq lies in the accumulator in wgmma's
register layout. Of the calls that share an accumulator this one is the last, and rounds the sum.
"""

import math
from functools import partial
from typing import Callable, NamedTuple, Optional

import cutlass.cute as cute
import torch
from cutlass import Float32, Int32

from flash_attn.cute import utils
from flash_attn.cute.block_sparsity import (
    BlockSparseTensorsTorch,
    normalize_block_sparse_config,
    to_cute_block_sparse_tensors,
)
from flash_attn.cute.bwd_dq import spec as dq_spec
from flash_attn.cute.bwd_dq.spec import THREADS, TILE_M, DqSpec
from flash_attn.cute.cute_dsl_utils import get_aux_tensor_metadata, maybe_contiguous, to_cute_aux_tensor
from flash_attn.cute.fwd_sm90.persistence import has_short_rows
from flash_attn.cute.lists import formats, query_bits
from flash_attn.cute.lists.rows import ListHeads
from flash_attn.cute.lists.tiling import ROWS, STEP
from flash_attn.cute.mma.host import CompiledKernels, FakeCall, fake_indices, on_plain_tensors
from flash_attn.cute.runtime.call_options import edges
from flash_attn.cute.runtime.lazy_imports import FlashAttentionBackwardDqSm90
from flash_attn.cute.runtime.own_device import dispatch_arch, target_sm_count
from flash_attn.cute.shared_backward import Tile
from flash_attn.cute.testing import is_fake_mode
from flash_attn.cute.utils import AuxData

# Layout of the accumulator; head dimensions are rounded up to 32.
ACCUM_TILE = Tile(90, ROWS, THREADS, 1, False, False, 32, None)

Tensor = torch.Tensor


def lists_of_queries(
    q: Tensor,
    k: Tensor,
    lists: BlockSparseTensorsTorch,
    *,
    cu_seqlens: tuple[Optional[Tensor], Optional[Tensor]],
    seqused: tuple[Optional[Tensor], Optional[Tensor]],
    max_seqlen_q: Optional[int],
) -> NamedTuple:
    """Check forward lists, and normalise them for the kernel.

    q, k, lists, max_seqlen_q: as in `backward_dq`. cu_seqlens, seqused: of queries and of keys.
    """
    packed, heads = cu_seqlens[0] is not None, ListHeads.of(lists, q.shape[-2], k.shape[-2])
    normalize = normalize_block_sparse_config
    if query_bits.has_bits(lists):
        group = q.shape[-2] // k.shape[-2]
        lists, _ = query_bits.of_rows(lists, heads, group, True)
        normalize = partial(query_bits.forward_config, group=query_bits.rows_of_token(heads, group))
    return normalize(
        lists,
        batch_size=cu_seqlens[0].shape[0] - 1 if packed else q.shape[0],
        num_head=k.shape[-2] if query_bits.has_bits(lists) and heads.packable else heads.count,
        seqlen_q=q.shape[-3] if max_seqlen_q is None or not packed else max_seqlen_q,
        seqlen_k=k.shape[-3],
        block_size=(TILE_M, STEP if lists.block_size is None else lists.block_size[1]),
        q_stage=1,
        packed=formats.packing(*cu_seqlens, *seqused, max_seqlen_q, None),
    )


@on_plain_tensors
def backward_dq(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dpsum: Tensor,
    lse_log2: Tensor,
    lists: BlockSparseTensorsTorch,
    *,
    dq: Tensor,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple[Optional[int], Optional[int]] = (None, None),
    mask_mod: Optional[Callable] = None,
    aux_tensors: Optional[list[Tensor]] = None,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k: Optional[Tensor] = None,
    seqused_q: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    q_offset: Optional[Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    add: bool = False,
    accum: Optional[Tensor] = None,
    start: int = ROWS,
    out: Optional[Tensor] = None,
    lse: Optional[Tensor] = None,
    normalized: Optional[NamedTuple] = None,
) -> None:
    """Write the gradient of q, summed with those that other calls added to ``accum``, to ``dq``.

    Tensors have been checked by the caller, and none is empty.

    Args:
        q, dout: [B, T, Hq, D] and Dv, or packed [total, Hq, D]; fp16 or bf16. k, v: [B, S, Hkv, D] and Dv, or packed.
        dpsum, lse_log2: fp32 [B, Hq, rows], packed [Hq, rows], as in `shared_backward`; with ``out`` written, for whole
            tiles of TILE_M queries (over lists with bits, for the queries alone).
        lists: forward lists, of every form that forward reads.
        dq: like q; contiguous in its last dimension. Rows past seqused_q are not written.
        softmax_scale: 1 / sqrt(D) unless given.
        causal, window_size, mask_mod, aux_tensors: the masks of the forward call.
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, q_offset: int32, as forward's.
        max_seqlen_q: queries of the longest packed sequence, if known: checks that padded lists have rows for it.
        add: the old values of dq are added before rounding, as in `shared_backward.convert`.
        accum: fp32 [B, Hq, rows * D], packed [Hq, rows * D], of `Tile.pattern` "rows of 64"; not with bits.
        start: `AccumLayout.start` of dpsum, lse_log2 and accum: a multiple of 64; with ``out`` 64 or 128.
        out, lse: forward's, like dout and fp32 [B, Hq, T], packed [Hq, total]; row sums are computed from them.
        normalized: the result of `lists_of_queries` for these arguments, if the caller has it.

    Raises:
        NotImplementedError: no kernel for the architecture, dtype, head dimensions or block size.
        ValueError: lists that do not fit the call.
    """
    reason = dq_spec.unsupported(dispatch_arch(), q.dtype, q.shape[-1], v.shape[-1], lists)
    if reason is not None:
        raise NotImplementedError(reason)
    words = lists.mask_block_bits.shape[-1] if query_bits.has_bits(lists) else 0
    if words and accum is not None:
        raise NotImplementedError("accum with mask_block_bits: an accumulator's rows are of one head; see `add`")
    softmax_scale = 1.0 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    (left, right), sequences, used = edges(causal, window_size), (cu_seqlens_q, cu_seqlens_k), (seqused_q, seqused_k)
    if normalized is None:
        normalized = lists_of_queries(q, k, lists, cu_seqlens=sequences, seqused=used, max_seqlen_q=max_seqlen_q)
    spec = DqSpec.of(
        q, k, v, lists, normalized, (left, right), sequences, q_offset,
        short_rows=has_short_rows(lists),
        seqused=tuple(x is not None for x in used),
        from_accum=accum is not None,
        onto_dq=add,
        sums=out is not None,
        start=start if cu_seqlens_q is not None else ROWS,
    )  # fmt: skip
    key = (
        dispatch_arch(),
        target_sm_count() if spec.stay else None,
        spec,
        normalized.broadcast_pattern,
        utils.hash_callable(mask_mod) if mask_mod is not None else None,
        get_aux_tensor_metadata(aux_tensors) if aux_tensors is not None else None,
    )
    kernel = _compiled(
        key,
        lambda: FlashAttentionBackwardDqSm90(spec, mask_mod),
        lambda: [
            *_fake_arguments(spec),
            to_cute_block_sparse_tensors(normalized.tensors),
            AuxData([to_cute_aux_tensor(t) for t in aux_tensors] if aux_tensors is not None else None, None),
        ],
    )
    if not is_fake_mode():
        kernel(
            *(maybe_contiguous(t) for t in (q, k, v, dout)), dpsum, lse_log2, maybe_contiguous(out), lse, dq, accum,
            softmax_scale, left, right, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, q_offset,
            formats.launch_arguments(normalized.tensors), AuxData(aux_tensors, None),
        )  # fmt: skip


_compiled = CompiledKernels("bwd_dq")


def _fake_arguments(spec: DqSpec) -> list[object]:
    """Fake arguments to compile the kernel for: those before the block lists."""
    call = FakeCall.of(spec.dtype, *spec.dims, spec.packed)
    rows = cute.sym_int()
    sums = [call.of_rows(rows) for _ in range(2)]
    out, lse = (*call.tokens(call.o), call.of_rows(call.q[-3])) if spec.sums else (None, None)
    accum = call.of_rows(cute.sym_int(), divisibility=4) if spec.from_accum else None
    (dq,), edges = call.tokens(call.q), (Int32(0) if given else None for given in spec.edges)
    lengths = fake_indices(*spec.packed, *spec.seqused, spec.offset)
    return [
        *call.tokens(call.q, call.k, call.v, call.o), *sums, out, lse, dq, accum, Float32(1.0), *edges, *lengths
    ]  # fmt: skip
