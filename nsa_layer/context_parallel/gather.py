"""Mode "gather": each rank attends with its own queries to the keys and values of all ranks.

Compressed keys are made by the rank that holds a block's first token. In graphs a call is the operator ``gathered``, or
``gathered_lists``, which PyTorch takes apart when it traces autograd: into exchanges that the compiler sees, and
operators of attention (`shard_call`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from nsa_layer.block_mlp import compressed
from nsa_layer.call_spec import Aux, CallSpec, CallTensors, ListSpec, require_choice_by_token
from nsa_layer.config import NSAConfig
from nsa_layer.context_parallel.checks import whole_lengths
from nsa_layer.context_parallel.gather_loop import WINDOW, GatherCall, attend_in_steps
from nsa_layer.context_parallel.halo import compress_shard, mean_pool_on_kernels, with_halo
from nsa_layer.context_parallel.layout import QueryShard, ShardLayout, head_steps, query_shards
from nsa_layer.context_parallel.spec import ContextParallel
from nsa_layer.cute.memory_plan import MemoryPolicy, Sizes, plan_memory
from nsa_layer.operators.arguments import CONFIG, LIST_CONFIG, NAMES, OF_LAYER, schema_of, spec_of, static_arguments
from nsa_layer.operators.registration import LIBRARY, OPS, is_recorded

Tensor = torch.Tensor
LONG = 1 << 18  # tokens of all ranks from which on this mode was measured to be faster than "heads"
RANKS = "str group, str rank_and_size, str? load_balance, str sources"


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
    in_operator: bool = False,
) -> tuple[Tensor, Aux | None]:
    """`nsa` on a rank's queries; arguments as `nsa` has checked them, ``spec`` of the whole call.

    Args:
        in_operator: take the operator of a graph apart. Packed sequences have no lengths then, and ``cu_seqlens`` are
            on the CPU.

    Raises:
        NotImplementedError: queries choose by tile, or have lists of tiles that chunks cut; or a graph would have to
            know lengths.
    """
    packed, config, listed = tensors.cu_seqlens is not None, spec.config, tensors.block_indices is not None
    local, in_graph, gathered = tensors.q.shape[-3], is_recorded(tensors.q), ("k", "v")
    chunk, lengths, kept = local // len(cp.chunks), spec.lengths or (local * cp.size,), (False,) * 3
    if not listed:
        require_choice_by_token(config, "cp with mode='gather'")
    elif config.q_tile > 1 and (packed or chunk % config.q_tile):
        raise NotImplementedError(
            f"cp: mode='gather' with lists for tiles of {config.q_tile} queries needs chunks of whole tiles, not packed"
        )
    if in_graph and packed and (tensors.k_cmp is not None or tensors.v_cmp is not None):
        raise NotImplementedError("cp in a graph, with cu_seqlens and rows of blocks")
    if in_graph and not in_operator:
        how = (backend, *_ranks(cp), memory.recompute, memory.budget, needs_grad, return_aux)
        o, *aux = OPS.gathered.default(*tensors[: len(OF_LAYER)], *static_arguments(spec).values(), *how)
        return o, Aux(*aux) if return_aux else None
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
    cp: ContextParallel, backend: str, tensors: CallTensors, *, spec: ListSpec, in_operator: bool = False
) -> tuple[Tensor, Tensor]:
    """`selected_attention` on a rank's queries: o and the LSE. `in_operator` as for `attend`."""
    if is_recorded(tensors.q) and not in_operator:
        static = (spec.block_size, spec.q_tile, spec.causal, spec.softmax_scale, backend, *_ranks(cp))
        return OPS.gathered_lists.default(*tensors[:3], tensors.block_indices, tensors.cu_seqlens, *static)
    shards = query_shards(cp, tensors.q.shape[-3], None, cut=False)
    packed = tensors.cu_seqlens is not None
    call = GatherCall(cp, backend, spec, is_recorded(tensors.q), packed, *_tokens_and_steps(cp, tensors), shards)
    o, by_shard = attend_in_steps(call, tensors, return_more=True)
    return o, torch.cat([lse for (lse,) in by_shard], -1)


def _tokens_and_steps(cp: ContextParallel, tensors: CallTensors) -> tuple[ShardLayout, tuple[tuple[int, int], ...]]:
    """The layout of tokens, and the heads of each step: the same on every rank, unlike the groups of a memory plan."""
    tokens = ShardLayout.of_tokens(cp, tensors.q.shape[-3])
    return tokens, head_steps(tensors.k.shape[-2], tokens.total)


