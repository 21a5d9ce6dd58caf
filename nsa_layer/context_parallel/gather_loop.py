"""The loop of mode "gather": K and V of some key/value heads are gathered while the heads before them attend.

Each of a rank's chunks is a shard: an ordinary call whose queries have an offset among the keys. Backward gathers K
and V again, and sends dK and dV of the heads before to the ranks that hold their rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from nsa_layer import support
from nsa_layer.call import DIFFERENTIABLE, SAVED_FIELDS, Call, Saved, accumulation_dtype
from nsa_layer.context_parallel.checks import WEIGHTS, whole_lengths
from nsa_layer.context_parallel.layout import QueryShard, ShardLayout, block_layout, head_steps, query_shards, resized
from nsa_layer.context_parallel.transport import Exchange, ranks_of
from nsa_layer.cute.head_slices import head_group, narrow, query_heads
from nsa_layer.cute.host_constants import numbers_on
from nsa_layer.cute.memory_plan import MemoryPlan
from nsa_layer.operators.layer import STATIC_NAMES, static_spec
from nsa_layer.saved_shapes import fitted, saved_shapes

Tensor = torch.Tensor
Fields = Sequence[Tensor | None]
# Tokens for each other rank from which on exchanges alternate with the attention, which saves memory.
OVERLAP_BELOW = 3 << 19
BLOCK_KEYS, WINDOW_KEYS = ("k_cmp", "v_cmp"), ("k_win", "v_win")
SUMS = Saved._fields.index("index_sums")


class GatherLoop:
    """A rank's call: steps of some key/value heads, and in each of them the rank's shards."""

    def __init__(self, tensors: Fields, static: Sequence[Any], *, read: bool = True) -> None:
        """
        Args:
            tensors: this rank's, in the order of `call.TENSORS`; ``k_win`` and ``v_win`` both or none.
            static: `static_arguments` of the whole call, the branches' outputs that the kernels save,
                True if there will be a backward, and `static_of` the ranks.
            read: the lengths of packed sequences.
        """
        call, (self.kept, self.backward, *ranks) = Call(*tensors), static[len(STATIC_NAMES) :]
        self.cp, (q, k), self.packed = ranks_of(*ranks), call[:2], call.packed
        lengths = whole_lengths(call.cu_seqlens, q, self.cp) if self.packed and read else None
        self.spec = replace(static_spec(static, listed=call.block_indices is not None), lengths=lengths)
        self.call = call._replace(spec=self.spec)
        cp, config = self.cp, self.spec.config
        self.tokens = ShardLayout.of_tokens(cp, q.shape[-3])
        lengths = lengths or (self.tokens.total,)
        # No query attends to keys behind it, unless lists name them or blocks are seen before they end.
        cut = self.spec.causal and not self.spec.listed and config.offset >= config.span - 1
        shards = query_shards(self.tokens, lengths, cut=cut)
        self.shards = shards[cp.rank]
        # The same on every rank, unlike the groups of a memory plan.
        self.steps = head_steps(k.shape[-2], self.tokens.total)
        self.plans = [MemoryPlan(((0, end - first),), self.kept) for first, end in self.steps]  # all heads of a step
        self.ahead = int(self.tokens.total < OVERLAP_BELOW * (cp.size - 1))  # exchanges run beside attention
        # Rows of each tensor that is gathered, and the ranges that each rank's shards read.
        self.layouts = dict.fromkeys(("k", "v", *WINDOW_KEYS, "k_index"), self.tokens)
        if call.k_cmp is not None or call.v_cmp is not None:
            self.layouts |= dict.fromkeys(BLOCK_KEYS, block_layout(self.tokens, lengths, config.span, config.stride))
        self.layouts = {
            name: layout._replace(ranges=[[self._rows(name, shard) for shard in of_rank] for of_rank in shards])
            for name, layout in self.layouts.items()
            if getattr(call, name) is not None
        }

    def _rows(self, name: str, shard: QueryShard) -> slice:
        if name in BLOCK_KEYS:
            return shard.blocks(self.spec)
        if name not in WINDOW_KEYS:
            return shard.keys
        rows = shard.window(self.spec)[0]
        return slice(shard.keys.start + rows.start, shard.keys.start + rows.stop)

    def forward(self) -> tuple[Tensor | None, ...]:
        """o, and the fields of `Saved` of each step and shard, by capacity."""
        (q, _, v), saved, backend = self.call[:3], [], support.backend_module(self.spec.backend)
        shapes = iter(self.capacity())
        o = q.new_empty((*q.shape[:-1], v.shape[-1]))
        for step, keys in self._exchanged():
            for i in range(len(self.shards)):
                (call, _), into = self._shard_call(step, i, keys), self._queries(o, step, i)
                output, of_shard = backend.forward(call, plan=self.plans[step], backward=self.backward, o=into)
                if output is not into:
                    into.copy_(output)
                saved += [fitted(x, next(shapes)) for x in of_shard]
            del keys, call
        return o, *saved

    def gradients(
        self, do: Tensor, d_sums: Tensor | None, o: Tensor | None, *saved: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Gradients of the differentiable tensors; of weights this rank's part.

        Args:
            d_sums: of the sums of each step and shard; None: an index has no gradients.
            o: of the selected branch alone on the kernels; else None.
        """
        exactly, backend = accumulation_dtype(do.dtype), support.backend_module(self.spec.backend)
        grads = self.call.map(lambda x: x.new_empty(x.shape), DIFFERENTIABLE)
        grads = grads.map(lambda x: x.new_zeros(x.shape, dtype=exactly), WEIGHTS)
        if d_sums is None:
            grads = grads._replace(q_index=None, k_index=None)
        d_keys = [{name: [] for name in self.layouts if getattr(grads, name) is not None} for _ in self.steps]
        for step, keys in self._exchanged(d_keys, grads):
            for i in reversed(range(len(self.shards))):
                (call, rows), into = self._shard_call(step, i, keys), self._part(grads, step, i)
                at = (step * len(self.shards) + i) * SAVED_FIELDS
                of_shard = Saved(*map(fitted, saved[at : at + SAVED_FIELDS], saved_shapes(call, kept=self.kept)))
                do_part, o_part = (x if x is None else self._queries(x, step, i) for x in (do, o))
                options = dict(plan=self.plans[step], o=o_part, dq=into.q, window=rows, d_sums=d_sums)
                ds = backend.backward(call, of_shard, do_part, **options)
                if ds[0] is not into.q:
                    into.q.copy_(ds[0])
                for name, d in zip(DIFFERENTIABLE[1:], ds[1:]):
                    if name in d_keys[step]:
                        d_keys[step][name].insert(0, d)
                    elif (out := getattr(into, name)) is not None:
                        out.add_(d) if name in WEIGHTS else out.copy_(d)
                del ds, d
            del keys, call
        pairs = zip(self.call.differentiable, grads.differentiable)
        return tuple(None if d is None else d.to(x.dtype) for x, d in pairs)

    def capacity(self) -> list[tuple[Any, torch.dtype] | None]:
        """(shape, dtype) of the tensors that each step and shard saves, for any lengths of packed sequences."""
        total = self.tokens.total
        rows = dict(q=self.tokens.counts[0]) | dict.fromkeys("kv", total)
        rows |= dict.fromkeys(BLOCK_KEYS, self.spec.config.compressed_length(total))
        whole = {name: resized(x, n) for name, n in rows.items() if (x := getattr(self.call, name)) is not None}
        call = self.call._replace(**whole, spec=replace(self.spec, lengths=None))
        of_steps = (saved_shapes(head_group(call, *heads), kept=self.kept) for heads in self.steps)
        return [each for of_step in of_steps for each in [*of_step] * len(self.shards)]

    def _exchanged(
        self, d_keys: Sequence[dict[str, list[Tensor]]] = (), grads: Call | None = None
    ) -> Iterator[tuple[int, dict[str, Sequence[Tensor]]]]:
        """Each step, and the rows of gathered tensors that each shard reads.

        A step's exchange also sends `d_keys` of the step before, each shard's gradients of these tensors, and writes
        their sums to `grads`; of the one before that where exchanges run beside attention.
        """
        if self.spec.backend == "cute":  # not of fake tensors, which are not exchanged
            from nsa_layer.kernels.launch import aligned_rows

            self.call = self.call.map(aligned_rows, DIFFERENTIABLE)
        behind, started = 1 + self.ahead, deque()
        for at in range(len(self.steps) + behind):
            started.append(self._start(at, d_keys[at - behind] if d_keys and at >= behind else {}, grads))
            if len(started) > self.ahead:
                exchange, keys = started.popleft()
                exchange.wait()
                if at - self.ahead < len(self.steps):
                    yield at - self.ahead, keys
                del keys
        for exchange, _ in started:
            exchange.wait()

    def _start(
        self, step: int, d_keys: dict[str, list[Tensor]], grads: Call | None
    ) -> tuple[Exchange, dict[str, Sequence[Tensor]]]:
        """Start to gather a step's tensors, if there is such a step, and to sum the gradients `d_keys`."""
        exchange, keys = Exchange(kernels=self.spec.backend == "cute"), {}
        if step < len(self.steps):
            part = head_group(self.call, *self.steps[step])
            for name, layout in self.layouts.items():
                x = self._batch(getattr(part, name))
                if name in WINDOW_KEYS:
                    keys[name] = exchange.gather(x, layout).split(layout.sizes, 1)
                else:  # all rows once, of which ranges share many
                    whole = exchange.gather(x, layout._replace(ranges=None))
                    keys[name] = [whole[:, rows] for rows in layout.read[self.cp.rank]]
        if d_keys:
            part = head_group(grads, *self.steps[step - 1 - self.ahead])
            for name, ds in d_keys.items():
                exchange.reduce_scatter([*map(self._batch, ds)], self.layouts[name], self._batch(getattr(part, name)))
            d_keys.clear()
        exchange.start()
        return exchange, keys

    def _batch(self, x: Tensor) -> Tensor:
        """[B, rows, ...], of packed sequences a batch of one."""
        return x[None] if self.packed else x

    def _shard_call(self, step: int, i: int, keys: dict[str, Sequence[Tensor]]) -> tuple[Call, slice | None]:
        """A shard of a step as an ordinary call; and the rows of k and v that its window reads, from a whole tile on,
        where the window has no keys of its own."""
        shard, spec, rows, of_window = self.shards[i], self.spec, None, "k_win" in keys
        tensors = {name: x[i][0] if self.packed else x[i] for name, x in keys.items()}
        of_shard, numbers = shard.spec(spec), dict(q_offset=tuple(offset for *_, offset in shard.lengths))
        if spec.config.computes("window"):
            rows, positions = shard.window(spec, tile=1 if of_window else support.KV_TILE)
            if not of_window:
                tensors |= {f"{name}_win": tensors[name][..., rows, :, :] for name in "kv"}
            lengths, numbers["win_offset"] = zip(*positions)
            if spec.lengths:
                numbers["cu_seqlens_win"] = (0, *accumulate(lengths))
                of_shard = replace(of_shard, longest_win=max(lengths))
        times = 1 if spec.lengths else len(self.call.q)
        tensors |= zip(numbers, numbers_on(tuple(x * times for x in numbers.values()), self.call.q.device))
        part = self._part(self.call, step, i)
        return part._replace(**tensors, cu_seqlens=None, spec=of_shard), None if of_window else rows

    def _part(self, call: Call, step: int, i: int) -> Call:
        """A shard's rows, of a step's heads, of this rank's tensors or of their gradients."""
        part, queries, tile = head_group(call, *self.steps[step]), self.shards[i].queries, self.spec.config.q_tile
        tiles = slice(queries.start // tile, -(-queries.stop // tile))
        part = part.map(lambda x: x[..., queries, :, :], ("q", "gates", "q_index"))
        return part.map(lambda x: x[..., tiles, :, :], ("block_indices",))

    def _queries(self, x: Tensor, step: int, i: int) -> Tensor:
        """A shard's rows, of a step's query heads, of x [..., n, Hq, D]."""
        return narrow(x, -2, query_heads(*self.call[:2], *self.steps[step]))[..., self.shards[i].queries, :, :]
