"""The first calls of a process import nothing that only compiling needs, if the kernels are compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from nsa_layer.warm_up.lookup import ENVIRONMENT

STEPS = """
import sys
import torch
import nsa_layer
assert "cutlass" not in sys.modules, "imported with the layer"
from stub_kernels import LAUNCHED, stubs
from nsa_layer import NSAConfig
from nsa_layer.call_spec import CallTensors
from nsa_tools.testing.cases import Case, make_inputs

import flash_attn.cute.interface
import nsa_layer.cute.head_groups
from nsa_layer.operators import attend

for lengths in (None, (300, 0, 70)):
    case = Case(T=300, Hq=4, Hkv=2, D=128, dtype=torch.bfloat16, lengths=lengths)
    inputs = make_inputs(case)
    leaves = {name: x.requires_grad_() for name, x in inputs.tensors().items()}
    tensors = CallTensors(**leaves, cu_seqlens=inputs.cu_seqlens)
    for _ in range(3):
        with stubs():
            o, _ = attend(tensors, spec=case.spec)
            (o * inputs.do).sum().backward()  # given a gradient, PyTorch itself imports sympy
assert len(LAUNCHED) > 60, len(LAUNCHED)
print(*sorted({"quack", "triton", "sympy", "torch._dynamo", "torch._inductor"} & set(sys.modules)))
from nsa_layer.kernels import launch
launch._load_or_compile("none", ("key",), lambda: print("quack is there:", "quack" in sys.modules))
"""


def test_steps_with_compiled_kernels_import_no_compiler() -> None:
    """But what compiles finds quack there: without it the DSL takes less of Python."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = os.environ | ENVIRONMENT[90] | {"PYTHONPATH": path}
    result = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["", "quack is there: True"]
