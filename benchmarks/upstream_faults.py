"""Two faults of flash-attn-4 in packed sequences (docs/upstream-findings.md), on Hopper with the unpatched package.

The patched one prints 0 for the first, and refuses the second call.
"""

from __future__ import annotations

import sys
from itertools import accumulate, pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("upstream_faults.py measures on a GPU, and PyTorch finds none")
    print("rows of the first sequence that are not finite, of 300:", rows_beside_nan())
    print("largest error of dq, which is 0.010 with D = 64:", padded_head_dimension())


def rows_beside_nan() -> int:
    """The last tile of the sequence before NaN is loaded whole, and 0 times NaN is NaN."""
    from flash_attn.cute import flash_attn_varlen_func

    starts = torch.tensor([0, 300, 800, 877], dtype=torch.int32, device="cuda")
    q, k, v = (torch.randn(877, 4, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    v[300:800] = torch.nan
    pack = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=500, max_seqlen_k=500)
    o, *_ = flash_attn_varlen_func(q, k, v, **pack)
    return int((~o[:300].isfinite()).any(-1).any(-1).sum())


def padded_head_dimension(D: int = 72) -> float:
    """Backward of a head dimension that is no multiple of 32, against fp64."""
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    torch.manual_seed(0)
    lengths, H = (300, 1, 513, 64), 4
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")
    q, k, v, do = (torch.randn(sum(lengths), H, D, device="cuda").bfloat16() for _ in range(4))
    pack = dict(causal=True, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=513, max_seqlen_k=513)
    o, lse, *_ = _flash_attn_fwd(q, k, v, **pack, return_lse=True)
    dq = _flash_attn_bwd(q, k, v, o, do, lse, **pack)[0]
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    parts = [[x[a:b].transpose(0, 1) for x in exact] for a, b in pairwise(starts.tolist())]
    whole = torch.cat([scaled_dot_product_attention(*part, is_causal=True).transpose(0, 1) for part in parts])
    (true,) = torch.autograd.grad(whole, exact[0], do.double())
    return float((dq - true).abs().max())


if __name__ == "__main__":
    main()
