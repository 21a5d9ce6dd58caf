"""One exchange of a call's description, so that ranks that disagree get an error instead of waiting for one another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist

from nsa_layer.context_parallel.spec import ContextParallel, require_initialized
from nsa_layer.operators.registration import is_recorded

CAPACITY = 1024
# Descriptions that all ranks of a group have had; an equal call of tensors on a GPU exchanges nothing, or validates.
_agreed: set[tuple[str, tuple[tuple[str, str], ...]]] = set()


def agree(
    cp: ContextParallel, checks: Sequence[Callable[[], object]], *, ragged: Sequence[str] = (), **arguments: object
) -> None:
    """Compare a call's arguments with those of the other ranks, on GPUs at the first call like it; in a graph never.

    Every call is compared on a CPU, where gloo ends the process if a peer sends more than is expected, and on a GPU
    with ``validate``, outside graphs: numbers may be wrong on one rank alone. Where calls are compared, so are the
    numbers of ``cu_seqlens`` on a CPU, and with ``validate`` those on a GPU, which waits for it.

    Args:
        checks: raise what is wrong with this rank's arguments, where calls are compared.
        ragged: names of the arguments of which ranks may have different numbers of rows.
        arguments: of the call, by name.

    Raises:
        TypeError: cp is no ContextParallel.
        RuntimeError: torch.distributed is not initialised; or the first call like it is captured in a CUDA graph.
        ValueError: the ranks' shapes, dtypes, options, packed sequences or need of gradients differ, not all are in a
            mode of PyTorch's dispatcher, or some rank's arguments are bad: on every rank.
    """
    if not isinstance(cp, ContextParallel):
        raise TypeError(f"cp must be a ContextParallel or None, got {type(cp).__name__}")
    if torch.compiler.is_compiling():
        return
    require_initialized()
    recorded = torch.is_grad_enabled()
    arguments |= {f"cp.{name}": getattr(cp, name) for name in ("mode", "load_balance")}
    # Those in a mode exchange by collectives, and so do tensors of classes of their own.
    arguments["being in a mode of PyTorch's dispatcher"] = is_recorded(arguments.get("q"))
    described = tuple((name, _described(value, recorded, ragged=name in ragged)) for name, value in arguments.items())
    key = (cp.group_name, described)
    known = key in _agreed and any(isinstance(x, torch.Tensor) and x.is_cuda for x in arguments.values())
    if known and not arguments.get("validate"):
        return
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        if known:
            return
        raise RuntimeError("a call with these shapes is captured in a CUDA graph before it was made once")
    wrong, starts = None, arguments.get("cu_seqlens")
    try:
        for check in checks:
            check()
        if starts is not None and (starts.is_cpu or arguments.get("validate")):
            sequences = enumerate(pairwise(starts.tolist()))
            described = *described, *((f"the tokens of sequence {i} in cu_seqlens", pair) for i, pair in sequences)
    except Exception as error:  # whatever it is, the other ranks wait to hear of it
        wrong = error
    answers: list = [None] * cp.size
    dist.all_gather_object(answers, (described, wrong and str(wrong)), group=cp.group)
    for rank, (theirs, _) in enumerate(answers):
        for (name, first), (_, value) in zip(answers[0][0], theirs):
            if first != value:
                raise ValueError(f"ranks disagree on {name}: rank 0 has {first}, rank {rank} has {value}") from wrong
    if wrong is not None:
        raise wrong
    for rank, (_, said) in enumerate(answers):
        if said is not None:
            raise ValueError(f"rank {rank}: {said}")
    if len(_agreed) >= CAPACITY:
        _agreed.clear()
    _agreed.add(key)


def _described(value: object, recorded: bool, *, ragged: bool) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    if value.is_nested:
        return "a nested tensor"  # whose shape cannot be asked for
    gradient = " with a gradient" if recorded and value.requires_grad else ""
    shape = f"(.., {', '.join(map(str, value.shape[-2:]))})" if ragged else str(tuple(value.shape))
    return f"{value.dtype} {shape} on {value.device.type}{gradient}"
