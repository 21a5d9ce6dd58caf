"""Memory plan of a call on the kernels: groups of heads, and the outputs that are saved for backward.

Heads are independent, so a call runs key/value heads in groups, each with its query heads; a group's temporaries are
freed before the next group's are made. Branch outputs are saved for backward or recomputed there. Both follow from one
number of bytes; with enough memory there is one group and everything is saved, which is fastest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from typing import NamedTuple

import torch

from nsa_layer.call import Call
from nsa_layer.config import BRANCHES, NSAConfig, require_one_of
from nsa_layer.kernels.union_lists.sizes import CHUNKS, longest_work_tile, most_partials, union_capacity, words_of_entry
from nsa_layer.support import UNION_BLOCK, UNION_ROWS, kernel_dims, native_dims, reads_unions

EVERYTHING, NOTHING = (True, True, True), (False, False, False)
# The outputs to save, of the compressed, the selected and the window branch: the first choice that fits.
RECOMPUTE = {
    "auto": (EVERYTHING, NOTHING),
    "none": (EVERYTHING,),
    "compressed": ((False, True, True),),
    "all": (NOTHING,),
}
RESERVE = 0.06  # of the GPU's memory: fragments, lists, compiled kernels
SMALL = 1 / 16  # of the GPU's memory: a call that needs less does not ask the driver


@dataclass(frozen=True, kw_only=True)
class MemoryPolicy:
    """The memory that a call of `nsa` on the kernels may allocate.

    Attributes:
        budget: bytes for forward and backward beside q, k, v, o and their gradients. None: what is free on the GPU
            when forward is called, less o, the gradients and a reserve; only calls that need more than a sixteenth of
            the GPU's memory ask. With ``deterministic`` it is what an otherwise empty GPU would have free: the number
            of heads in a group may decide which kernels run, and with them the last bits.
        recompute: branches whose outputs are recomputed in backward instead of saved: "none", "compressed" (usually a
            third of the memory), "all", or "auto": "all" where saving exceeds the budget, else "none".

    Raises:
        TypeError, ValueError: a field has the wrong type or value.

    Example:
        >>> layer = NSAttention(128, num_heads=4, num_kv_heads=2, memory=MemoryPolicy(recompute="all"))
    """

    budget: int | None = None
    recompute: str = "auto"

    def __post_init__(self) -> None:
        if self.budget is not None:
            if isinstance(self.budget, bool) or not isinstance(self.budget, int):
                raise TypeError(f"budget must be an int or None, got {self.budget!r}")
            if self.budget < 0:
                raise ValueError(f"budget must be at least 0 bytes, got {self.budget}")
        require_one_of("recompute", self.recompute, RECOMPUTE)


class Sizes(NamedTuple):
    """Sizes of a call that its memory depends on.

    Attributes:
        tokens, keys: of all sequences.
        longest: keys of one sequence, at most.
        itemsize: bytes of an element of q.
        rows: query heads that share a list.
        unions: tiles read unions of lists, see `support.reads_unions`.
        listed: lists are the caller's.
        gate: "weight", "given" (the caller's gates) or "none".
        own_window: the window has keys or values of its own.
        index_row: elements of a token's queries and keys of an index with a loss, else 0.
        one_branch: as `Call.one_branch`.
        unpadded: D and Dv of the caller's tensors, which are copied to rows of the native D and Dv; None: they are not.
    """

    tokens: int
    keys: int
    longest: int
    Hq: int
    Hkv: int
    D: int
    Dv: int
    itemsize: int
    config: NSAConfig
    list_width: int
    rows: int
    unions: bool = True
    listed: bool = False
    gate: str = "weight"
    own_window: bool = False
    needs_grad: bool = True
    index_row: int = 0
    one_branch: bool = False
    unpadded: tuple[int, int] | None = None

    @classmethod
    def of(cls, call: Call, *, needs_grad: bool) -> Sizes:
        """The sizes of a call; of k the shape is that of v."""
        spec, config, q, v, lists = call.spec, call.config, call.q, call.v, call.block_indices
        counts = (q.shape[:-2].numel(), v.shape[:-2].numel(), call.longest_k)
        dims = kernel_dims(call, needs_grad=needs_grad)
        heads = (q.shape[-2], v.shape[-2], *dims)
        width = config.list_width(call.longest_k) if lists is None else lists.shape[-1]
        unions = reads_unions(config, dims[0], listed=spec.listed)
        of_lists = (width, call.q_heads_per_list, unions, lists is not None)
        of_index = (call.q_index, call.k_index) if spec.index_loss else ()
        index_row = sum(x.shape[-2:].numel() for x in of_index)
        unpadded = None if dims == call.dims else call.dims
        more = (call.gate, call.has_own_window, needs_grad, index_row, call.one_branch, unpadded)
        return cls(*counts, *heads, q.element_size(), config, *of_lists, *more)


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
        "saved": what backward needs of forward, all groups; "forward", "backward": a group's while it is
        computed, beside saved tensors; "outputs", "gradients": o; do, dq, dk, dv and those of an index.
    """
    tokens, keys, e, config, width = sizes.tokens, sizes.keys, sizes.itemsize, sizes.config, sizes.list_width
    query_heads, rows, row_sizes = heads * (sizes.Hq // sizes.Hkv), tokens * sizes.Hq, sizes.D + sizes.Dv
    compresses, selects, slides = there = tuple(map(config.computes, BRANCHES))
    kept = [] if sizes.one_branch else list(compress(kept, there))
    tiles, blocks = config.num_tiles(tokens), config.compressed_capacity(keys) * compresses
    branch, row_numbers = tokens * query_heads * sizes.Dv * e, tokens * query_heads * 4 * config.num_branches
    compressed = blocks * heads * (row_sizes * e + sizes.D * 4)
    dq_accum, dk_dv_accum = 4 * tokens * query_heads * sizes.D, 4 * keys * heads * row_sizes
    if sizes.listed or not selects or config.q_tile == 1:  # neither pooled queries nor counts
        selection = 0
    else:  # a tile's pooled query in fp32 and split into two fp16
        selection = tiles * (query_heads * sizes.D * 8 + heads * width * 8)
    if sizes.unions or not selects:
        query_lists, pairs = _union_bytes(sizes, heads) if selects else (0, 0)
        # dq's accumulator is freed before dk and dv of the selected branch, which has none, are computed.
        lists, accumulators = query_lists, slides * dk_dv_accum + max((compresses or slides) * dq_accum, pairs)
    else:
        query_lists, lists = 0, 64 * tiles * query_heads * width
        accumulators = dq_accum + (1 + sizes.own_window) * dk_dv_accum
    # Recomputed outputs are freed before accumulators; with the caller's gates outputs have gradients in memory.
    late = max(kept.count(False) * branch, accumulators) + config.num_branches * branch * (sizes.gate == "given")
    saved_lists = 0 if sizes.listed or not selects else tiles * sizes.Hkv * (width + (not sizes.unions)) * 4
    # Of one branch lists of queries are freed before those of keys are made, and the output is the branch's.
    backward = 2 * row_numbers + 2 * compressed + (max(lists, late) if sizes.one_branch else lists + late)
    if sizes.index_row:  # by block of a list, in fp32: log-sum-exps of query heads; scores, and their gradients
        selection += 4 * tokens * query_heads * width * -(-config.block_size // UNION_BLOCK)
        selection += 4 * tokens * heads * width
        saved_lists += 4 * tokens * sizes.Hkv * width
        backward = max(backward, 8 * tokens * sizes.Hkv * width)  # tokens of each block, and of each score
    # A group's own are joined to those of all heads, which there are without backward, too.
    selection += (not sizes.needs_grad) * saved_lists + (heads < sizes.Hkv) * saved_lists * heads // sizes.Hkv
    gates = len(config.branches) * (sizes.gate != "none")
    saved = rows * (sum(kept) * sizes.Dv * e + (config.num_branches + gates) * 4)
    saved += blocks * sizes.Hkv * row_sizes * e + saved_lists
    numbers = 0 if sizes.one_branch else 2 * row_numbers
    of_keys = keys * (1 + sizes.own_window) * sizes.Hkv
    padded = 0 if sizes.unpadded is None else (rows * sizes.D + of_keys * row_sizes) * e
    more_D, more_Dv = sizes.unpadded or (0, 0)  # what is cut off is copied
    with_gradients = (rows + of_keys) * (row_sizes + more_D + more_Dv) + tokens * sizes.index_row
    forward = kept.count(False) * branch + numbers + compressed + selection + query_lists
    if (native := native_dims(sizes.D, sizes.Dv)) != (sizes.D, sizes.Dv):  # q and o in place, k and v copied
        forward += keys * heads * sum(native) * e
    return {
        "saved": (saved + padded) * sizes.needs_grad,
        "forward": forward + padded * (not sizes.needs_grad),
        "backward": backward * sizes.needs_grad,
        "outputs": rows * (sizes.Dv + more_Dv) * e,
        "gradients": with_gradients * e * sizes.needs_grad,
    }


def _union_bytes(sizes: Sizes, heads: int) -> tuple[int, int]:
    """Bytes of union lists with their query bits, and of the token-block CSR with the larger of its scratch and its
    partial sums."""
    tokens, rows, n, size = sizes.tokens, sizes.rows, sizes.list_width, sizes.config.block_size
    list_heads = heads * (sizes.Hq // sizes.Hkv) // rows
    width = union_capacity(rows, n, size, sizes.longest, sizes.config.q_tile)
    unions = -(-tokens * rows // UNION_ROWS) * list_heads * (1 + width * (1 + words_of_entry(rows, size))) * 4
    pairs, blocks = tokens * list_heads * n, -(-sizes.keys // size) * heads
    longest = longest_work_tile(pairs, rows)
    work_tiles = (pairs // longest + blocks) * 16 + blocks * 4
    partials = most_partials(pairs, longest) * max(UNION_BLOCK, size) * (sizes.D + sizes.Dv) * 4
    return unions, pairs * 4 + work_tiles + max(CHUNKS * blocks * 4, partials)


def plan_memory(
    sizes: Sizes, policy: MemoryPolicy, device: torch.device, kept: tuple[bool, bool, bool] | None = None
) -> MemoryPlan:
    """The fastest plan within the policy's budget; one head a group where none is.

    Args:
        kept: the outputs to save, instead of the policy's choice.
    """
    budget = policy.budget
    if budget is None and device.type == "cuda":
        budget = _free_budget(sizes, device)
    saves = sizes.needs_grad and not sizes.one_branch  # whose output is that of the call
    return _plan_memory(sizes, _choices(policy, saves) if kept is None else (kept,), budget)


def plan_of(call: Call, heads: int | None, budget: int | None, kept: Sequence[bool], needs_grad: bool) -> MemoryPlan:
    """The plan of a call that keeps these outputs: groups of `heads` key/value heads; None: by the budget."""
    if heads is not None:
        return MemoryPlan(split_heads(call.k.shape[-2], heads), tuple(kept))
    sizes = Sizes.of(call, needs_grad=needs_grad)
    return plan_memory(sizes, MemoryPolicy(budget=budget), call.q.device, tuple(kept))


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
            parts = predict(sizes, heads, kept)
            if budget is None or parts["saved"] + max(parts["forward"], parts["backward"]) <= budget:
                return MemoryPlan(split_heads(sizes.Hkv, heads), kept)
    return MemoryPlan(split_heads(sizes.Hkv, 1), choices[-1])


def split_heads(Hkv: int, heads: int) -> tuple[tuple[int, int], ...]:
    """Groups of `heads` key/value heads; the last one may have fewer."""
    return tuple((first, min(first + heads, Hkv)) for first in range(0, Hkv, heads))


def _free_budget(sizes: Sizes, device: torch.device) -> int | None:
    """Free bytes less o and the gradients; None for a small call. In deterministic mode those that would be free if
    nothing but the call's inputs were on the GPU."""
    total, parts = _total_memory(device.index), _predict_whole(sizes)
    if sum(parts.values()) < SMALL * total:
        return None
    if sizes.config.deterministic:
        of_keys = sizes.keys * (1 + sizes.own_window) * sizes.Hkv * (sizes.D + sizes.Dv)
        free = total - (sizes.tokens * sizes.Hq * sizes.D + of_keys) * sizes.itemsize
    else:
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(0, free - int(RESERVE * total) - parts["outputs"] - parts["gradients"])


@lru_cache(maxsize=256)
def _predict_whole(sizes: Sizes) -> dict[str, int]:
    """`predict` for all heads in one group, everything saved; not to be written to."""
    return predict(sizes, sizes.Hkv, (sizes.needs_grad,) * 3)


@lru_cache(maxsize=None)
def _total_memory(index: int | None) -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index).total_memory
