"""dk and dv of attention where every token has its own list of key blocks, on SM90 and SM100: deterministic.

Key-stationary: a warpgroup has 64 keys of one key/value head and gathers q and do of the tokens that list them, for all
heads of the group (at large head dimensions two warpgroups share 64 keys, one for dk, one for dv),

    S^T = k q^T,  P^T = exp2(S^T * scale * log2(e) - lse_log2),  dP^T = v do^T,  dS^T = P^T * (dP^T - dpsum),
    dv += P^T do,  dk += dS^T q.

That is 4 of backward's 5 matmuls; dq is left to another kernel. Blocks that many tokens list are split into work tiles
with fp32 partial sums, which a second kernel adds in a fixed order. Both kernels are in `kernel`.
"""

import math
from typing import Optional

import cutlass.cute as cute
import torch
from cutlass import Float32, Int32

from flash_attn.cute.bwd_dkdv.spec import DkdvSpec, KeyPairs, unsupported
from flash_attn.cute.cute_dsl_utils import maybe_contiguous
from flash_attn.cute.lists.tiling import ROWS
from flash_attn.cute.mma.form import use_mma_sync
from flash_attn.cute.mma.host import CompiledKernels, FakeCall, fake_indices, on_plain_tensors
from flash_attn.cute.runtime.lazy_imports import FlashAttentionBackwardDkdvSm90, fake_tensor
from flash_attn.cute.runtime.own_device import dispatch_arch, target_sm_count
from flash_attn.cute.testing import is_fake_mode

Tensor = torch.Tensor


@on_plain_tensors
def backward_dkdv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dpsum: Tensor,
    lse_log2: Tensor,
    pairs: KeyPairs,
    *,
    dk: Tensor,
    dv: Tensor,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    add: bool = False,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k: Optional[Tensor] = None,
    q_offset: Optional[Tensor] = None,
    start: int = ROWS,
) -> None:
    """Write the gradients of k and v to ``dk`` and ``dv``; rows of blocks that no token lists get 0.

    Tensors have been checked by the caller, and none is empty.

    Args:
        q, dout: [B, T, Hq, D] and Dv, or packed [total, Hq, D]; fp16 or bf16. k, v: [B, S, Hkv, D] and Dv, or packed.
        dpsum, lse_log2: fp32 [B, Hq, rows], packed [Hq, rows], as in `shared_backward`; read up to the last query.
        pairs: the tokens of each key block, in work tiles.
        dk, dv: like k and v; contiguous in their last dimension.
        softmax_scale: 1 / sqrt(D) unless given.
        causal: a token sees the keys up to its own position.
        add: the old values of dk and dv are added before rounding, as in `shared_backward.convert`.
        cu_seqlens_q, cu_seqlens_k: int32 [sequences + 1], both or neither.
        q_offset: int32 [sequences]: position of each sequence's first query among its keys; 0 unless given.
        start: `AccumLayout.start` of dpsum and lse_log2.

    Raises:
        NotImplementedError: no kernel for the architecture, dtype, head dimensions or block size.
    """
    reason = unsupported(dispatch_arch(), q.dtype, q.shape[-1], v.shape[-1], pairs.block_size)
    if reason is not None:
        raise NotImplementedError(reason)
    packed, D, Dv = cu_seqlens_q is not None, q.shape[-1], v.shape[-1]
    spec = DkdvSpec(
        dtype=q.dtype,
        head_dim=D,
        head_dim_v=Dv,
        group=q.shape[-2] // k.shape[-2],
        block_size=pairs.block_size,
        causal=causal,
        offset=causal and q_offset is not None,
        packed=packed,
        add=add,
        start=start if packed else ROWS,
        use_mma_sync=use_mma_sync(dispatch_arch()),
        by_head=pairs.by_head,
    )
    key = (dispatch_arch(), target_sm_count(), spec)
    kernel = _compiled(key, lambda: FlashAttentionBackwardDkdvSm90(spec), lambda: _fake_arguments(spec))
    partials = torch.empty(max(pairs.partials, 1) * spec.parts * ROWS * (D + Dv), dtype=torch.float32, device=q.device)
    if not is_fake_mode():
        counter = torch.zeros(1, dtype=torch.int32, device=q.device)
        kernel(
            *(maybe_contiguous(t) for t in (q, k, v, dout)), lse_log2, dpsum, dk, dv, *pairs[:3], counter, partials,
            1.0 / math.sqrt(D) if softmax_scale is None else softmax_scale, cu_seqlens_q, cu_seqlens_k, pairs.cu_blocks,
            q_offset if causal else None,
        )  # fmt: skip


_compiled = CompiledKernels("bwd_dkdv")


def _fake_arguments(spec: DkdvSpec) -> list[object]:
    call = FakeCall.of(spec.dtype, *spec.dims, (spec.packed, spec.packed))
    rows = cute.sym_int()
    sums = [call.of_rows(rows) for _ in range(2)]
    pairs = [fake_tensor(Int32, size) for size in ((cute.sym_int(),), (cute.sym_int(), 4), (cute.sym_int(),), (1,))]
    partials = fake_tensor(Float32, (cute.sym_int(),), divisibility=4)
    sequences = fake_indices(*[spec.packed] * 3, spec.offset)
    inputs, outputs = call.tokens(call.q, call.k, call.v, call.o), call.tokens(call.k, call.v)
    return [*inputs, *sums, *outputs, *pairs, partials, Float32(1.0), *sequences]
