"""`selected_attention` of a rank's tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nsa_layer import autocast
from nsa_layer.call_spec import DIFFERENTIABLE, SELECTED_ALONE, CallSpec, CallTensors, Saved
from nsa_layer.checks import check_lists, check_qkv, check_scale
from nsa_layer.config import WIDEST_TILE, ListConfig
from nsa_layer.context_parallel import graph, overlapped
from nsa_layer.context_parallel.heads import Tokens, over_heads
from nsa_layer.context_parallel.overlapped import Call, Left, Places
from nsa_layer.context_parallel.rows import Rows, of_tiles
from nsa_layer.context_parallel.spec import ContextParallel
from nsa_layer.context_parallel.stretches import stretches_of_ranks
from nsa_layer.context_parallel.whole import check_tokens, whole_lengths
from nsa_layer.operators.arguments import schema_of, static_arguments
from nsa_layer.operators.layer import NOTHING
from nsa_layer.operators.registration import LIBRARY, OPS, is_recorded

Tensor = torch.Tensor
CONFIG = "int block_size, int q_tile, bool causal, float softmax_scale"


def check(
    cp: ContextParallel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    cu_seqlens: Tensor | None,
    *,
    apart: bool = False,
    read: bool = True,
) -> tuple[Rows, int]:
    """Rows of lists and queries of a tile; errors before anything is sent.

    Args:
        apart: keys were given starts, or queries an offset.
        read: the numbers of ``cu_seqlens``, which a graph does not.
    """
    check_qkv(q, k, v, packed=cu_seqlens is not None)
    cp.mode_of(k.shape[-2])
    tokens, local, packed = check_tokens(q.shape[-3], cp), q.shape[-3], cu_seqlens is not None
    if apart:
        raise ValueError("cp: queries are those of all keys; cu_seqlens_k and q_offset must be None")
    lengths: tuple[int, ...] | None = (local * cp.size,)
    if packed:
        read = read and not torch.compiler.is_compiling()
        lengths = whole_lengths(cu_seqlens, q, cp) if read else None
    given = getattr(block_indices, "shape", ())
    q_tile = 1 if len(given) != q.dim() or given[-3] == local else _tile_of(given[-3], tokens, packed=packed)
    rows = tokens if q_tile == 1 else of_tiles(cp, lengths, tokens.counts[0], q_tile)
    check_lists(block_indices, q, k.shape[-2], [local // q_tile], packed=packed)
    return rows, q_tile


def _tile_of(lists: int, tokens: Rows, *, packed: bool) -> int:
    """Queries of a tile, where a rank has so many lists."""
    chunk, local = tokens.counts[0], sum(tokens.of_rank(0))
    tiles = (1 << i for i in range(1, min(WIDEST_TILE, chunk).bit_length()))
    for q_tile in tiles if not packed else ():
        if not chunk % q_tile and local // q_tile == lists:
            return q_tile
    raise ValueError(
        f"block_indices must have a list for each of the rank's {local} queries, or, not packed, for each tile of its "
        f"chunks of {chunk}, got {lists} lists"
    )


def attend(
    selected_attention: Callable[..., Any],
    cp: ContextParallel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    *,
    name: str,
    cu_seqlens: Tensor | None,
    block_size: int,
    softmax_scale: float | None,
    causal: bool,
    return_lse: bool,
    validate: bool,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`selected_attention`, which is given, of a rank's tokens; arguments as there, and the backend's name."""
    packed = cu_seqlens is not None
    on_gpu = packed and cu_seqlens.is_cuda
    lists, q_tile = check(cp, q, k, v, block_indices, cu_seqlens, read=validate or not on_gpu)
    if cp.mode_of(k.shape[-2]) == "heads":
        tokens, options = Rows.of_tokens(cp, q.shape[-3]), options | dict(causal=causal, return_lse=True)
        options |= dict(block_size=block_size, softmax_scale=softmax_scale, validate=validate)

        def call(**tensors: Tensor) -> list[Tokens]:
            o, lse = selected_attention(**tensors, cu_seqlens=cu_seqlens, **options)
            return [Tokens(o, tokens), *([Tokens(lse.mT, tokens)] if return_lse else [])]

        parts = {name: Tokens(x, tokens) for name, x in dict(q=q, k=k, v=v).items()}
        parts["block_indices"] = Tokens(block_indices, lists)
        o, *lses = over_heads(call, cp, parts, {}, packed=packed, heads=k.shape[-2])
        return (o, lses[0].mT.contiguous()) if return_lse else o
    spec = _spec(block_size, q_tile, causal, check_scale(softmax_scale, q.shape[-1]))
    given = CallTensors(q, k, v, cu_seqlens=cu_seqlens, block_indices=block_indices)
    if name == "reference":
        raise NotImplementedError("cp: mode='gather' with backend='reference'")
    with autocast.off(q.device):
        o, lse = (_attend_in_graph if is_recorded(q) else _attend_here)(cp, name, given, spec)
    return (o, lse) if return_lse else o


