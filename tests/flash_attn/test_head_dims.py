"""Head dimensions for which packed backward on SM90 would be wrong are refused before any launch."""

from __future__ import annotations

import pytest
import torch
from fa_compile import Worker, WorkerError


def packed_backward(D: int, Dv: int) -> None:
    from flash_attn.cute.interface import _flash_attn_bwd

    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    q, k, v, o = tensor(300, 4, D), tensor(300, 2, D), tensor(300, 2, Dv), tensor(300, 4, Dv)
    starts = tensor(3, dtype=torch.int32)
    lse = tensor(4, 300, dtype=torch.float32)
    _flash_attn_bwd(q, k, v, o, o, lse, causal=True, cu_seqlens_q=starts, cu_seqlens_k=starts)


@pytest.mark.parametrize("D,Dv", [(72, 72), (80, 80), (64, 80)])
def test_refused(compiler_sm90: Worker, D: int, Dv: int) -> None:
    with pytest.raises(WorkerError, match=f"multiples of 32, got head_dim={D}, head_dim_v={Dv}") as error:
        compiler_sm90.trace(packed_backward, D, Dv)
    assert error.value.kind == "NotImplementedError"


def test_what_is_right_goes_on(compiler_sm90: Worker) -> None:
    compiler_sm90.trace(packed_backward, 96, 96)