def _kept(
    tensors: CallTensors, total: int, memory: MemoryPolicy, *, spec: CallSpec, needs_grad: bool
) -> tuple[bool, bool, bool]:
    """Outputs that the kernels save, for keys of all ranks; in graphs by the memory of an otherwise empty GPU."""
    *lead, _, Hkv, Dv = tensors.v.shape
    whole_v = torch.empty((*lead, total, Hkv, Dv), dtype=tensors.v.dtype, device="meta")
    sizes = Sizes.of(tensors._replace(v=whole_v), spec=spec, needs_grad=needs_grad)
    sizes = sizes._replace(deterministic=sizes.deterministic or is_recorded(tensors.q))
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


def _ranks(cp: ContextParallel) -> tuple[str, str, str | None, str]:
    """Ranks as arguments of an operator: with their number, or one rank finds another's graph in PyTorch's cache."""
    return cp.group_name, cp.rank_and_size, cp.load_balance, sources_key()


def sources_key() -> str:
    """A hash of the package's sources.

    PyTorch's cache keeps graphs by operators and their arguments, before an operator is taken apart: what it is taken
    apart into follows from the sources too.
    """
    return hash_of_sources(Path(__file__).parents[1])


sources_key._dynamo_marked_constant = True  # torch.compile calls it, and does not look inside


@lru_cache(maxsize=8)
def hash_of_sources(folder: Path) -> str:
    """Of every Python file below a folder."""
    digest = sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return digest.hexdigest()


def _gathered(*args: Any) -> list[Tensor]:
    args, tensors = args[len(OF_LAYER) :], CallTensors(*map(_with_known_sizes, args[: len(OF_LAYER)]))
    backend, *ranks, recompute, budget, needs_grad, return_aux = args[len(NAMES) :]
    static, cp = dict(zip(NAMES, args)), _ranks_of(*ranks)
    static["softmax_scale"] = float(static["softmax_scale"])
    spec = spec_of(static, None, listed=tensors.block_indices is not None)
    if tensors.cu_seqlens is not None:
        tensors = tensors._replace(cu_seqlens=tensors.cu_seqlens.cpu())
        if not is_recorded(tensors.q):  # torch.compile(backend="eager") runs it as it is
            spec = replace(spec, lengths=whole_lengths(tensors.cu_seqlens, tensors.q, cp))
    how = dict(memory=MemoryPolicy(budget=budget, recompute=recompute), needs_grad=needs_grad, return_aux=return_aux)
    o, aux = attend(cp, backend, tensors, spec=spec, **how, in_operator=True)
    return [o] if aux is None else [o, *vars(aux).values()]


def _gathered_lists(*args: Any) -> tuple[Tensor, Tensor]:
    *tensors, block_size, q_tile, causal, softmax_scale, backend = args[:-4]
    q, k, v, block_indices, cu_seqlens = map(_with_known_sizes, tensors)
    tensors = CallTensors(q, k, v, cu_seqlens=cu_seqlens, block_indices=block_indices)
    spec = ListSpec(int(block_size), int(q_tile), causal, float(softmax_scale))
    return attend_to_lists(_ranks_of(*args[-4:]), backend, tensors, spec=spec, in_operator=True)


def _with_known_sizes(x: Tensor | None) -> Tensor | None:
    """x, whose sizes are no symbols: layouts and shards are made of integers, so a graph is for one length."""
    return None if x is None else x.view([int(size) for size in x.shape])


def _ranks_of(group: str, rank_and_size: str, load_balance: str | None, sources: str) -> ContextParallel:
    cp = ContextParallel(torch._C._distributed_c10d._resolve_process_group(group), "gather", load_balance)
    assert cp.rank_and_size == rank_and_size
    return cp


HOW = "str recompute, int? budget, bool needs_grad, bool return_aux"
LIBRARY.define(f"gathered({schema_of(OF_LAYER)}, {CONFIG}, str backend, {RANKS}, {HOW}) -> Tensor[]")
LIBRARY.define(
    f"gathered_lists({schema_of('qkv')}, Tensor block_indices, Tensor? cu_seqlens, {LIST_CONFIG}, str backend, {RANKS})"
    " -> (Tensor, Tensor)"
)
LIBRARY.impl("gathered", _gathered, "CompositeImplicitAutograd")
LIBRARY.impl("gathered_lists", _gathered_lists, "CompositeImplicitAutograd")
