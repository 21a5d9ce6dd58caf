"""Block lists at head dimensions (192, 128) and 256 on SM100; and calls whose kernels read no lists are refused."""

from __future__ import annotations

import pytest
import torch
from fa_cases import Case, backward, forward, make_inputs
from fa_compile import Worker, WorkerError, built_kernels
from fa_lists import backward_lists, forward_lists

from flash_attn.cute.lists.validate_calls import refuse_unread

FIXED = {"T_q": 700, "T_k": 700, "lists": "both"}
PACKED = {"packed": ((300, 300), (1, 129), (0, 200)), "lists": "both"}
CASES = [
    Case(D=192, Dv=128, **FIXED, block=(256, 256), mask_mod="thirds", causal=True, deterministic=True),
    Case(D=192, Dv=128, **PACKED, block=(64, 512), form="compact", Hkv=4, mask_mod="keyed"),
    Case(D=256, **FIXED, block=(128, 128), mask_mod="thirds", causal=True, deterministic=True),
    Case(D=256, **PACKED, block=(192, 256), form="ragged", mask_mod="keyed", deterministic=True),
]
TOO_FEW_KEYS = [
    (Case(D=192, Dv=128, **FIXED, block=(256, 128)), "head_dim=192 requires 2CTA; .* even number of tile_n=128 tiles"),
    (Case(D=256, **FIXED, block=(256, 64)), "head_dim=256 requires 2CTA; .* even number of tile_n=64 tiles"),
]


def built(case: Case) -> list[str]:
    """The classes of what backward compiles."""
    x = make_inputs(case)
    with built_kernels("") as kernels:
        backward(case, x, x.do, torch.empty(case.B, case.Hq, case.T_q, device="cuda"))
    return [type(kernel).__name__ for kernel in kernels]


def test_dense_calls_keep_the_kernel_for_256(compiler_sm100: Worker) -> None:
    """It reads no lists: calls with lists take the general one."""
    dense = compiler_sm100.trace(built, Case(D=256, T_q=700, T_k=700))
    listed = compiler_sm100.trace(built, Case(D=256, **FIXED, block=(128, 128)))
    assert "BlackwellFusedMultiHeadAttentionBackward" in dense
    assert "FlashAttentionBackwardSm100" in listed and "BlackwellFusedMultiHeadAttentionBackward" not in listed


def refused(case: Case) -> str:
    """Backward's error before it makes a kernel."""
    with pytest.raises(ValueError, match="SM100") as error, pytest.MonkeyPatch.context() as patch:
        from flash_attn.cute import interface

        patch.setattr(interface.cute, "compile", None)
        x = make_inputs(case)
        backward(case, x, x.do, torch.empty(case.B, case.Hq, case.T_q, device="cuda"))
    return str(error.value)


@pytest.mark.parametrize(("case", "said"), TOO_FEW_KEYS, ids=str)
def test_blocks_of_too_few_keys_are_refused(compiler_sm100: Worker, case: Case, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        raise ValueError(compiler_sm100.trace(refused, case))


def call_on(arch: int, direction: str) -> None:
    """A call with lists on `arch`, as far as making a kernel."""
    from flash_attn.cute import interface

    case = Case(D=64, **FIXED)
    x, lists = make_inputs(case), (forward_lists(case), backward_lists(case))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interface, "_get_device_arch", lambda: arch)
        patch.setattr(interface.cute, "compile", None)
        if direction == "forward":
            forward(case, x, lists[0])
        elif direction == "qv":
            v, qv = (torch.empty(*t.shape[:3], 512, dtype=t.dtype, device="cuda") for t in (x.v, x.q))
            interface._flash_attn_fwd(x.q, x.k, v, qv=qv, block_sparse_tensors=lists[0])
        else:
            lse = torch.empty(case.B, case.Hq, case.T_q, device="cuda")
            backward(case, x, x.do, lse, lists[1])


@pytest.mark.parametrize(
    ("arch", "direction", "said"),
    [
        (80, "forward", "Block sparsity not supported on SM 8.0: only kernels for"),
        (120, "forward", "Block sparsity not supported on SM 12.0"),
        (120, "backward", "Block sparsity backward not supported on SM 12.0"),
        (100, "qv", "block sparsity is not supported with qv"),
    ],
)
def test_calls_whose_kernels_read_no_lists(compiler_sm100: Worker, arch: int, direction: str, said: str) -> None:
    with pytest.raises(WorkerError, match=said) as error:
        compiler_sm100.trace(call_on, arch, direction)
    assert error.value.kind == "NotImplementedError"


@pytest.mark.parametrize("arch", [90, 100, 103, 110])
def test_calls_whose_kernels_do(arch: int) -> None:
    refuse_unread(object(), arch)
    refuse_unread(None, 120, qv=True)
