"""The operator in plain PyTorch: memory linear in T, forward and backward, on any device, any dtype and head dimension.

The branches are attention by chunks of queries (`chunk_attention`), and differ only in the keys that a chunk reads and
the mask inside it. Where each token has a list of blocks of its own, or that of a small tile, `token_attention` takes
the selected branch.

On a CPU, fp16 and bf16 are computed in fp32 and rounded at the end: CPUs multiply fp32 faster. Backward keeps the
branches' log-sum-exps, the gates and the chosen blocks, and computes everything else again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial

import torch
import torch.nn.functional as F

from nsa_layer.call_spec import (
    DIFFERENTIABLE,
    SELECTED_ALONE,
    Aux,
    CallSpec,
    CallTensors,
    Saved,
    accumulation_dtype,
    equal_gates,
    require_choice_by_token,
)
from nsa_layer.choose import choose_blocks, choose_blocks_by_token, sorted_lists
from nsa_layer.chunk_attention import Chunk, ChunkAttention, ChunkPlan, KeyBlocks, KeyRun, rows_that_fit
from nsa_layer.compress import mean_pool, mean_pool_backward, project, project_backward
from nsa_layer.gate import gate_values, weighted_sum
from nsa_layer.profiler_ranges import component
from nsa_layer.token_attention import attend_lists, attend_lists_backward

Tensor = torch.Tensor
# Queries of the largest tile whose list is given to its tokens; gathering keys for smaller tiles, one after the other,
# takes longer.
SMALL_TILE = 32


@torch.no_grad()
def attend(tensors: CallTensors, *, spec: CallSpec) -> tuple[Tensor, Aux]:
    """The operator; arguments as `nsa` has checked them.

    The lengths of packed sequences are read from ``spec``, not from ``cu_seqlens``. Returns o, in the dtype of q,
    and `Aux`.
    """
    o, saved = forward(tensors, spec=spec)
    return o, saved.aux(tensors)


def forward(tensors: CallTensors, *, spec: CallSpec) -> tuple[Tensor, Saved]:
    """o, and what backward needs; ``q_offset`` is read on the host."""
    parts = [_Batch(part, spec, first).forward() for part, first in _batches(tensors, spec)]
    o, saved = zip(*parts)
    if len(parts) == 1 and spec.lengths is None:
        return o[0], saved[0]._replace(block_indices=saved[0].block_indices if tensors.block_indices is None else None)
    of_tokens, of_rows, whole = (0, 0, slice(None)) if spec.lengths is None else (1, 2, 0)

    def joined(each: Sequence[Tensor | None], dim: int) -> Tensor | None:
        return None if each[0] is None else torch.cat(each, dim)[whole]

    fields = {name: [getattr(x, name) for x in saved] for name in ("g", "lse_cmp", "lse_slc", "lse_swa")}
    made = {name: joined(each, of_rows if name != "g" else of_tokens) for name, each in fields.items()}
    if tensors.block_indices is None:
        width = spec.config.list_width(max(spec.key_lengths or tensors.k.shape[1:2]))
        lists = [F.pad(x.block_indices, (0, width - x.block_indices.shape[-1]), value=-1) for x in saved]
        made["block_indices"] = joined(lists, of_tokens)
    return joined(o, of_tokens), Saved(**made)


def backward(tensors: CallTensors, saved: Saved, do: Tensor, *, spec: CallSpec) -> tuple[Tensor | None, ...]:
    """Gradients of the differentiable tensors, in their dtypes; None for those that there are not."""
    lists = saved.block_indices if tensors.block_indices is None else tensors.block_indices
    whole, exactly = tensors._replace(block_indices=lists), accumulation_dtype(tensors.q.dtype)
    totals = whole.map(partial(torch.zeros_like, dtype=exactly, memory_format=torch.contiguous_format), DIFFERENTIABLE)
    parts = [*zip(_batches(whole, spec), _batches(totals, spec), strict=True)]
    packed, rows = spec.lengths is not None, (do, saved.g, *(x if x is None else x.mT for x in saved[9:12]))
    size = [part.q.shape[packed] for (part, _), _ in parts]
    of_parts = zip(*([None] * len(size) if x is None else x.split(size) for x in rows))
    for ((part, first), (total, _)), of_part in zip(parts, of_parts, strict=True):
        do_i, g, *lses = (x[None] if packed and x is not None else x for x in of_part)
        named = dict(zip(("lse_cmp", "lse_slc", "lse_swa"), lses))
        for name, d in _Batch(part, spec, first).backward(do_i, Saved(g=g, **named)).items():
            getattr(total, name).add_(d)
    pairs = zip(totals.differentiable, tensors.differentiable)
    return tuple(None if x is None else total.to(x.dtype) for total, x in pairs)


def _batches(tensors: CallTensors, spec: CallSpec) -> Iterator[tuple[CallTensors, int]]:
    """Sequences of one length as batches, with the position of their first queries: all of a batch if there is one
    position, else one by one; of packed sequences those that have queries."""
    if tensors.q_offset is not None:
        offsets = tensors.q_offset.tolist()
        if tensors.block_indices is None:
            require_choice_by_token(spec.config)
    elif spec.lengths is None:
        offsets = [tensors.k.shape[1] - tensors.q.shape[1]] * len(tensors.q)
    else:
        offsets = [S - T for T, S in zip(spec.lengths, spec.key_lengths)]
    if spec.lengths is None and len(set(offsets)) == 1:
        yield tensors, offsets[0]
        return
    for own, first in zip(tensors.sequences(spec), offsets, strict=True):
        if len(own.q):
            yield own.as_batch(), first


class _Batch:
    """Sequences of one length, whose first query is at position `first` among the keys.

    q, k and v are in the dtype that is computed in; by head, [B, Hkv, S, D], as attention reads keys.
    """

    def __init__(self, tensors: CallTensors, spec: CallSpec, first: int) -> None:
        self.tensors, self.spec, self.config, self.first = tensors, spec, spec.config, first
        q = tensors.q
        self.low, self.exactly = q.dtype, accumulation_dtype(q.dtype)
        self.dtype = self.exactly if q.device.type == "cpu" else q.dtype
        self.q, self.k, self.v = (x.to(self.dtype) for x in tensors[:3])
        (self.T, self.Hq), (self.S, self.Hkv) = q.shape[1:3], tensors.k.shape[1:3]
        self.G = self.Hq // self.Hkv

    @cached_property
    def means(self) -> tuple[Tensor | None, Tensor | None]:
        """Means of blocks of k and of v; None where the caller gave compressed ones."""
        given = (self.k, self.tensors.k_cmp), (self.v, self.tensors.v_cmp)
        return tuple(mean_pool(x, config=self.config) if own is None else None for x, own in given)

    @cached_property
    def compressed(self) -> tuple[Tensor, Tensor]:
        """Compressed keys and values, not rounded."""
        weights = self.tensors.compress_k_weight, self.tensors.compress_v_weight
        given = zip(self.means, weights, (self.tensors.k_cmp, self.tensors.v_cmp))
        return tuple(own if mean is None else project(mean, weight) for mean, weight, own in given)

    def chunked(self, name: str) -> tuple[Tensor, Tensor, ChunkPlan]:
        """Keys and values by head, and the plan, of the compressed branch or the window."""
        if name == "cmp":  # rounded as the kernels read them
            keys = [x.to(self.low).to(self.dtype) for x in self.compressed]
            plan = _compressed_plan(self.q, keys[0].shape[1], self.G, self.spec, self.first)
        else:
            keys = [x.to(self.dtype) for x in self.tensors.of_window]
            plan = _window_plan(self.q, self.S, self.G, self.spec, self.first)
        return *map(_heads_first, keys), plan

    def forward(self) -> tuple[Tensor, Saved]:
        if self.spec.branches == SELECTED_ALONE:
            o, lse = self.selected(attend_lists)
            return o.to(self.low), Saved(lse_slc=lse.mT.contiguous())
        with component("compress"):
            keys, values, plan = self.chunked("cmp")
        made = [self.unfolded(ChunkAttention.outputs(self.folded(self.q), keys, values, None, plan))]
        with component("choose"):
            self.lists = self.chosen(made[0][1])
        made.append(self.selected(attend_lists))
        if self.config.window_size:
            keys, values, plan = self.chunked("swa")
            made.append(self.unfolded(ChunkAttention.outputs(self.folded(self.q), keys, values, None, plan)))
        outputs, lses = zip(*made)
        o, g = gated(self.tensors, outputs)
        lses = dict(zip(("lse_cmp", "lse_slc", "lse_swa"), (lse.mT.contiguous() for lse in lses)))
        g = None if self.tensors.gate == "none" else g
        return o, Saved(block_indices=self.lists.transpose(1, 2), g=g, **lses)

    def chosen(self, lse_cmp: Tensor) -> Tensor:
        """int32 [B, Hs, M, n]"""
        static = dict(config=self.config, causal=self.spec.causal, softmax_scale=self.spec.softmax_scale)
        if self.tensors.block_indices is not None:
            return self.lists
        k_cmp = self.compressed[0]
        if self.config.by_token:
            k_cmp = k_cmp.to(self.low).to(self.dtype)
            return choose_blocks_by_token(self.q, k_cmp, lse_cmp.mT, **static, first=self.first, S=self.S)
        return choose_blocks(self.q, k_cmp.to(self.exactly), **static)

    @cached_property
    def lists(self) -> Tensor:
        """The lists of the caller, or those that were chosen before, sorted: int32 [B, Hs, M, n]."""
        end, config = None, self.config
        if self.spec.causal:  # by tile, no list is longer than the blocks up to the tile's end
            last = torch.arange(1, config.num_tiles(self.T) + 1, device=self.q.device) * config.q_tile - 1 + self.first
            end = last // config.block_size + 1
        return sorted_lists(self.tensors.block_indices.transpose(1, 2), config.num_blocks(self.S), end)

    def selected(self, by_lists: Callable, do: Tensor | None = None, *rows: Tensor | None) -> tuple[Tensor, ...]:
        """The selected branch: o [B, T, Hq, Dv] and the LSE [B, T, Hq]; or its `backward_of`."""
        config, k, v = self.config, _heads_first(self.k), _heads_first(self.v)
        if config.q_tile <= SMALL_TILE or self.spec.branches == SELECTED_ALONE:
            limit = torch.full((self.T,), self.S, device=self.q.device)
            if self.spec.causal:
                limit = torch.arange(self.first + 1, self.first + self.T + 1, device=self.q.device).clamp(max=self.S)
            static = dict(q_tile=config.q_tile, size=config.block_size, softmax_scale=self.spec.softmax_scale)
            given = (self.q, k, v, self.lists, limit.expand(len(self.q), self.T), *rows)
            return by_lists(*([] if do is None else [do]), *given, **static)
        parts = self.lists.shape[1] // self.Hkv
        # The padding of a list names the block of zeros behind the last one, which no query sees.
        spare = (config.num_blocks(self.S) + 1) * min(config.block_size, self.S) - self.S
        k, v = (F.pad(x, (0, 0, 0, spare)) for x in (k, v))
        width, heads = self.lists.shape[-1], self.G // parts
        plan = _selected_plan(self.q, self.S, width, heads, parts, self.spec, self.first)
        if do is None:
            return self.unfolded(ChunkAttention.outputs(self.folded(self.q, parts), k, v, self.lists, plan))
        dq, dk, dv, do_o = self.backward_of(do, k, v, self.lists, plan, *rows, parts=parts)
        return dq, dk[:, :, : self.S], dv[:, :, : self.S], do_o

    def backward_of(
        self, do: Tensor, k: Tensor, v: Tensor, choice: Tensor | None, plan: ChunkPlan, *rows: Tensor, parts: int = 1
    ) -> tuple[Tensor, ...]:
        """dq [B, T, Hq, D], dk and dv by head and do . o [B, T, Hq]; rows: the LSE and the weight, [B, T, Hq]."""
        q, do, lse, weight = (self.folded(x, parts) for x in (self.q, do, *(x[..., None] for x in rows)))
        lse, weight = lse.squeeze(-1), weight.squeeze(-1)
        dq, dk, dv, do_o = ChunkAttention.gradients(do, q, k, v, choice, plan, lse, weight)
        return _unfold(dq, self.T), dk, dv, _unfold(do_o, self.T)

    def backward(self, do: Tensor, saved: Saved) -> dict[str, Tensor]:
        """Gradients by name, sums in the accumulation dtype; LSEs of ``saved`` are [B, T, Hq]."""
        tensors, grads, lses = self.tensors, {}, (saved.lse_cmp, saved.lse_slc, saved.lse_swa)
        do = do.to(self.dtype).contiguous()
        if self.spec.branches == SELECTED_ALONE:
            dq, dk, dv, _ = self.selected(attend_lists_backward, do, saved.lse_slc, None)
            return dict(q=dq, k=dk.transpose(1, 2), v=dv.transpose(1, 2))
        g = equal_gates(self.q) if saved.g is None else saved.g
        weights = g.unbind(-1)
        with component("compress"):
            keys, values, plan = self.chunked("cmp")
        dq, dk_cmp, dv_cmp, do_o = self.backward_of(do, keys, values, None, plan, lses[0], weights[0])
        each = [do_o]
        dq_i, dk, dv, do_o = self.selected(attend_lists_backward, do, lses[1], weights[1])
        dq, each = dq + dq_i, [*each, do_o]
        grads |= dict(k=dk.transpose(1, 2), v=dv.transpose(1, 2))
        if self.config.window_size:
            keys, values, plan = self.chunked("swa")
            dq_i, dk, dv, do_o = self.backward_of(do, keys, values, None, plan, lses[2], weights[2])
            dq, each = dq + dq_i, [*each, do_o]
            for name, d in (("k", dk), ("v", dv)):
                of = name if getattr(tensors, f"{name}_win") is None else f"{name}_win"
                grads[of] = d.transpose(1, 2) if of not in grads else grads[of] + d.transpose(1, 2)
        with component("gate"):
            dg = torch.stack([*each, *[torch.zeros_like(each[0])] * (3 - len(each))], -1)
            if tensors.gates is not None:
                grads["gates"] = dg
            elif tensors.gate_weight is not None:
                dz, q = dg * g * (1 - g), tensors.q.to(self.exactly)
                dq_i, dw = project_backward(dz, q, tensors.gate_weight.mT)
                dq, grads["gate_weight"] = dq + dq_i, dw.mT
        with component("compress"):
            for name, mean, d in zip("kv", self.means, (dk_cmp, dv_cmp)):
                d = d.transpose(1, 2)
                if mean is None:
                    grads[f"{name}_cmp"] = d
                    continue
                d_mean, dw = project_backward(d, mean, getattr(tensors, f"compress_{name}_weight"))
                grads[name] = grads[name] + mean_pool_backward(d_mean, self.S, config=self.config)
                if dw is not None:
                    grads[f"compress_{name}_weight"] = dw
        return grads | dict(q=dq)

    def folded(self, x: Tensor, parts: int = 1) -> Tensor:
        return _fold(x, self.Hkv, parts)

    def unfolded(self, made: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(_unfold(x, self.T) for x in made)


def gated(tensors: CallTensors, outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The branches weighed and summed, in the dtype of q, and the gates."""
    q = tensors.q
    with component("gate"):
        g = gate_values(q, tensors.gate_weight, tensors.gates)
        return weighted_sum(g, *outputs).to(q.dtype), g


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
    T, config, size = q.shape[1], spec.config, min(spec.config.block_size, S)
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
