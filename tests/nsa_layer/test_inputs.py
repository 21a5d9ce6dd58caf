"""Inputs that the checks of `nsa` take and have to tell apart, and numbers that ranks and graphs are asked to look at.

Refused ones are in `fuzz/wrong_calls/layer.py`.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist

from fuzz.wrong_calls.layer import HKV, HQ, D, batch, packed
from nsa_layer import ContextParallel, NSAConfig, NSAttention, nsa, selected_attention
from nsa_layer.call import Call, CallSpec
from nsa_layer.checks import assert_numbers, starts_of_lengths

Tensor = torch.Tensor


def test_a_bound_of_lengths_may_be_any_int() -> None:
    arguments = packed("cpu")
    o = nsa(**arguments | dict(max_seqlen=10**30))
    assert o.equal(nsa(**arguments)) and o.isfinite().all()


@pytest.mark.parametrize("change", [dict(causal=1), dict(softmax_scale=True), dict(gates=1.0), dict(q=[1.0])])
def test_equal_is_not_the_same(change: dict) -> None:
    """1 == True == 1.0, so what is remembered of a good call has to tell them apart."""
    arguments = batch("cpu") | dict(softmax_scale=1.0, causal=True)
    nsa(**arguments)
    with pytest.raises(TypeError):
        nsa(**arguments | change)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_nested_tensors_are_named(layout: torch.layout, autocast: bool) -> None:
    def nested(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.nested.nested_tensor([torch.zeros(n, *shape, dtype=dtype) for n in (5, 6)], layout=layout)

    bad = {name: nested(H, 8) for name, H in (("q", HQ), ("k", HKV), ("v", HKV), ("gates", HQ), ("gate_weight", 3))}
    bad |= dict(compress_k_weight=nested(D), compress_v_weight=nested(D))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        for name, x in bad.items():
            with pytest.raises(TypeError, match=f"^{name} must not be a nested tensor; .* cu_seqlens"):
                nsa(**batch("cpu") | {name: x})
        with pytest.raises(TypeError, match="^q must not be a nested tensor"):
            nsa(bad["q"], bad["k"], bad["v"])
        with pytest.raises(TypeError, match="^cu_seqlens must not be a nested tensor"):
            nsa(**packed("cpu") | dict(cu_seqlens=nested(dtype=torch.int32)))
        layer = NSAttention(8, num_heads=2, num_kv_heads=1)
        for x in (nested(8), torch.zeros(11, 8)):
            with pytest.raises(TypeError, match="^(x|cu_seqlens) must not be a nested tensor"):
                layer(x, cu_seqlens=None if x.is_nested else nested(dtype=torch.int32))


def test_a_graph_asserts_numbers() -> None:
    q, k = torch.zeros(40, 4, 8), torch.zeros(55, 2, 8)
    starts, of_keys = starts_of_lengths((0, 17, 23)), starts_of_lengths((9, 11, 35))
    lists = torch.tensor([[[1]] * 2] * 5 + [[[4]] * 2] * 6, dtype=torch.int32)
    spec = CallSpec(NSAConfig(block_size=4, q_tile=4), True, 1.0)

    def plain(q: Tensor, k: Tensor, lists: Tensor | None, *starts: Tensor | None, **more: int) -> None:
        named = dict(zip(("cu_seqlens", "cu_seqlens_k"), starts))
        assert_numbers(Call(q, k, k, block_indices=lists, spec=spec, **named), **more)

    call = torch.compile(plain, fullgraph=True, backend="aot_eager")
    call(q, k, lists, starts, of_keys)
    plain(q[None], k[None], lists[None] + 2, None)
    plain(q, k, None, starts, max_seqlen=23)
    wrong = {
        "cu_seqlens must start at 0, not fall, and end at the tokens": [
            (lists, starts.flip(0), of_keys),
            (None, starts + 1),
        ],
        "cu_seqlens_k must start at 0": [(lists, starts, of_keys + 1)],
        "block_indices must have a list for each tile": [(lists[:-1], starts)],
    }
    for match, arguments in wrong.items():
        for given in arguments:
            with pytest.raises(RuntimeError, match=match):
                (call if len(given) == 3 else plain)(q, k, *given)
    with pytest.raises(RuntimeError, match="max_seqlen must be at least the longest sequence"):
        plain(q, k, None, starts, max_seqlen=22)


ASSERTED = """
import torch
from nsa_layer import nsa
q, k = (torch.randn(300, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2))
call = torch.compile(lambda q, k, starts: nsa(q, k, k, cu_seqlens=starts, validate=True), fullgraph=True)
for turn, second in enumerate((100, 50, 301)):
    starts = torch.tensor([0, second, 300], dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error" if turn else "default")
    call(q, k, starts)
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    print("ran", second, flush=True)
"""


@pytest.mark.gpu
def test_the_gpu_asserts_numbers_of_a_graph() -> None:
    done = subprocess.run([sys.executable, "-c", ASSERTED], capture_output=True, text=True, timeout=240)
    print(done.stderr[-3000:])
    assert done.stdout.splitlines() == ["ran 100", "ran 50"] and done.returncode != 0, done.stdout + done.stderr
    assert "cu_seqlens must start at 0" in done.stderr and "device-side assert" in done.stderr, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["heads", "gather"])
def test_lists_of_ranks_may_have_any_numbers(mode: str) -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        cp = ContextParallel(dist.group.WORLD, mode=mode)
        q, k = (torch.randn(300, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2))
        lists = torch.zeros(300, 2, 1, dtype=torch.int32, device="cuda")
        packed = dict(cu_seqlens=starts_of_lengths((100, 200), "cuda"), block_indices=lists, cp=cp)
        for call in (nsa, partial(selected_attention, block_size=64)):
            lists[99] = -1
            expected = call(q, k, k, **packed, validate=True)
            for number in (2, 2**31 - 1):  # the first sequence has two blocks
                lists[99] = number
                assert call(q, k, k, **packed, validate=True).equal(expected)
    finally:
        dist.destroy_process_group()
