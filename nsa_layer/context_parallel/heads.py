"""Mode "heads": each rank attends with all tokens of a part of the heads, between two all-to-alls.

Source: arXiv:2309.14509.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial

import torch

from nsa_layer.call import Aux, Call
from nsa_layer.context_parallel.checks import KINDS, TOKENS, WEIGHTS
from nsa_layer.context_parallel.gather import kept_of_shard
from nsa_layer.context_parallel.layout import ShardLayout, head_steps
from nsa_layer.context_parallel.spec import ContextParallel
from nsa_layer.context_parallel.transport import Linear, copy, exchange, start_exchange
from nsa_layer.cute.memory_plan import MemoryPolicy
from nsa_layer.operators.registration import dispatcher_sees

Tensor = torch.Tensor
Attended = tuple[Tensor, Aux | None, Tensor | None]  # as of `operators.attend`
AUX = tuple(f.name for f in fields(Aux))


def attend_heads(
    attend: Callable[[Call], Attended],
    cp: ContextParallel,
    call: Call,
    layouts: dict[str, ShardLayout],
    results: Sequence[str],
) -> Attended:
    """All-to-all from tokens to heads, a call of all tokens of a few heads, all-to-all back; some heads at a time.

    Args:
        attend: of some heads. Weights get gradients of this rank's heads alone.
        call: this rank's rows [B, n, H, ...], packed [n, H, ...], in these layouts; weights are the same on every rank.
        results: fields of `Aux` that are exchanged.

    Returns:
        As of `attend`: this rank's rows of all heads, and the sums of its heads.
    """
    packed, in_graph, steps = call.packed, dispatcher_sees(call.q), step_sizes(call, layouts[TOKENS], cp)
    tensors = {name: x for name in (*KINDS, *WEIGHTS) if (x := getattr(call, name)) is not None}
    rows = {name: x[None] if packed else x for name, x in tensors.items() if name in KINDS}

    def sizes(count: int) -> list[int]:
        """Each step's part of a rank's heads, of a tensor of `count` heads in all."""
        return [size * count // call.k.shape[-2] for size in steps]

    def split(x: Tensor) -> Sequence[Tensor]:
        """[B, n, H, ...] by step, each [B, n, R, h, ...]."""
        if in_graph:
            return (x.unflatten(2, (cp.size, -1)),)
        maps = (partial(each, sizes(x.shape[2])) for each in (_split_heads, _join_heads))
        return Linear.apply(*maps, x)

    def join(*xs: Tensor) -> Tensor:
        """The inverse of `split`."""
        if in_graph:
            return xs[0].flatten(2, 3)
        maps = (partial(each, [x.shape[3] for x in xs]) for each in (_join_heads, _split_heads))
        return Linear.apply(*maps, *xs)[0]

    def send(way: str, tensors: dict[str, Tensor]) -> Callable[[], Sequence[Tensor]]:
        """Start an exchange, outside graphs; returns the function that waits."""
        arguments = way, list(tensors.values()), [layouts[KINDS.get(name, TOKENS)] for name in tensors]
        return partial(exchange, *arguments) if in_graph else start_exchange(*arguments)

    parts = {name: split(x) for name, x in rows.items()}
    weights = {name: tensors[name].unflatten(0, (cp.size, -1))[cp.rank] for name in WEIGHTS if name in tensors}
    weights = {name: w.split(sizes(len(w) * cp.size)) for name, w in weights.items()}
    # Backward goes in the opposite order, so that there, too, exchanges start before the attention beside them.
    started, answers, sums = [], [], []
    for step in range(len(steps) + 1):
        if step < len(steps):
            started.append(send("to_heads", {name: of_steps[step] for name, of_steps in parts.items()}))
        if step == 0:
            continue
        here = {name: x[0] if packed else x for name, x in zip(rows, started.pop(0)())}
        here |= {name: w[step - 1] for name, w in weights.items()}
        o, aux, of_loss = attend(call._replace(**here))
        named = dict(o=o) | {name: getattr(aux, name) for name in results}
        outputs = {name: x.mT if name.startswith("lse") else x for name, x in named.items() if x is not None}
        sums.append(of_loss)
        answers.append(send("to_tokens", {name: x[None] if packed else x for name, x in outputs.items()}))
    joined = [join(*parts) for parts in zip(*[receive() for receive in answers])]
    outputs = {name: x[0] if packed else x for name, x in zip(outputs, joined)}
    outputs |= {name: x.mT.contiguous() for name, x in outputs.items() if name.startswith("lse")}
    o, sums = outputs.pop("o"), None if of_loss is None else torch.stack(sums).sum(0)
    return o, Aux(**dict.fromkeys(AUX) | outputs) if results else None, sums


def step_sizes(call: Call, tokens: ShardLayout, cp: ContextParallel) -> list[int]:
    """Key/value heads of each call that a rank makes: some at a time in long calls on a GPU, outside graphs."""
    heads = call.k.shape[-2] // cp.size
    if not call.q.is_cuda or dispatcher_sees(call.q):
        return [heads]
    return [end - first for first, end in head_steps(heads, tokens.total)]


def memory_of_steps(call: Call, tokens: ShardLayout, cp: ContextParallel, memory: MemoryPolicy) -> MemoryPolicy:
    """One plan for all steps, by the memory of all: else the first would use the memory that the last one needs."""
    chosen = call.one_branch or memory.recompute != "auto" or memory.budget is not None
    if chosen or len(step_sizes(call, tokens, cp)) == 1:
        return memory
    kept = kept_of_shard(call, tokens.total, memory, queries=tokens.total, ranks=cp.size)
    return replace(memory, recompute="none" if all(kept) else "all")


def _split_heads(sizes: list[int], x: Tensor) -> tuple[Tensor, ...]:
    """x [B, n, H, ...] by step, each [B, n, R, h, ...]."""
    return x.unflatten(2, (-1, sum(sizes))).split(sizes, 3)


def _join_heads(sizes: list[int], *xs: Tensor) -> list[Tensor]:
    """The inverse of `_split_heads`; PyTorch's own would copy by element."""
    B, n, R, _, *rest = xs[0].shape
    whole = xs[0].new_empty((B, n, R * sum(sizes), *rest))
    for into, x in zip(_split_heads(sizes, whole), xs, strict=True):
        copy(into, x)
    return [whole]
