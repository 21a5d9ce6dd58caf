"""Mode "gather": each rank attends with its own queries to the keys and values of all ranks.

Compressed keys are made by the rank that holds a block's first token. In graphs, which the compiler makes of all this,
exchanges are collectives and attention is operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from nsa_layer.block_mlp import compressed
from nsa_layer.call_spec import SELECTED_ALONE, Aux, CallSpec, CallTensors, require_choice_by_token
from nsa_layer.config import ListConfig, NSAConfig
from nsa_layer.context_parallel.gather_loop import WINDOW, GatherCall, attend_in_steps
from nsa_layer.context_parallel.halo import compress_shard, mean_pool_on_kernels, with_halo
from nsa_layer.context_parallel.layout import QueryShard, ShardLayout, head_steps, query_shards
from nsa_layer.context_parallel.spec import ContextParallel
from nsa_layer.cute.memory_plan import MemoryPolicy, Sizes, kept_in_graphs, plan_memory
from nsa_layer.operators.registration import is_recorded

Tensor = torch.Tensor
LONG = 1 << 18  # tokens of all ranks from which on this mode was measured to be faster than "heads"


def is_better(cp: ContextParallel, tensors: CallTensors, config: NSAConfig) -> bool:
    """True if this mode is better than "heads", where both fit: outside graphs, in long calls of which it sends less.

    Each of R ranks sends a share of (R - 1) / R: with "heads" of q, k, v, o and their gradients of its own tokens, with
    "gather" of k and v of all tokens, twice, and of their gradients once.
    """
    (q, k), starts = tensors[:2], tensors.cu_seqlens
    if is_recorded(q) or not config.by_token or (starts is not None and starts.is_cuda):
        return False
    Hq, Hkv = q.shape[-2], k.shape[-2]
    return q.shape[-3] * cp.size >= LONG and 3 * Hkv * cp.size < 2 * (Hq + Hkv)


def attend(
    cp: ContextParallel,
    backend: str,
    tensors: CallTensors,
    *,
    spec: CallSpec,
    memory: MemoryPolicy = MemoryPolicy(),
    needs_grad: bool = True,
    return_aux: bool = True,
) -> tuple[Tensor, Aux | None]:
    """`nsa` on a rank's queries; arguments as `nsa` has checked them, ``spec`` of the whole call.

    Raises:
        NotImplementedError: queries choose by tile, or have lists of tiles that chunks cut; or a graph would have to
            know lengths.
    """
    packed, config, listed = tensors.cu_seqlens is not None, spec.config, tensors.block_indices is not None
    tensors, in_graph, gathered = _with_fixed_sizes(tensors), is_recorded(tensors.q), ("k", "v")
    local = tensors.q.shape[-3]
    if in_graph and packed:  # operators read lengths when they run
        spec, tensors = replace(spec, lengths=None), tensors._replace(cu_seqlens=tensors.cu_seqlens.cpu())
    chunk, lengths, kept = local // len(cp.chunks), spec.lengths or (local * cp.size,), (False,) * 3
    if not listed:
        require_choice_by_token(config, "cp with mode='gather'")
    elif config.q_tile > 1 and (packed or chunk % config.q_tile):
        raise NotImplementedError(
            f"cp: mode='gather' with lists for tiles of {config.q_tile} queries needs chunks of whole tiles, not packed"
        )
    if in_graph and packed and (tensors.k_cmp is not None or tensors.v_cmp is not None):
        raise NotImplementedError("cp in a graph, with cu_seqlens and rows of blocks")
    shards = query_shards(cp, local, spec.lengths, cut=spec.causal and not listed)
    if backend == "cute":
        kept = _kept(tensors, sum(lengths), memory, spec=spec, needs_grad=needs_grad)
    if spec.lengths is not None or not packed:
        pool = mean_pool_on_kernels if backend == "cute" and not in_graph else partial(compressed, network=None)
        tensors = _with_window_halo(cp, _compress(cp, tensors, spec, pool), shards[cp.rank], spec)
        tensors = tensors._replace(cu_seqlens=None)
    elif tensors.has_own_window:
        tensors, gathered = tensors._replace(**dict(zip(WINDOW, tensors.of_window))), gathered + WINDOW
    blocks = ShardLayout.of_blocks(cp, lengths, chunk, config.span, config.stride)
    static = (in_graph, packed, *_tokens_and_steps(cp, tensors), shards)
    call = GatherCall(cp, backend, spec, *static, blocks=blocks, kept=kept, gathered=gathered)
    o, by_shard = attend_in_steps(call, tensors, return_more=return_aux)
    if not return_aux:
        return o, None
    lists, gates, *lses = zip(*by_shard)
    dim, block_indices = 0 if packed else 1, tensors.block_indices
    if not listed:
        width = (config.list_room if in_graph else config.list_width)(max(lengths))
        block_indices = torch.cat([F.pad(x, (0, width - x.shape[-1]), value=-1) for x in lists], dim)
    return o, Aux(block_indices, torch.cat(gates, dim), *(torch.cat(x, -1) for x in lses))


def attend_to_lists(
    cp: ContextParallel, backend: str, tensors: CallTensors, *, spec: CallSpec
) -> tuple[Tensor, Tensor]:
    """`selected_attention` on a rank's queries: o and the LSE."""
    tensors = _with_fixed_sizes(tensors)
    shards = query_shards(cp, tensors.q.shape[-3], None, cut=False)
    packed = tensors.cu_seqlens is not None
    call = GatherCall(cp, backend, spec, is_recorded(tensors.q), packed, *_tokens_and_steps(cp, tensors), shards)
    o, by_shard = attend_in_steps(call, tensors, return_more=True)
    return o, torch.cat([lse for (lse,) in by_shard], -1)


