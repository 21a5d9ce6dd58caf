"""Each rank attends with its own queries to the keys and values of all ranks.

Compressed keys are made where their blocks start, and gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
import torch.nn.functional as F

from nsa_layer.block_mlp import compressed
from nsa_layer.call_spec import Aux, CallSpec, CallTensors, Saved, require_choice_by_token
from nsa_layer.config import NSAConfig
from nsa_layer.context_parallel import graph
from nsa_layer.context_parallel.blocks import compress_own, pooled
from nsa_layer.context_parallel.halo import with_neighbours
from nsa_layer.context_parallel.overlapped import OF_BLOCKS, OF_HEADS, Call, Left, Places
from nsa_layer.context_parallel.overlapped import attend as attend_overlapped
from nsa_layer.context_parallel.parts import Part
from nsa_layer.context_parallel.rows import of_blocks
from nsa_layer.context_parallel.spec import ContextParallel
from nsa_layer.context_parallel.stretches import Window, stretches_of_ranks
from nsa_layer.cute.memory_plan import MemoryPolicy, Sizes, plan_memory
from nsa_layer.gate import equal_gates
from nsa_layer.operators.registration import is_recorded

Tensor = torch.Tensor
OF_KEYS, OF_WINDOW = ("k", "v"), ("k_win", "v_win")
LONG = 1 << 18  # the fewest tokens of all ranks with which it was measured to be faster than heads


def is_better(cp: ContextParallel, given: CallTensors, config: NSAConfig) -> bool:
    """True if this mode is better than "heads", where both fit: outside graphs, in long calls of which it sends less.

    Each of R ranks sends a share of (R - 1) / R: with "heads" of q, k, v, o and their gradients of its own tokens, with
    "gather" of k and v of all tokens, twice, and of their gradients once.
    """
    (q, k), starts = given[:2], given.cu_seqlens
    if is_recorded(q) or not config.by_token or (starts is not None and starts.is_cuda):
        return False
    Hq, Hkv = q.shape[-2], k.shape[-2]
    return q.shape[-3] * cp.size >= LONG and 3 * Hkv * cp.size < 2 * (Hq + Hkv)


def attend(
    cp: ContextParallel,
    backend: str,
    given: CallTensors,
    *,
    spec: CallSpec,
    memory: MemoryPolicy = MemoryPolicy(),
    needs_grad: bool = True,
    return_aux: bool = True,
) -> tuple[Tensor, Aux | None]:
    """The operator on a rank's queries; arguments as `nsa` has checked them, ``spec`` of the whole call.

    Raises:
        NotImplementedError: queries choose by tile, or have lists of tiles that chunks cut; or a graph would have to
            know lengths.
    """
    packed, local, config = given.cu_seqlens is not None, given.q.shape[-3], spec.config
    if given.block_indices is None:
        require_choice_by_token(config, "cp with mode='gather'")
    elif config.q_tile > 1 and (packed or local // len(cp.chunks) % config.q_tile):
        raise NotImplementedError(
            f"cp: mode='gather' with lists for tiles of {config.q_tile} queries needs chunks of whole tiles, not packed"
        )
    options = dict(memory=memory, needs_grad=needs_grad, return_aux=return_aux)
    if is_recorded(given.q):
        if packed and (given.k_cmp is not None or given.v_cmp is not None):
            raise NotImplementedError("cp in a graph, with cu_seqlens and rows of blocks")
        return graph.attend(cp, backend, given, spec=spec, **options)
    return attend_here(cp, backend, given, spec=spec, **options)


def attend_here(
    cp: ContextParallel,
    backend: str,
    given: CallTensors,
    *,
    spec: CallSpec,
    memory: MemoryPolicy,
    needs_grad: bool,
    return_aux: bool,
) -> tuple[Tensor, Aux | None]:
    """`attend` of calls that are not refused; in a graph, the exchanges and the attention that they are made of.

    A graph of packed sequences knows no lengths: ``cu_seqlens`` are on the CPU then.
    """
    packed, local, config = given.cu_seqlens is not None, given.q.shape[-3], spec.config
    lengths, listed = spec.lengths or (local * cp.size,), given.block_indices is not None
    of_ranks = stretches_of_ranks(cp, local, spec.lengths, cut=spec.causal and not listed)
    stretches = of_ranks[cp.rank]
    if given.has_own_window:
        windows = [stretch.window(config.window_size - 1, causal=spec.causal) for stretch in stretches]
    else:
        windows = [stretch.window_of_keys(spec) for stretch in stretches]
    kept = (False,) * 3
    if backend == "cute":
        kept = _kept(given, sum(lengths), memory, spec=spec, needs_grad=needs_grad)
    of_keys = OF_KEYS
    if spec.lengths is not None or not packed:
        given = _with_window(cp, _with_blocks(cp, backend, given, spec), windows, spec)._replace(cu_seqlens=None)
    elif given.has_own_window:
        given, of_keys = given._replace(**dict(zip(OF_WINDOW, given.of_window))), OF_KEYS + OF_WINDOW
    blocks = of_blocks(cp, lengths, local // len(cp.chunks), config.span, config.stride)
    common = Call.common(cp, backend, given, of_ranks, blocks=blocks, of_keys=of_keys)
    call = LayerCall(**common, spec=spec, windows=tuple(windows), kept=kept)
    o, more = attend_overlapped(call, given, return_more=return_aux)
    if not return_aux:
        return o, None
    lists, gates, *lses = zip(*more)
    dim, block_indices = 0 if packed else 1, given.block_indices
    if not listed:
        width = (config.list_room if call.recorded else config.list_width)(max(lengths))
        block_indices = torch.cat([F.pad(x, (0, width - x.shape[-1]), value=-1) for x in lists], dim)
    return o, Aux(block_indices, torch.cat(gates, dim), *(torch.cat(each, -1) for each in lses))


def _kept(
    given: CallTensors, total: int, memory: MemoryPolicy, *, spec: CallSpec, needs_grad: bool
) -> tuple[bool, bool, bool]:
    """Outputs that the kernels save, for keys of so many tokens; in graphs by the memory of an otherwise empty GPU."""
    *lead, _, Hkv, Dv = given.v.shape
    whole_v = torch.empty((*lead, total, Hkv, Dv), dtype=given.v.dtype, device="meta")
    sizes = Sizes.of(given._replace(v=whole_v), spec=spec, needs_grad=needs_grad)
    sizes = sizes._replace(deterministic=sizes.deterministic or is_recorded(given.q))
    return plan_memory(sizes, memory, given.q.device).kept


def _with_blocks(cp: ContextParallel, backend: str, given: CallTensors, spec: CallSpec) -> CallTensors:
    """With compressed keys and values of the blocks that start here, in place of what makes them."""
    mean = partial(compressed, network=None)
    if backend == "cute" and not is_recorded(given.q):
        mean = pooled

    def made(x: Tensor, weight: Tensor | None) -> Tensor:
        how = partial(mean, weight=weight, config=spec.config)
        return compress_own(x, spec.lengths, cp, how, config=spec.config)

    k_cmp = made(given.k, given.compress_k_weight) if given.k_cmp is None else given.k_cmp
    v_cmp = made(given.v, given.compress_v_weight) if given.v_cmp is None else given.v_cmp
    return given._replace(k_cmp=k_cmp, v_cmp=v_cmp, compress_k_weight=None, compress_v_weight=None)


def _with_window(cp: ContextParallel, given: CallTensors, windows: Sequence[Window], spec: CallSpec) -> CallTensors:
    """With what each stretch's window sees of its own keys and values, where it has any."""
    if not given.has_own_window:
        return given
    reach, packed = spec.config.window_size - 1, spec.lengths is not None
    beside, most = [(window.before, window.after) for window in windows], (reach, 0 if spec.causal else reach)
    parts = (torch.cat(with_neighbours(x[None] if packed else x, beside, most, cp), 1) for x in given.of_window)
    return given._replace(**{name: x[0] if packed else x for name, x in zip(OF_WINDOW, parts)})


