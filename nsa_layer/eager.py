"""The operator in plain PyTorch: memory linear in T, forward and backward, on any device, any dtype and head dimension.

The branches are attention by chunks of queries (`chunk_attention`), and differ only in the keys that a chunk reads and
the mask inside it. Where each token has a list of blocks of its own, or that of a small tile, `token_attention` takes
the selected branch.

On a CPU, fp16 and bf16 are computed in fp32 and rounded at the end: CPUs multiply fp32 faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from nsa_layer.call_spec import Aux, CallSpec, CallTensors, accumulation_dtype, require_choice_by_token
from nsa_layer.choose import choose_blocks, choose_blocks_by_token, sorted_lists
from nsa_layer.chunk_attention import Chunk, ChunkAttention, ChunkPlan, KeyBlocks, KeyRun, rows_that_fit
from nsa_layer.compress import compress
from nsa_layer.derivatives import attention
from nsa_layer.gate import gate_values, weighted_sum
from nsa_layer.profiler_ranges import component
from nsa_layer.token_attention import attend_lists

# Queries of the largest tile whose list is given to its tokens; gathering keys for smaller tiles, one after the other,
# takes longer.
SMALL_TILE = 32


def attend(tensors: CallTensors, *, spec: CallSpec) -> tuple[torch.Tensor, Aux]:
    """The operator; arguments as `nsa` has checked them.

    The lengths of packed sequences are read from ``spec``, not from ``cu_seqlens``. Returns o, in the dtype of q,
    and `Aux`.
    """
    return gated(tensors, attend_branches(tensors, spec=spec))


def gated(tensors: CallTensors, made: Branches) -> tuple[torch.Tensor, Aux]:
    """The branches weighed and summed, in the dtype of q, and `Aux`."""
    q = tensors.q
    with component("gate"):
        g = gate_values(q, tensors.gate_weight, tensors.gates)
        o = weighted_sum(g, *made.outputs).to(q.dtype)
    return o, Aux(made.choice, g.detach(), *made.lses)


class Branches(NamedTuple):
    """The branches' results, which the gates sum.

    Attributes:
        outputs: the three branches' o [B, T, Hq, Dv], packed [total, Hq, Dv].
        lses: fp32 or fp64 [B, Hq, T], packed [Hq, total].
        choice: int32 [B, M, Hs, n], packed [tiles, Hs, n].
    """

    outputs: list[torch.Tensor]
    lses: list[torch.Tensor]
    choice: torch.Tensor


def attend_branches(tensors: CallTensors, *, spec: CallSpec) -> Branches:
    """The three branches, before they are weighed; ``q_offset`` is read on the host."""
    config, lists = spec.config, tensors.block_indices
    offsets = None if tensors.q_offset is None else tensors.q_offset.tolist()
    if offsets is not None and lists is None:
        require_choice_by_token(config)
    if spec.lengths is None and len(set(offsets or [0])) == 1:
        made = _attend_batch(tensors, spec, offsets[0] if offsets else 0)
        return made if lists is None else made._replace(choice=lists)
    sequences = list(tensors.sequences(spec))
    results = [
        _attend_batch(own.as_batch(), spec, first)
        for own, first in zip(sequences, offsets or [0] * len(sequences), strict=True)
        if len(own.q)
    ]
    of_tokens, of_lses, whole = (0, 0, slice(None)) if spec.lengths is None else (1, 2, 0)
    branches = [torch.cat(parts, dim=of_tokens)[whole] for parts in zip(*(r.outputs for r in results), strict=True)]
    lses = [torch.cat(parts, dim=of_lses)[whole] for parts in zip(*(r.lses for r in results), strict=True)]
    if lists is not None:
        return Branches(branches, lses, lists)
    width = config.list_width(max(spec.key_lengths or tensors.k.shape[1:2]))
    choices = [F.pad(r.choice, (0, width - r.choice.shape[-1]), value=-1) for r in results]
    return Branches(branches, lses, torch.cat(choices, dim=of_tokens)[whole])


def _attend_batch(tensors: CallTensors, spec: CallSpec, first: int) -> Branches:
    """The branches of sequences of one length, whose first query is at this position among the keys."""
    q, k, v, block_indices = *tensors[:3], tensors.block_indices
    config, dtype = spec.config, q.dtype
    if q.device.type == "cpu":
        q, k, v = (x.to(accumulation_dtype(dtype)) for x in (q, k, v))
    k_win, v_win = (x if own is None else own.to(x.dtype) for x, own in ((k, tensors.k_win), (v, tensors.v_win)))
    with component("compress"):
        k_cmp, v_cmp = tensors.k_cmp, tensors.v_cmp
        k_cmp = compress(k, tensors.compress_k_weight, config=config) if k_cmp is None else k_cmp
        v_cmp = compress(v, tensors.compress_v_weight, config=config) if v_cmp is None else v_cmp
    # Attention reads them as the kernels do, rounded to the dtype of the inputs.
    unrounded, (k_cmp, v_cmp) = k_cmp, (x.to(dtype).to(q.dtype) for x in (k_cmp, v_cmp))
    (S, Hkv), T, G = k.shape[1:3], q.shape[1], q.shape[2] // k.shape[2]
    by_group, keys, values = _fold(q, Hkv, 1), _heads_first(k_cmp), _heads_first(v_cmp)
    cmp = attention(ChunkAttention, by_group, keys, values, None, _compressed_plan(q, k_cmp.shape[1], G, spec, first))
    static = dict(config=config, causal=spec.causal, softmax_scale=spec.softmax_scale)
    with component("choose"):
        if block_indices is not None:
            # By tile, no list is longer than the blocks up to the tile's end.
            last = torch.arange(1, config.num_tiles(T) + 1, device=q.device) * config.q_tile - 1 + first
            end = last // config.block_size + 1 if spec.causal else None
            choice = sorted_lists(block_indices.transpose(1, 2), config.num_blocks(S), end)
        elif config.by_token:
            choice = choose_blocks_by_token(q, k_cmp, _unfold(cmp[1], T).mT, **static, first=first, S=S)
        else:
            choice = choose_blocks(q, unrounded.to(accumulation_dtype(dtype)), **static)
    k, v, k_win, v_win = map(_heads_first, (k, v, k_win, v_win))
    slc = _attend_selected(q, k, v, choice, spec, first)
    swa = attention(ChunkAttention, by_group, k_win, v_win, None, _window_plan(q, S, G, spec, first))
    cmp, swa = ([_unfold(x, T) for x in branch] for branch in (cmp, swa))
    outputs, lses = zip(cmp, slc, swa)
    return Branches(list(outputs), [lse.mT.contiguous() for lse in lses], choice.transpose(1, 2))


def _attend_selected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, choice: torch.Tensor, spec: CallSpec, first: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, T, Hq, D], k, v [B, Hkv, S, D or Dv], choice [B, Hs, M, n] -> o [B, T, Hq, Dv] and the LSE [B, T, Hq]."""
    config, (T, Hq), (Hkv, S) = spec.config, q.shape[1:3], k.shape[1:3]
    if config.q_tile <= SMALL_TILE:
        ends = (first + 1, first + T + 1)
        limit = torch.arange(*ends, device=q.device) if spec.causal else torch.full((T,), S, device=q.device)
        static = dict(q_tile=config.q_tile, size=config.block_size, softmax_scale=spec.softmax_scale)
        return attend_lists(q, k, v, choice, limit.expand(len(q), T), **static)
    parts = choice.shape[1] // Hkv
    # The padding of a list names the block of zeros behind the last one, which no query sees.
    spare = (config.num_blocks(S) + 1) * min(config.block_size, S) - S
    k, v = (F.pad(x, (0, 0, 0, spare)) for x in (k, v))
    plan = _selected_plan(q, S, choice.shape[-1], Hq // (Hkv * parts), parts, spec, first)
    results = attention(ChunkAttention, _fold(q, Hkv, parts), k, v, choice, plan)
    return tuple(_unfold(x, T) for x in results)


def _compressed_plan(q: torch.Tensor, Tc: int, heads: int, spec: CallSpec, first: int) -> ChunkPlan:
    T, config = q.shape[1], spec.config
    step = rows_that_fit(q, Tc)

    def chunks(_: None) -> Iterator[Chunk]:
        for begin in range(0, T, step):
            end = min(begin + step, T)
            seen = min(Tc, (first + end - 1 - config.offset) // config.stride + 1) if spec.causal else Tc
            if seen > 0:
                yield begin, end, KeyRun(0, seen)

    def visible(t: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return j * config.stride + config.offset <= t + first

    return ChunkPlan(chunks, visible if spec.causal else None, heads, spec.softmax_scale, "cmp")


def _selected_plan(
    q: torch.Tensor, S: int, width: int, heads: int, parts: int, spec: CallSpec, first: int
) -> ChunkPlan:
    """Tile by tile; the padding of a list reads the block of zeros behind the last one, which no query sees."""
    T, config = q.shape[1], spec.config
    size = min(config.block_size, S)
    step = rows_that_fit(q, width * size)

    def chunks(choice: torch.Tensor) -> Iterator[Chunk]:
        index = choice.long().remainder(config.num_blocks(S) + 1).unflatten(1, (-1, parts))
        for tile in range(config.num_tiles(T)):
            start, last = tile * config.q_tile, min((tile + 1) * config.q_tile, T)
            listed = index[:, :, :, tile]
            if spec.causal:  # a list is ascending, and none is longer than the blocks up to the tile's end
                listed = listed[..., : config.num_blocks(first + last)]
            keys = KeyBlocks(listed, size)
            yield from ((begin, min(begin + step, last), keys) for begin in range(start, last, step))

    def visible(t: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return s <= t + first if spec.causal else s < S

    return ChunkPlan(chunks, visible, heads, spec.softmax_scale, "slc")


def _window_plan(q: torch.Tensor, S: int, heads: int, spec: CallSpec, first: int) -> ChunkPlan:
    T, back = q.shape[1], spec.config.window_size - 1
    ahead = 0 if spec.causal else back
    # Chunks longer than the window would read mostly pairs that it excludes.
    step = min(max(back + 1, 64), rows_that_fit(q, min(S, 2 * (back + 1) + ahead)))

    def chunks(_: None) -> Iterator[Chunk]:
        for begin in range(0, T, step):
            end = min(begin + step, T)
            yield begin, end, KeyRun(max(0, first + begin - back), min(S, first + end + ahead))

    def visible(t: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return (s >= t + first - back) & (s <= t + first + ahead)

    return ChunkPlan(chunks, visible, heads, spec.softmax_scale, "swa")


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """[B, T, H, D] -> [B, H, T, D]"""
    return x.transpose(1, 2).contiguous()


def _fold(x: torch.Tensor, Hkv: int, parts: int) -> torch.Tensor:
    """[B, T, Hq, D] -> [B, Hkv, parts, T * heads, D]"""
    B, T, Hq, D = x.shape
    heads = Hq // (Hkv * parts)
    return x.view(B, T, Hkv, parts, heads, D).permute(0, 2, 3, 1, 4, 5).reshape(B, Hkv, parts, T * heads, D)


def _unfold(x: torch.Tensor, T: int) -> torch.Tensor:
    """[B, Hkv, parts, T * heads, ...] -> [B, T, Hq, ...]"""
    x = x.unflatten(3, (T, -1)).movedim(3, 1)
    return x.flatten(2, 4)