def list_spec(block_size: int, q_tile: int, causal: bool, softmax_scale: float) -> CallSpec:
    """The static side of a call of `selected_attention`."""
    config = ListConfig(block_size=block_size, q_tile=q_tile, window_size=0)
    return CallSpec(config, causal, softmax_scale, listed=True, branches=SELECTED_ALONE)


def _tokens_and_steps(cp: ContextParallel, tensors: CallTensors) -> tuple[ShardLayout, tuple[tuple[int, int], ...]]:
    """The layout of tokens, and the heads of each step: the same on every rank, unlike the groups of a memory plan."""
    tokens = ShardLayout.of_tokens(cp, tensors.q.shape[-3])
    return tokens, head_steps(tensors.k.shape[-2], tokens.total)


def _kept(
    tensors: CallTensors, total: int, memory: MemoryPolicy, *, spec: CallSpec, needs_grad: bool
) -> tuple[bool, bool, bool]:
    """Outputs that the kernels save, by the memory of a call with keys of all ranks; in graphs by the policy alone."""
    if is_recorded(tensors.q):
        return kept_in_graphs(memory, needs_grad)
    *lead, _, Hkv, Dv = tensors.v.shape
    whole_v = torch.empty((*lead, total, Hkv, Dv), dtype=tensors.v.dtype, device="meta")
    sizes = Sizes.of(tensors._replace(v=whole_v), spec=spec, needs_grad=needs_grad)
    return plan_memory(sizes, memory, tensors.q.device).kept


def _compress(cp: ContextParallel, tensors: CallTensors, spec: CallSpec, pool: Any) -> CallTensors:
    """With compressed keys and values of the blocks that start on this rank, in place of the weights."""

    def rows(x: Tensor, weight: Tensor | None) -> Tensor:
        how = partial(pool, weight=weight, config=spec.config)
        return compress_shard(x, spec.lengths, cp, how, config=spec.config)

    k_cmp = rows(tensors.k, tensors.compress_k_weight) if tensors.k_cmp is None else tensors.k_cmp
    v_cmp = rows(tensors.v, tensors.compress_v_weight) if tensors.v_cmp is None else tensors.v_cmp
    return tensors._replace(k_cmp=k_cmp, v_cmp=v_cmp, compress_k_weight=None, compress_v_weight=None)


def _with_window_halo(
    cp: ContextParallel, tensors: CallTensors, shards: Sequence[QueryShard], spec: CallSpec
) -> CallTensors:
    """With the rows of ``k_win`` and ``v_win`` that each shard's window sees, one shard after the other."""
    if not tensors.has_own_window:
        return tensors
    reach, packed, halos = spec.config.window_size - 1, spec.lengths is not None, []
    for shard in shards:
        rows, begin = shard.window(spec)[0], shard.offsets[0]
        halos.append((begin - rows.start, rows.stop - begin - (shard.queries.stop - shard.queries.start)))
    most = (reach, 0 if spec.causal else reach)
    parts = (torch.cat(with_halo(x[None] if packed else x, halos, most, cp), 1) for x in tensors.of_window)
    return tensors._replace(**{name: x[0] if packed else x for name, x in zip(WINDOW, parts)})


def _with_fixed_sizes(tensors: CallTensors) -> CallTensors:
    """In a compiled graph tensors whose sizes are no symbols: `range` makes numbers of them.

    Layouts and shards are made of integers, so a graph is for one length.
    """
    if not torch.compiler.is_compiling():
        return tensors
    return CallTensors(*(None if x is None else x.view([len(range(size)) for size in x.shape]) for x in tensors))
