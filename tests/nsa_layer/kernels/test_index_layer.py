"""The layer whose blocks an index of tokens chooses, on the kernels: traced. Its numbers: `test_cute`."""

# What runs in a worker is imported there, so nothing up here may ask for the kernels.
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fa_compile import Worker
from kernel_cases import faked

from nsa_layer import NSAConfig
from nsa_layer.call import Call
from nsa_tools.testing.cases import Case, make_inputs

INDEX = NSAConfig(rule="index", branches=("selected",), block_counts=5)
LAYERS = {
    "batch": Case(T=1500, Hq=32, Hkv=8, D=64, config=INDEX, index_dim=32),
    "packed": Case(lengths=(700, 0, 1, 64, 900), Hq=8, D=64, config=INDEX.replace(block_size=16), index_dim=64),
}
LAYERS = {name: replace(case, dtype=torch.bfloat16, gate="none", index_loss=False) for name, case in LAYERS.items()}


def traced_layer(name: str) -> list[tuple[int, ...]]:
    """In a worker: shapes of the output, the lists and the gradients that the kernels give."""
    from flash_attn.cute.runtime.kernel_cache import at_first_miss
    from nsa_layer.cute.memory_plan import MemoryPlan
    from nsa_layer.cute.pages import backward, forward

    inputs, case = faked(lambda: make_inputs(LAYERS[name])), LAYERS[name]
    call = Call(**inputs.tensors(), cu_seqlens=inputs.cu_seqlens, spec=case.spec)
    plan = MemoryPlan(((0, case.Hkv),), (False,) * 3)
    with at_first_miss(lambda: None):
        o, saved = forward(call, plan=plan)
        grads = backward(call, saved, torch.empty_like(o), o=o, plan=plan)
    return [tuple(x.shape) for x in (o, saved.block_indices, *grads) if x is not None]


@pytest.mark.parametrize("name", LAYERS)
def test_the_layer_is_traced(name: str, compiler: Worker) -> None:
    case, inputs = LAYERS[name], make_inputs(LAYERS[name])
    lists = (*inputs.q.shape[:-2], case.Hkv, case.config.list_width(max(case.lengths or (case.T,))))
    shapes = [inputs.q.shape, lists, *(x.shape for x in (inputs.q, inputs.k, inputs.v))]
    assert compiler.trace(traced_layer, name) == [tuple(shape) for shape in shapes]