@dataclass(frozen=True)
class LayerCall(Call):
    """A call of `nsa`. Tensors of the window, if there are any, have what each stretch's window sees, one stretch after
    the other, or with ``cu_seqlens`` a rank's tokens.

    Attributes:
        spec: of the whole call.
        windows: of this rank.
        kept: outputs that are saved.
    """

    spec: CallSpec
    windows: tuple[Window, ...]
    kept: tuple[bool, bool, bool]

    def places(self, given: CallTensors, step: int, number: int) -> Places:
        (heads, of_q, of_lists), tile, stretch = self.rows(given, step), self.spec.config.q_tile, self.stretches[number]
        queries, every = stretch.queries, slice(None)
        lists = slice(queries.start // tile, -(-queries.stop // tile))
        found = dict.fromkeys(("q", "gates"), (every, queries, of_q)) | dict(block_indices=(every, lists, of_lists))
        found |= dict(zip(OF_HEADS, ((of_q,), (heads,), (heads,))))
        found |= dict.fromkeys(OF_BLOCKS, (every, stretch.blocks(self.spec), heads))
        if "k_win" not in self.of_keys:
            ends = list(accumulate((window.keys.stop - window.keys.start for window in self.windows), initial=0))
            found |= dict.fromkeys(OF_WINDOW, (every, slice(*ends[number : number + 2]), heads))
        return found

    def forward(self, part: CallTensors, number: int, o: Tensor, *, backward: bool) -> Left:
        part = self._part(part, number)
        if not self.recorded:
            return part.forward(o, backward=backward)
        made, left = graph.forward(part, self.total, backward=backward)
        o.copy_(made)
        return left

    def gradients(
        self, part: CallTensors, number: int, do: Tensor, left: Left, dq: Tensor
    ) -> tuple[Tensor | None, ...]:
        part = self._part(part, number)
        if not self.recorded:
            return part.gradients(do, Saved(*left), dq)
        found = graph.gradients(do, part, self.total, left)
        dq.copy_(found[0])
        return found

    def joined(self, left: Sequence[Left], q: Tensor) -> tuple[Tensor, ...]:
        """`Aux`'s fields; no lists where they are the caller's and a graph is made."""
        parts = (
            [getattr(one, name) for one in left] for name in ("block_indices", "g", "lse_cmp", "lse_slc", "lse_swa")
        )
        lists, gates, *lses = (None if each[0] is None else torch.cat(each, -2) for each in parts)
        lses[2] = torch.full_like(lses[0], -torch.inf) if lses[2] is None else lses[2]
        lists = q.new_empty(0, dtype=torch.int32) if lists is None else lists
        return lists, equal_gates(q) if gates is None else gates, *lses

    def _part(self, tensors: CallTensors, number: int) -> Part:
        stretch, spec = self.stretches[number], self.stretches[number].spec(self.spec)
        if "k_win" not in self.of_keys:
            spec = replace(spec, window=self.windows[number].lengths)
        return Part(tensors, spec, tuple(at for *_, at in stretch.lengths), self.backend, self.kept)
