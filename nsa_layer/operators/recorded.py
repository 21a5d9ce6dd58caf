"""Gradients of plain PyTorch inside an operator, where autograd does not record by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from nsa_layer.operators.arguments import Tensor, Tensors, apart


def lse_sizes(q: Tensor, lengths: Sequence[int] | None, branches: int) -> list[int]:
    """Elements of each log-sum-exp that a call notes."""
    if lengths is None:
        return [q.shape[:-1].numel()] * branches
    return [length * q.shape[-2] for length in lengths if length for _ in range(branches)]


@contextmanager
def recording() -> Iterator[None]:
    """Within, operators record gradients, also in a kernel of an operator, which PyTorch runs below autograd."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    # A caller's hooks are for what the caller's graph saves; torch.func takes none.
    allowed = torch._C._autograd._saved_tensors_hooks_is_enabled()
    as_it_is = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x) if allowed else nullcontext()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad(), as_it_is:
        yield


def leaves_of(inputs: Tensors, needs: Sequence[bool]) -> list[Tensor | None]:
    return [None if x is None else x.detach().requires_grad_(need) for x, need in zip(inputs, needs, strict=True)]


def gradients_of(leaves: Tensors, outputs: Sequence[Tensor], given: Tensors) -> tuple[Tensor | None, ...]:
    """The leaves' gradients, contiguous; None for those that need none."""
    asked = [x for x in leaves if x is not None and x.requires_grad]
    pairs = [(o, do) for o, do in zip(outputs, given, strict=True) if do is not None and o.requires_grad]
    outputs, given = zip(*pairs) if pairs else ((), ())
    found = iter(torch.autograd.grad(outputs, asked, given, allow_unused=True) if pairs else [None] * len(asked))
    gradients = []
    for x in leaves:
        d = next(found) if x is not None and x.requires_grad else None
        gradients.append(None if x is None or not x.requires_grad else _filled(d, x))
    return tuple(gradients)


def _filled(d: Tensor | None, x: Tensor) -> Tensor:
    if d is None:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    return next(apart([d]))
