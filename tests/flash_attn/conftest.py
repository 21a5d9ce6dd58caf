"""Workers that compile for one architecture; what stands for kernels."""

from collections.abc import Callable
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fa_compile import Worker, shared_worker
from fa_reference import plain_attention, wide


@pytest.fixture
def compiler_sm90() -> Worker:
    return shared_worker("sm_90")


@pytest.fixture
def compiler_sm100() -> Worker:
    return shared_worker("sm_100")


@pytest.fixture
def use_mma_sync(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Kernels by token compute products warp by warp, as SM100's do."""
    from flash_attn.cute.mma import form

    monkeypatch.setattr(form, "FORCED", request.param)
    return request.param


@pytest.fixture
def plain_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of kernels, call by call.

    But for tests on a GPU attention in plain PyTorch, without any mask or list, and without a history, stands for them.
    """
    from flash_attn.cute import interface

    made: list[dict[str, Any]] = []
    if request.node.get_closest_marker("gpu"):
        return made
    forward_names, backward_names = (
        list(signature(function).parameters) for function in (interface._flash_attn_fwd, interface._flash_attn_bwd)
    )

    @torch.no_grad()
    def forward(*args: Any, **given: Any) -> tuple:
        given |= dict(zip(forward_names, args))
        needs_lse = given["return_lse"] or any(given[name].requires_grad for name in "qkv")
        made.append(given | dict(return_lse=needs_lse))
        o, lse, _ = plain_attention(*(given[name] for name in "qkv"))
        return o.contiguous(), lse if needs_lse else None, None, None, None

    @torch.no_grad()
    def backward(*args: Any, **given: Any) -> tuple:
        given |= dict(zip(backward_names, args))
        made.append({name: x for name, x in given.items() if name not in ("dq", "dk", "dv")})
        q, k, v, do = (wide(given[name].detach()) for name in ("q", "k", "v", "dout"))
        o, lse, p = plain_attention(q, k, v)
        of_heads, scale = (*k.shape[:-1], q.shape[-2] // k.shape[-2], -1), q.shape[-1] ** -0.5
        k_all, v_all = (x.repeat_interleave(of_heads[-2], -2) for x in (k, v))
        ds = torch.einsum("...qhd,...khd->...hqk", do, v_all) - (do * o).sum(-1).mT.unsqueeze(-1)
        ds = p * (ds if given["dlse"] is None else ds + given["dlse"].unsqueeze(-1)) * scale
        dq = torch.einsum("...hqk,...khd->...qhd", ds, k_all)
        dk = torch.einsum("...hqk,...qhd->...khd", ds, q).view(of_heads).sum(-2)
        dv = torch.einsum("...hqk,...qhd->...khd", p, do).view(of_heads).sum(-2)
        grads, sink = tuple(x.to(given["q"].dtype) for x in (dq, dk, dv)), given["learnable_sink"]
        return grads if sink is None else (*grads, torch.ones_like(sink))

    monkeypatch.setattr(interface, "_flash_attn_fwd", forward)
    monkeypatch.setattr(interface, "_flash_attn_bwd", backward)
    return made


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that get as far as the autograd function say so, and do no more."""
    from flash_attn.cute import interface

    stand_in = SimpleNamespace(apply=lambda *args: "launched")
    monkeypatch.setattr(interface, "FlashAttnFunc", stand_in)
    monkeypatch.setattr(interface, "FlashAttnVarlenFunc", stand_in)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, tuple, dict[str, Any]]]:
    """Calls of attention's operators: each, and its arguments."""
    from flash_attn.cute.operators import attention as operators

    made = []

    def noting(op: Any) -> Callable[..., Any]:
        return lambda *args, **static: made.append((op, args, static)) or op(*args, **static)

    of_both = {name: noting(getattr(operators.OPS, name).default) for name in ("attention", "attention_backward")}
    monkeypatch.setattr(operators, "OPS", SimpleNamespace(**of_both))
    return made


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for fixture, arch in (("compiler_sm90", "sm_90"), ("compiler_sm100", "sm_100")):
            if fixture in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.xdist_group(arch))
