"""Block-sparse backward on SM90 that leaves dq out: what its kernel is compiled without, and its dk and dv."""

from __future__ import annotations

from contextlib import ExitStack
from functools import wraps
from typing import Any

import pytest
import torch
from fa_cases import Case, _masks, backward, forward, in_order, make_inputs, outputs, swept
from fa_compile import Worker
from fa_lists import backward_lists
from fa_reference import assert_alike, assert_call_repeats

LISTED = dict(T_q=900, T_k=900, lists="both")
CASES = [
    Case(D=128, causal=True, **LISTED),
    Case(D=128, mask_mod="thirds", block=(128, 64), **LISTED),
    Case(D=128, causal=True, block=(128, 64), Hkv=1, plan=3, **LISTED),
    Case(D=64, window=(200, 0), Hkv=4, block=(128, 64), **LISTED),
    Case(D=64, causal=True, Hkv=1, plan=3, **LISTED),
    Case(D=96, mask_mod="keyed", list_heads=4, **LISTED),
]
PACK = dict(packed=((300, 300), (1, 129), (0, 200), (700, 640), (130, 0), (257, 900)), lists="both")
CASES += [
    Case(D=128, causal=True, form="ragged", plan=2, **PACK),
    Case(D=64, mask_mod="thirds", form="compact", block=(128, 64), **PACK),
]


def without_dq(case: Case, x: Any, o: torch.Tensor, lse: torch.Tensor, **more: Any) -> tuple[torch.Tensor | None, ...]:
    """Backward's results for the case where it leaves dq out."""
    from flash_attn.cute.interface import _flash_attn_bwd

    options = _masks(case, x) | dict(block_sparse_tensors=backward_lists(case), without_dq=True) | more
    return _flash_attn_bwd(x.q, x.k, x.v, o, x.do, lse, **options)


def compiled_roles(case: Case, deterministic: bool) -> tuple[set[str], int]:
    """The warp roles that the kernel without dq was traced with, and bytes of its shared memory."""
    from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90 as Kernel

    roles: set[str] = set()
    sizes: list[int] = []

    def recording(name: str, original: Any) -> Any:
        @wraps(original)
        def role(*args: Any, **kwargs: Any) -> Any:
            roles.add(name)
            result = original(*args, **kwargs)
            if name == "_get_shared_storage_cls":
                sizes.append(result.size_in_bytes())
            return result

        return role

    x = make_inputs(case)
    o, lse = outputs(case, x)
    with ExitStack() as undo:
        for name in ("load", "mma", "dQaccum_store", "_get_shared_storage_cls"):
            undo.callback(setattr, Kernel, name, getattr(Kernel, name))
            setattr(Kernel, name, recording(name, getattr(Kernel, name)))
        dq, dk, dv = without_dq(case, x, o, lse, deterministic=deterministic)
    assert dq is None and dk.shape == x.k.shape and dv.shape == x.v.shape
    return roles, sizes[0]


@pytest.mark.parametrize("of", swept(in_order(CASES, False, True)), ids=str)
def test_nothing_of_dq_is_compiled(compiler_sm90: Worker, of: tuple[Case, bool]) -> None:
    case, deterministic = of
    roles, size = compiler_sm90.trace(compiled_roles, case, deterministic)
    assert roles >= {"load", "mma"} and "dQaccum_store" not in roles
    # Keys, values, and two stages of queries and their gradients; two CTAs share 227 KiB.
    two_ctas = case.block == (128, 64)
    assert size <= (113 if two_ctas else 160) * 1024


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "deterministic"), in_order(CASES, False, True), ids=str)
def test_dk_and_dv_of_one_pass(case: Case, deterministic: bool) -> None:
    """The kernel with dq adds the same products, in an order of its own."""
    x = make_inputs(case)
    o, lse = forward(case, x)
    expected = backward(case, x, o, lse)
    _, *got = without_dq(case, x, o, lse, deterministic=deterministic)
    assert_alike(got, expected[1:])
    if deterministic:
        assert_call_repeats(lambda: without_dq(case, x, o, lse, deterministic=True)[1:], 20)
