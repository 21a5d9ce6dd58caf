"""Calls of the layer's operator for tests, and contexts on a GPU: captures, and no waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from nsa_layer.cached_call import check_call
from nsa_layer.call import COMPRESSED_CACHES, TOKEN_CACHES, Call
from nsa_layer.config import NSAConfig
from nsa_layer.operators import static_arguments
from nsa_layer.operators.layer import STATIC_NAMES
from nsa_tools.testing.cases import Case, make_inputs

Tensor = torch.Tensor
CACHED = Case(
    B=2, T=20, D=8, dtype=torch.float64, config=NSAConfig(block_size=8, block_counts=4, window_size=8), gate="none"
)


def cached_arguments(case: Case = CACHED, S: int = 32, device: str = "cpu", beside: int = 0) -> dict[str, Any]:
    """Arguments of `nsa_with_kvcache` on contiguous caches that hold nothing yet, and are full of NaN; their rows start
    behind others of `beside` numbers."""
    given, stride = make_inputs(case, device).tensors(), case.config.stride
    for name in COMPRESSED_CACHES:
        if name in given:  # with a row for each block that as many tokens can complete
            x = given[name]
            given[name] = F.pad(x, (0, 0, 0, 0, 0, -(-case.T // stride) - x.shape[1]), value=torch.nan)
    for name in (*TOKEN_CACHES, *COMPRESSED_CACHES):
        (B, _, H, D), slots = given[name if name in given else name[0]].shape, S // stride if "cmp" in name else S
        if name in given or "cmp" in name and case.config.computes("compressed"):
            given[f"{name}_cache"] = given["q"].new_full((B, slots, H, beside + D), torch.nan)[..., beside:]
    return given | dict(config=case.config, cache_seqlens=torch.zeros(case.B, dtype=torch.int32, device=device))


def operator_call(
    case: Case,
    device: str = "cpu",
    *,
    backend: str = "eager",
    grads: Iterable[str] | None = None,
    lists: int = 0,
    by_head: bool = False,
    alone: bool = False,
    kept: Iterable[bool] = (False,) * 3,
    **static: Any,
) -> tuple[Call, dict[str, Any]]:
    """Tensors and static arguments of `OPS.attend`; heads come first in memory.

    Args:
        grads: names of tensors that need a gradient; None: all.
        lists: entries of each list, all of block 0; 0: none are given. by_head: each query head has one.
        alone: the call is one of `selected_attention`.
        static: other values of static arguments.
    """
    inputs, options = make_inputs(case, device), dict(heads=None, budget=None, bound=None, needs_grad=True)
    tensors, spec = inputs.tensors(), replace(case.spec, lengths=None)
    tensors = {n: x.transpose(-2, -3).contiguous().transpose(-2, -3) for n, x in tensors.items()}
    if alone:
        tensors = {name: tensors[name] for name in "qkv"}
        sizes = dict(block_size=case.config.block_size, q_tile=case.config.q_tile, window_size=0)
        spec = replace(spec, config=NSAConfig(**sizes, branches=("selected",)))
    for name, x in tensors.items():
        x.requires_grad_(grads is None or name in grads)
    if lists:
        tiles = list(map(case.config.num_tiles, case.lengths or (case.T,)))
        lead = (case.B, *tiles) if case.lengths is None else (sum(tiles),)
        heads = case.Hq if by_head else case.Hkv
        tensors["block_indices"] = torch.zeros(*lead, heads, lists, dtype=torch.int32, device=device)
    options |= dict(kept=list(kept)) | static
    spec = replace(spec, backend=backend)
    return Call(**tensors, cu_seqlens=inputs.cu_seqlens), static_arguments(spec) | options


def gradients(o: Tensor, *of: Tensor, do: Tensor | None = None) -> list[Tensor]:
    """The output, and gradients by `do`, or of its square."""
    return [o, *torch.autograd.grad(o.float().square().sum() if do is None else o, of, do)]


def step(call: Callable[..., Tensor], of: Iterable[Tensor], do: Tensor | None = None, **given: object) -> list[Tensor]:
    """`gradients` of a call, in memory of their own."""
    return [x.detach().clone() for x in gradients(call(**given), *of, do=do)]


def assert_near(got: Iterable[Tensor], want: Iterable[Tensor]) -> None:
    for i, (x, y) in enumerate(zip(got, want, strict=True)):
        if x.device.type == "cpu":
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
        else:
            error = (x.float() - y.float()).norm() / y.float().norm().clamp(min=1e-6)
            assert x.dtype == y.dtype and error < 0.02, (i, float(error))


def checked_call(given: dict[str, Any], **how: Any) -> Call:
    """The checked call of these arguments of `nsa_with_kvcache`; options as of `check_call`."""
    static = {name: given[name] for name in ("config", "softmax_scale", "max_seqlen_q", "out") if name in given}
    return check_call(Call.of(given | dict(cu_seqlens=given.get("cu_seqlens_q"))), **static, **how)


class Noted(TorchDispatchMode):
    """Operators of a namespace that are called within, with their arguments."""

    def __init__(self, namespace: str = "nsa_layer") -> None:
        super().__init__()
        self.calls: list[tuple[torch._ops.OpOverload, tuple, dict]] = []
        self.namespace = namespace

    @property
    def names(self) -> list[str]:
        return [op._opname for op, *_ in self.calls]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == self.namespace:
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def needs_hopper() -> None:
    """Skip a test on a GPU of what only Hopper's kernels do."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")


@contextmanager
def no_waits() -> Iterator[None]:
    """Within, it is an error to wait for the GPU."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def deterministic() -> Iterator[None]:
    """Within, PyTorch is told to be deterministic; new tensors are full of NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def by_place(static: dict) -> list:
    """The operator's arguments that are no tensors, in order."""
    return [static[name] for name in (*STATIC_NAMES, "heads", "budget", "kept", "bound", "needs_grad")]


def forced_blocks(own: range, blocks: int, config: NSAConfig, *, causal: bool) -> list[int]:
    """Blocks that a tile lists in any case, the first to be listed first; own: blocks of its tokens."""
    reach = range(own[0] - config.local_blocks + 1, own[-1] + 1) if config.local_blocks else ()
    first = range(min(config.init_blocks, blocks))
    before = {j for j in (*reach, *first) if 0 <= j <= own[-1]}
    behind = [] if causal else [j for j in first if j > own[-1]]
    return [*sorted(before, reverse=True), *behind][: config.block_counts]
