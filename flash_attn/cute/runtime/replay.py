"""Attention calls that were made before, with other tensors of the same sizes: launched again without the host's work.

What `_flash_attn_fwd` launches follows from its options and from sizes, strides and dtypes. The first call notes the
kernel and its arguments; a later call that differs in addresses alone puts its own tensors there. Calls that make
tensors on the way are never repeated.
"""

import threading
from typing import Any, Callable, NamedTuple, Optional, Tuple

import torch

from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

MOST = 256  # calls that are kept

Tensor = torch.Tensor
_noted = threading.local()
_calls: dict[tuple, "_Call"] = {}


class _Slot(int):
    """The number of a tensor among a call's, which end with o and lse."""


class _Call(NamedTuple):
    """A launch that can be made again."""

    compiled: Callable[..., None]  # the kernel
    arguments: tuple  # its arguments; a `_Place` stands for a tensor of the call
    o: torch.Size  # o, lse: shapes of the outputs
    lse: torch.Size
    cache: object  # the cache that the kernel is from, kept so that no other object takes its id

    def launch(self, tensors: list[Tensor], into: Optional[Tuple[Tensor, Tensor]]) -> Tuple[Tensor, Tensor]:
        if into is None:
            q = tensors[0]
            o = torch.empty(self.o, dtype=q.dtype, device=q.device)
            into = o, torch.empty(self.lse, dtype=torch.float32, device=q.device)
        given = [*(x.detach() if x.requires_grad else x for x in tensors), *into]
        self.compiled(*(_filled(x, given) for x in self.arguments))
        return into


def note(compiled: Callable[..., None], arguments: list) -> None:
    """`_flash_attn_fwd` is about to launch a kernel."""
    if (launches := getattr(_noted, "launches", None)) is not None:
        launches.append((compiled, arguments))


def attend(
    q: Tensor, k: Tensor, v: Tensor, into: Optional[Tuple[Tensor, Tensor]] = None, **options: Any
) -> Tuple[Tensor, Tensor]:
    """o and lse of `_flash_attn_fwd` of q, k, v and options, in ``into`` if given; q's GPU must be the current one."""
    from flash_attn.cute.interface import _flash_attn_fwd

    tensors, static, cache = [q, k, v], [], _flash_attn_fwd.compile_cache
    for name, value in options.items():
        for x in value if isinstance(value, BlockSparseTensorsTorch) else (value,):
            if isinstance(x, Tensor):
                tensors.append(x)
                static.append(name)
            else:
                static.append(x if x is not value else (name, x))
    outputs = {} if into is None else dict(out=into[0], lse=into[1])
    if any(type(x) is not Tensor for x in tensors) or any(isinstance(x, list) for x in options.values()):
        return _flash_attn_fwd(q, k, v, return_lse=True, **outputs, **options)[:2]
    sizes = [(x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in tensors]
    key = (id(cache), q.device, *static, *sizes)
    call = _calls.get(key)
    if call is not None:
        return call.launch(tensors, into)
    _noted.launches = launches = []
    try:
        o, lse = _flash_attn_fwd(q, k, v, return_lse=True, **outputs, **options)[:2]
    finally:
        _noted.launches = None
    if len(launches) == 1:
        compiled, arguments = launches[0]
        arguments = _with_slots(tuple(arguments), [*tensors, o, lse])
        if arguments is not None:
            if len(_calls) >= MOST:
                _calls.clear()
            _calls[key] = _Call(compiled, arguments, o.shape, lse.shape, cache)
    return o, lse


def _with_slots(arguments: tuple, tensors: list[Tensor]) -> Optional[tuple]:
    """Arguments with slots in place of tensors; None where one is not among them, or is there twice."""
    same = {(x.data_ptr(), x.shape, x.stride(), x.dtype): _Slot(i) for i, x in enumerate(tensors)}
    if len(same) < len(tensors):
        return None
    found = []
    for x in arguments:
        if isinstance(x, Tensor):
            x = same.get((x.data_ptr(), x.shape, x.stride(), x.dtype))
            if x is None:
                return None
        elif type(x) is tuple:
            x = _with_slots(x, tensors)
            if x is None:
                return None
        found.append(x)
    return tuple(found)


def _filled(x: Any, tensors: list[Tensor]) -> Any:
    if type(x) is _Slot:
        return tensors[x]
    return tuple(_filled(part, tensors) for part in x) if type(x) is tuple else x
