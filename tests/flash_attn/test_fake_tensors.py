"""Compiling for tensors without memory reads no address of one, of which PyTorch would warn."""

import pytest
import torch
from fa_cases import Case, compile_case
from fa_compile import Worker
from torch._subclasses.fake_tensor import FakeTensorMode


def test_kernels_are_compiled_without_addresses(compiler: Worker) -> None:
    """The worker's fake tensors raise where they would warn."""
    compiler.trace(compile_case, Case(T_q=512, T_k=512, causal=True, deterministic=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_the_exchange_keeps_the_layout_and_is_silent(dtype: torch.dtype, capfd: pytest.CaptureFixture[str]) -> None:
    from cutlass.cute import runtime

    from flash_attn.cute.cute_dsl_utils import to_cute_tensor

    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with FakeTensorMode():
            x = torch.empty(3, 40, 2, 64, dtype=dtype, device="cuda").transpose(1, 2)
            exchanged = to_cute_tensor(x)
            assert "data pointer" not in capfd.readouterr().err
            assert (exchanged.shape, exchanged.stride) == (tuple(x.shape), x.stride())
            assert exchanged.element_type.width == 8 * x.element_size() and str(exchanged.memspace) == "gmem"
            runtime.from_dlpack(x.view(torch.uint8), enable_tvm_ffi=True)
            assert "data pointer" in capfd.readouterr().err, "the DSL's own exchange warns here"
    finally:
        torch.set_warn_always(always)