def _attend_in_graph(cp: ContextParallel, backend: str, given: CallTensors, spec: CallSpec) -> tuple[Tensor, Tensor]:
    tensors = (given.q, given.k, given.v, given.block_indices, given.cu_seqlens)
    static = (spec.config.block_size, spec.q_tile, spec.causal, spec.softmax_scale)
    return OPS.gathered_lists.default(*tensors, *static, backend, *graph.names_of(cp))


def _gathered_lists(*args: Any) -> tuple[Tensor, Tensor]:
    *tensors, block_size, q_tile, causal, softmax_scale, backend = args[:-4]
    q, k, v, block_indices, cu_seqlens = map(graph.of_one_shape, tensors)
    given = CallTensors(q, k, v, cu_seqlens=cu_seqlens, block_indices=block_indices)
    spec = _spec(int(block_size), int(q_tile), causal, float(softmax_scale))
    return _attend_here(graph.ranks_of(*args[-4:]), backend, given, spec)


def _attend_here(cp: ContextParallel, backend: str, given: CallTensors, spec: CallSpec) -> tuple[Tensor, Tensor]:
    """o and the LSE of a rank's queries, in a graph as it is made of exchanges and of attention."""
    stretches = stretches_of_ranks(cp, given.q.shape[-3], None, cut=False)
    call = ListCall(**Call.common(cp, backend, given, stretches, blocks=None, of_keys=("k", "v")), spec=spec)
    o, lses = overlapped.attend(call, given, return_more=True)
    return o, torch.cat([lse for (lse,) in lses], -1)


def _spec(block_size: int, q_tile: int, causal: bool, softmax_scale: float) -> CallSpec:
    config = ListConfig(block_size=block_size, q_tile=q_tile, window_size=0)
    return CallSpec(config, causal, softmax_scale, listed=True, branches=SELECTED_ALONE)


@dataclass(frozen=True)
class ListCall(Call):
    """A call of `selected_attention`, to which lengths of packed sequences are not known: they are one to stretches."""

    spec: CallSpec

    def places(self, given: CallTensors, step: int, number: int) -> Places:
        (_, of_q, of_lists), queries, tile = self.rows(given, step), self.stretches[number].queries, self.spec.q_tile
        lists = slice(queries.start // tile, queries.stop // tile)
        return dict(q=(slice(None), queries, of_q), block_indices=(slice(None), lists, of_lists))

    def forward(self, part: CallTensors, number: int, o: Tensor, *, backward: bool) -> Left:
        made, *left = OPS.attend.default(*self._placed(part, number), *self._static(backward))
        o.copy_(made)
        return made if self.backend == "cute" else None, *left

    def gradients(
        self, part: CallTensors, number: int, do: Tensor, left: Left, dq: Tensor
    ) -> tuple[Tensor | None, ...]:
        placed, count = self._placed(part, number), len(DIFFERENTIABLE)
        given = (*placed[:count], placed.block_indices, placed.q_offset, *left, *self._static(True))
        found = OPS.attend_backward.default(do, *given, [x is not None for x in placed[:count]])
        dq.copy_(found[0])
        return found

    def joined(self, left: Sequence[Left], q: Tensor) -> tuple[Tensor, ...]:
        """The LSE."""
        at = 1 + Saved._fields.index("lse_slc")
        return (torch.cat([each[at] for each in left], -2),)

    def _static(self, backward: bool) -> tuple[Any, ...]:
        return *static_arguments(self.spec).values(), self.backend, 1, None, NOTHING, None, backward

    def _placed(self, part: CallTensors, number: int) -> CallTensors:
        """The part's tensors as the operator takes them, with positions of the first queries."""
        q, begin, starts = part.q, self.stretches[number].lengths[0][2], part.cu_seqlens
        if starts is None:
            first = torch.full((len(q),), begin, dtype=torch.int32, device=q.device)
            return part._replace(q_offset=first)
        of_queries = starts.clamp(begin, begin + len(q)) - begin
        first = (begin - starts[:-1]).clamp(min=0).to(q.device)
        return part._replace(q_offset=first, cu_seqlens=of_queries, cu_seqlens_k=starts)


LIBRARY.define(
    f"gathered_lists({schema_of('qkv')}, Tensor block_indices, Tensor? cu_seqlens, {CONFIG}, str backend, "
    f"{graph.RANKS}) -> (Tensor, Tensor)"
)
LIBRARY.impl("gathered_lists", _gathered_lists, "CompositeImplicitAutograd")
