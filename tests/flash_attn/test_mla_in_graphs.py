"""Absorbed MLA (`qv`), which only Blackwell has, as an operator: its host code, with kernels that note their launch."""

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from test_attention_in_graphs import call, check, gradients

from flash_attn.cute import interface
from flash_attn.cute.cache_utils import JITCache

Tensor = torch.Tensor
STARTS = torch.tensor([0, 10, 10, 32], dtype=torch.int32)
CASES: dict[str, dict[str, Any]] = {
    "sparse": dict(sparse=True),
    "recomputed": dict(sparse=True, gather_bwd_recompute_p=True, causal=True),
    "packed": dict(sparse=True, packed=True, learnable_sink=torch.ones(64)),
    "keys are values": dict(sparse=True, shared=True, return_lse=True),
    "dense": dict(return_lse=True),
    "dense, packed": dict(packed=True, causal=True),
}


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Launches of Blackwell's kernels, which write nothing."""
    torch._dynamo.reset()
    made: list[tuple] = []

    def data(x: Any) -> Any:
        return (x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x

    class Stub(JITCache):
        def __contains__(self, key: object) -> bool:
            self.cache.setdefault(key, lambda *args: made.append((key, *map(data, args))))
            return True

    monkeypatch.setenv("FLASH_ATTENTION_NUM_SMS", "148")
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
    monkeypatch.setattr(interface, "_get_device_arch", lambda: 100)
    for module in [module for name, module in sys.modules.items() if name.startswith("flash_attn.cute.")]:
        for function in vars(module).values():
            if isinstance(function, FunctionType) and hasattr(function, "compile_cache"):
                monkeypatch.setattr(function, "compile_cache", Stub())
    return made


def arguments(case: str) -> tuple[list[Tensor], dict[str, Any], list[Tensor]]:
    """q, k and v of a call, its other arguments, and those that get gradients: none where there is no kernel for it."""
    given, needs_grad = dict(CASES[case]), not case.startswith("dense")
    sparse, packed, shared = (given.pop(name, False) for name in ("sparse", "packed", "shared"))
    lead = (32,) if packed else (2, 32)

    def made(heads: int, width: int) -> Tensor:
        return torch.randn(*lead, heads, width, dtype=torch.bfloat16, requires_grad=needs_grad)

    if packed:
        given |= dict(cu_seqlens_q=STARTS, cu_seqlens_k=STARTS, max_seqlen_q=22, max_seqlen_k=22)
    if sparse:
        given["gather_kv_indices"] = torch.zeros(*lead, 128, dtype=torch.int32)
    if shared:
        q, v = made(64, 512), made(1, 512)
        return [q, v, v], given, [q, v]
    tensors, given["qv"] = [made(64, 64), made(1, 64), made(1, 512)], made(64, 512)
    return tensors, given, [*tensors, given["qv"]] if needs_grad else []


@pytest.mark.parametrize("case", CASES)
def test_a_graph_launches_what_a_call_does(case: str, launched: list[tuple]) -> None:
    tensors, given, of = arguments(case)
    functions: tuple[Callable, ...] = call, torch.compile(call, fullgraph=True, backend="aot_eager")
    found, launches = [], []
    for function in functions:
        out, lse = function(tensors, given)
        made = gradients((out, lse if given.get("return_lse") else None), of) if of else ()
        found.append([None if x is None else (x.shape, x.stride(), x.dtype) for x in (out, lse, *made)])
        launches.append(list(launched))
        launched.clear()
    assert found[0] == found[1] and launches[0] == launches[1]
    assert len(launches[0]) >= (4 if of else 1)


@pytest.mark.parametrize("case", CASES)
def test_pytorch_finds_nothing_wrong(case: str, asked: list[tuple]) -> None:
    """Numbers are not compared: no kernel writes any."""
    tensors, given, of = arguments(case)
    check(tensors, given, of, asked, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))
