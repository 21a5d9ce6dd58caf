"""Forward over unions of the tokens' own lists (`lists/query_bits`) for SM100, whose own forward reads no bits.

Tiles, loop, loads and masks are the dq pass's, the softmax is SM90's (`fwd_sm90/union_softmax`). Products are by
mma.sync (`mma.product`): correct, not fast.
"""

import math
from typing import Optional

import cutlass.cute as cute
import torch
from cutlass import Float32, Int32

from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch, to_cute_block_sparse_tensors
from flash_attn.cute.bwd_dq.interface import lists_of_queries
from flash_attn.cute.bwd_dq.spec import DqSpec, unsupported
from flash_attn.cute.cute_dsl_utils import maybe_contiguous
from flash_attn.cute.lists import formats, query_bits
from flash_attn.cute.mma.host import CompiledKernels, FakeCall, fake_indices, on_plain_tensors
from flash_attn.cute.runtime.call_options import edges
from flash_attn.cute.runtime.lazy_imports import FlashAttentionForwardUnions, fake_tensor
from flash_attn.cute.runtime.own_device import dispatch_arch, target_sm_count
from flash_attn.cute.testing import is_fake_mode

Tensor = torch.Tensor


@on_plain_tensors
def forward_unions(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: BlockSparseTensorsTorch,
    *,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k: Optional[Tensor] = None,
    q_offset: Optional[Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    aux_tensors: Optional[list[Tensor]] = None,
) -> tuple[Tensor, Tensor]:
    """Attention of every token to the keys of its own list; the caller has checked the tensors, none of them empty.

    Args:
        q: [B, T, Hq, D], or packed [total, Hq, D]; fp16 or bf16. k, v: [B, S, Hkv, D] and Dv, or packed.
        lists: forward lists with ``mask_block_bits``.
        softmax_scale: 1 / sqrt(D) unless given.
        cu_seqlens_q, cu_seqlens_k: int32 [sequences + 1].
        q_offset: int32 [sequences], position of each sequence's first query among its keys; by default the last query
            is at the last key.
        max_seqlen_q: as in `backward_dq`.
        aux_tensors: [sums] of `fwd_sm90.block_sums`, written.

    Returns:
        o [.., Hq, Dv], and the log-sum-exp, natural, -inf where a row sees no key: fp32 [B, Hq, T], packed [Hq, total].

    Raises:
        NotImplementedError: no such kernel, or lists without bits. ValueError: lists that do not fit the call.
    """
    reason = unsupported(dispatch_arch(), q.dtype, q.shape[-1], v.shape[-1], lists)
    if reason is None and not query_bits.has_bits(lists):
        reason = "lists without mask_block_bits: they are for the kernels of upstream"
    if reason is not None:
        raise NotImplementedError(reason)
    sequences = (cu_seqlens_q, cu_seqlens_k)
    normalized = lists_of_queries(q, k, lists, cu_seqlens=sequences, seqused=(None, None), max_seqlen_q=max_seqlen_q)
    left, right = edges(causal, (None, None))
    spec = DqSpec.of(q, k, v, lists, normalized, (left, right), sequences, q_offset)
    sms = target_sm_count() if spec.stay else None
    key = (dispatch_arch(), sms, spec, normalized.broadcast_pattern, aux_tensors is not None)
    kernel = _compiled(
        key,
        lambda: FlashAttentionForwardUnions(spec),
        lambda: [*_fake_arguments(spec, aux_tensors is not None), to_cute_block_sparse_tensors(normalized.tensors)],
    )
    o = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.empty(*q.shape[:-3], q.shape[-2], q.shape[-3], dtype=torch.float32, device=q.device)
    if not is_fake_mode():
        kernel(
            *(maybe_contiguous(t) for t in (q, k, v)), o, lse, aux_tensors[0] if aux_tensors else None,
            1.0 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale, left, right, cu_seqlens_q,
            cu_seqlens_k, q_offset, formats.launch_arguments(normalized.tensors),
        )  # fmt: skip
    return o, lse


_compiled = CompiledKernels("fwd_unions")


def _fake_arguments(spec: DqSpec, with_sums: bool) -> list[object]:
    """Fake arguments to compile the kernel for: those before the block lists."""
    call = FakeCall.of(spec.dtype, *spec.dims, spec.packed)
    tokens, lse = call.tokens(call.q, call.k, call.v, call.o), call.of_rows(call.q[-3])
    ends = (Int32(0) if given else None for given in spec.edges)
    sums = fake_tensor(Float32, tuple(cute.sym_int() for _ in range(3))) if with_sums else None
    return [*tokens, lse, sums, Float32(1.0), *ends, *fake_indices(*spec.packed, spec.offset)]
