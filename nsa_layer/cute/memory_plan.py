"""Memory plan of a call on the kernels: groups of heads, and the outputs that are saved for backward.

Heads are independent, so a call runs key/value heads in groups, each with its query heads; a group's temporaries are
freed before the next group's are made. Branch outputs are saved for backward or recomputed there. Both follow from one
number of bytes; with enough memory there is one group and everything is saved, which is fastest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from nsa_layer.call_spec import CallSpec, CallTensors
from nsa_layer.config import NSAConfig
from nsa_layer.kernels.union_lists.sizes import CHUNKS, KEYS, ROWS, most_partials, union_room, words_of_entry
from nsa_layer.support import reads_unions

EVERYTHING, NOTHING = (True, True, True), (False, False, False)
# The outputs to save, of the compressed, the selected and the window branch: the first choice that fits.
RECOMPUTE = {
    "auto": (EVERYTHING, NOTHING),
    "none": (EVERYTHING,),
    "compressed": ((False, True, True),),
    "all": (NOTHING,),
}
RESERVE = 0.06  # of the GPU's memory: fragments, lists, compiled kernels
ITEMS = 1024  # of work of the dk and dv pass by token: as many to four times as many, and one for each short row
SMALL = 1 / 16  # of the GPU's memory: a call that takes less does not ask the driver


@dataclass(frozen=True, kw_only=True)
class MemoryPolicy:
    """The memory that a call of `nsa` on the kernels may take.

    Attributes:
        budget: bytes for forward and backward beside q, k, v, o and their gradients. None: what is free on the GPU
            when forward is called, less o, the gradients and a reserve; only calls that take more than a sixteenth of
            the GPU's memory ask. With ``deterministic`` it is what an otherwise empty GPU would have free: the number
            of heads in a group may decide which kernels run, and with them the last bits.
        recompute: branches whose outputs are recomputed in backward instead of saved: "none", "compressed" (usually a
            third of the memory), "all", or "auto": "all" where saving exceeds the budget, else "none".

    Raises:
        TypeError, ValueError: a field has the wrong type or value.
    """

    budget: int | None = None
    recompute: str = "auto"

    def __post_init__(self) -> None:
        if self.budget is not None:
            if isinstance(self.budget, bool) or not isinstance(self.budget, int):
                raise TypeError(f"budget must be an int or None, got {self.budget!r}")
            if self.budget < 0:
                raise ValueError(f"budget must be at least 0 bytes, got {self.budget}")
        if self.recompute not in list(RECOMPUTE):
            raise ValueError(f"recompute must be one of {', '.join(map(repr, RECOMPUTE))}, got {self.recompute!r}")


class Sizes(NamedTuple):
    """Sizes of a call that its memory depends on.

    Attributes:
        tokens, keys: of all sequences; keys is None for as many as tokens.
        itemsize: bytes of an element of q.
        gate: "weight", "given" (the gates themselves) or "none".
        longest: keys of one sequence; None: all.
        own_window: the window has keys or values of its own.
        listed: lists are the caller's.
        unions: tiles read unions of lists, see `support.reads_unions`.
        rows: query heads that share a list; None: those of a group.
    """

    tokens: int
    Hq: int
    Hkv: int
    D: int
    Dv: int
    itemsize: int
    config: NSAConfig
    list_width: int
    gate: str = "weight"
    needs_grad: bool = True
    longest: int | None = None
    own_window: bool = False
    keys: int | None = None
    listed: bool = False
    unions: bool = True
    rows: int | None = None

    @classmethod
    def of(cls, tensors: CallTensors, *, spec: CallSpec, needs_grad: bool) -> Sizes:
        """The sizes of a call; of k the shape is that of v."""
        config, q, v, lists = spec.config, tensors.q, tensors.v, tensors.block_indices
        longest = max(spec.key_lengths) if spec.key_lengths else spec.bound or v.shape[-3]
        tokens, heads = q.shape[:-2].numel(), (q.shape[-2], v.shape[-2], q.shape[-1], v.shape[-1])
        width = config.list_width(longest) if lists is None else lists.shape[-1]
        more = (tensors.gate, needs_grad, longest, tensors.has_own_window, v.shape[:-2].numel(), lists is not None)
        rows = None if lists is None else tensors.q_heads_per_list
        unions = reads_unions(config, listed=spec.listed)
        return cls(tokens, *heads, q.element_size(), config, width, *more, unions, rows)


@dataclass(frozen=True)
class MemoryPlan:
    """Groups of heads and saved outputs of a call.

    Attributes:
        groups: (first key/value head, end) of each group, in order.
        kept: True where the output of the compressed, the selected, the window branch is saved; all False without
            backward.
    """

    groups: tuple[tuple[int, int], ...]
    kept: tuple[bool, bool, bool]


def predict(sizes: Sizes, heads: int, kept: tuple[bool, bool, bool]) -> dict[str, int]:
    """Bytes by component, for groups of `heads` key/value heads.

    Returns:
        "saved": what backward needs of forward, all groups; "forward", "backward": what a group takes while it is
        computed, beside what is saved; "outputs", "gradients": o; do, dq, dk and dv.
    """
    tokens, e, G, config = sizes.tokens, sizes.itemsize, sizes.Hq // sizes.Hkv, sizes.config
    query_heads, rows, keys = heads * G, tokens * sizes.Hq, sizes.keys or tokens
    blocks = keys // config.stride
    tiles = -(-tokens // config.q_tile)
    branch = tokens * query_heads * sizes.Dv * e
    row_numbers, kept = tokens * query_heads * 4 * config.num_branches, kept[: config.num_branches]
    compressed = blocks * heads * ((sizes.D + sizes.Dv) * e + sizes.D * 4)
    # A tile's pooled query in fp32 and split into two fp16, which the choice of blocks multiplies.
    choice = tiles * (query_heads * sizes.D * 8 + heads * sizes.list_width * 8)
    saved_rows = config.num_branches + 3 * (sizes.gate != "none")
    saved = sum(kept) * rows * sizes.Dv * e + rows * saved_rows * 4
    dq_accum, dk_dv_accum = 4 * tokens * query_heads * sizes.D, 4 * keys * heads * (sizes.D + sizes.Dv)
    saved_lists, forward_lists = tiles * sizes.Hkv * (sizes.list_width + 1) * 4, 0
    accumulators = dq_accum + (1 + sizes.own_window) * dk_dv_accum
    lists = 64 * tiles * query_heads * sizes.list_width
    if config.q_tile == 1:  # neither pooled queries nor counts
        choice = 0 if sizes.needs_grad else tokens * heads * sizes.list_width * 4
    if sizes.listed:
        choice = 0
    if sizes.unions:
        # dq's accumulator is gone when dk and dv of the selected branch are made.
        saved_lists = 0 if sizes.listed else tiles * sizes.Hkv * sizes.list_width * 4
        forward_lists, pairs = _token_lists(sizes, heads)
        lists, accumulators = forward_lists, dk_dv_accum + max(dq_accum, pairs)
    # Outputs that were computed again are gone when accumulators are made; gates that are given make gradients of them.
    made = max(kept.count(False) * branch, accumulators) + config.num_branches * branch * (sizes.gate == "given")
    saved += blocks * sizes.Hkv * (sizes.D + sizes.Dv) * e + saved_lists
    with_gradients = rows + keys * (1 + sizes.own_window) * sizes.Hkv
    return {
        "saved": saved * sizes.needs_grad,
        "forward": kept.count(False) * branch + 2 * row_numbers + compressed + choice + forward_lists,
        "backward": (2 * row_numbers + 2 * compressed + lists + made) * sizes.needs_grad,
        "outputs": rows * sizes.Dv * e,
        "gradients": with_gradients * (sizes.D + sizes.Dv) * e * sizes.needs_grad,
    }


def _token_lists(sizes: Sizes, heads: int) -> tuple[int, int]:
    """Bytes of lists by token: the unions' with their bits; those of pairs, with what makes them or is made of them."""
    tokens, G, n, config = sizes.tokens, sizes.Hq // sizes.Hkv, sizes.list_width, sizes.config
    keys = sizes.keys or sizes.tokens
    rows = sizes.rows or G
    list_heads = heads * G // rows
    room = union_room(rows, n, config.block_size, sizes.longest or keys, config.q_tile)
    unions = -(-tokens * rows // ROWS) * list_heads * (1 + room * (1 + words_of_entry(rows, config.block_size))) * 4
    pairs, blocks = tokens * list_heads * n, -(-keys // config.block_size) * heads
    cap = max(1, rows_of_item(pairs * rows) // rows)
    items = (pairs // cap + blocks) * 16 + blocks * 4
    partials = most_partials(pairs, cap) * max(KEYS, config.block_size) * (sizes.D + sizes.Dv) * 4
    return unions, pairs * 4 + items + max(CHUNKS * blocks * 4, partials)


def rows_of_item(rows: int) -> int:
    """Pairs of a query and a listed block that add to one partial sum of dk and dv at most, of so many in all.

    In proportion, so that none keeps the others waiting at the end, and that partial sums take no more memory in longer
    calls. A power of four: few kernels are compiled.
    """
    return 4 ** min(10, max(6, ((rows // ITEMS).bit_length() - 1) // 2))


def plan_memory(
    sizes: Sizes, policy: MemoryPolicy, device: torch.device, kept: tuple[bool, bool, bool] | None = None
) -> MemoryPlan:
    """The fastest plan within the policy's budget; one head a group where none is.

    Args:
        kept: the outputs to save, in place of a choice by the policy.
    """
    budget = policy.budget
    if budget is None and device.type == "cuda":
        budget = _free_budget(sizes, device)
    return _plan_memory(sizes, _choices(policy, sizes.needs_grad) if kept is None else (kept,), budget)


def plan_of(
    tensors: CallTensors, spec: CallSpec, heads: int | None, budget: int | None, kept: Sequence[bool], needs_grad: bool
) -> MemoryPlan:
    """The plan of a call that keeps these outputs: groups of as many heads, or if None as the budget has them."""
    if heads is not None:
        return MemoryPlan(split_heads(tensors.k.shape[-2], heads), tuple(kept))
    sizes = Sizes.of(tensors, spec=spec, needs_grad=needs_grad)
    return plan_memory(sizes, MemoryPolicy(budget=budget), tensors.q.device, tuple(kept))


def kept_in_graphs(policy: MemoryPolicy, needs_grad: bool) -> tuple[bool, bool, bool]:
    """The outputs that a graph saves, which do not follow the memory that is free: "auto" saves all of them."""
    return _choices(policy, needs_grad)[0]


def _choices(policy: MemoryPolicy, needs_grad: bool) -> tuple[tuple[bool, bool, bool], ...]:
    return RECOMPUTE[policy.recompute if needs_grad else "all"]


@lru_cache(maxsize=256)
def _plan_memory(sizes: Sizes, choices: tuple[tuple[bool, bool, bool], ...], budget: int | None) -> MemoryPlan:
    for kept in choices:
        for count in range(1, sizes.Hkv + 1):
            heads = -(-sizes.Hkv // count)
            if budget is None or _peak(sizes, heads, kept) <= budget:
                return MemoryPlan(split_heads(sizes.Hkv, heads), kept)
    return MemoryPlan(split_heads(sizes.Hkv, 1), choices[-1])


def _peak(sizes: Sizes, heads: int, kept: tuple[bool, bool, bool]) -> int:
    parts = predict(sizes, heads, kept)
    return parts["saved"] + max(parts["forward"], parts["backward"])


def split_heads(Hkv: int, heads: int) -> tuple[tuple[int, int], ...]:
    """Groups of so many key/value heads; the last one may have fewer."""
    return tuple((first, min(first + heads, Hkv)) for first in range(0, Hkv, heads))


def _free_budget(sizes: Sizes, device: torch.device) -> int | None:
    """Free bytes less o and the gradients; None for a small call."""
    total = _total_memory(device.index)
    if sizes.config.deterministic:
        return _budget_when_empty(sizes, total)
    parts = _whole(sizes)
    if sum(parts.values()) < SMALL * total:
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + unused
    return max(0, free - int(RESERVE * total) - parts["outputs"] - parts["gradients"])


@lru_cache(maxsize=256)
def _whole(sizes: Sizes) -> dict[str, int]:
    """`predict` for all heads in one group, everything saved; not to be written to."""
    return predict(sizes, sizes.Hkv, (sizes.needs_grad,) * 3)


def _budget_when_empty(sizes: Sizes, total: int) -> int | None:
    """`_free_budget` if nothing but the call's inputs were on the GPU."""
    parts = _whole(sizes)
    if sum(parts.values()) < SMALL * total:
        return None
    per_key = (1 + sizes.own_window) * sizes.Hkv * (sizes.D + sizes.Dv)
    elements = sizes.tokens * sizes.Hq * sizes.D + (sizes.keys or sizes.tokens) * per_key
    return max(0, total - elements * sizes.itemsize - int(RESERVE * total) - parts["outputs"] - parts["gradients"])


@lru_cache(maxsize=None)
def _total_memory(index: int | None) -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index).total_memory
