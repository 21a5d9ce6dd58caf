"""Faults in the kernels themselves and in what they wait for, found on a GPU; kernels are compiled past the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from fuzz.kinds import two_passes
from fuzz.mutations import fault, wrong_result
from fuzz.prop import GPU

in_kernels = partial(fault, needs=GPU, seconds=120.0)
result_in_kernels = partial(wrong_result, needs=GPU, seconds=120.0)


@in_kernels("kernel: no tail mask", "flash_attn.cute.mask:AttentionMask.apply_mask", "attention.is")
def _no_tail(original: Callable) -> Callable:
    """Keys past the end of a sequence are not masked on Hopper."""
    import inspect

    signature = inspect.signature(original)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.arguments["mask_seqlen"] = False
        return original(*given.args, **given.kwargs)

    return wrong


@in_kernels(
    "kernel: classification off by one",
    "flash_attn.cute.compressed_causal.mask:CompressedCausal.keys_seen_by",
    "attention.is",
    shows=lambda kind: kind.mask == "compressed",
)
def _seen(original: Callable) -> Callable:
    """A query sees one compressed key too many."""
    return lambda self, row: original(self, row) + 1


@result_in_kernels(
    "kernel: dropped entry",
    "flash_attn.cute.bwd_sm90.query_loop:QueryLoop.create",
    "attention.is",
    shows=lambda kind: kind.lists,
)
def _dropped(walk: Any) -> Any:
    """Backward leaves out the first entry of every list of two or more."""
    import cutlass
    from cutlass import Int32

    skip = cutlass.select_(walk.end - walk.begin > walk.subtiles, Int32(walk.subtiles), Int32(0))
    return replace(walk, begin=walk.begin + skip)


@in_kernels(
    "kernel: first sequence's rows",
    "flash_attn.cute.lists.rows:find_row",
    "attention.is",
    shows=lambda kind: kind.lists and kind.heads != "all" and (not kind.packed or kind.form == "padded"),
)
def _rows(original: Callable) -> Callable:
    """Every batch reads the first one's lists; not in a pack, whose rows are of different widths."""

    def wrong(tensors: Any, rows_before: Any, batch: Any, *place: Any, **more: Any) -> Any:
        own = batch * 0 if rows_before is None else batch
        return original(tensors, rows_before, own, *place, **more)

    return wrong


@in_kernels(
    "kernel: loads past the end",
    "flash_attn.cute.runtime.bounded_loads:bounded",
    "relations.neighbours",
    shows=lambda kind: kind.packed,
)
def _past_the_end(original: Callable) -> Callable:
    """On Hopper, tiles of a packed sequence hold rows of the next one."""
    return lambda tensor, cu_seqlens, dim=0: tensor


@result_in_kernels(
    "kernel: dq loses its last step",
    "flash_attn.cute.fwd_sm90.loads:KeyLoop.create",
    "attention.is",
    shows=two_passes,
)
def _lost_step(walk: Any) -> Any:
    """The dq pass leaves out the last step of every walk of two or more."""
    import cutlass
    from cutlass import Int32

    lost = cutlass.select_(walk.count > walk.parts, Int32(walk.parts), Int32(0))
    return replace(walk, count=walk.count - lost)


@in_kernels(
    "kernel: hangs",
    "fuzz.attention:lists_for",
    "attention.is",
    seconds=300.0,
    shows=lambda kind: kind.passes == 1 and kind.deterministic and not kind.plan and not kind.packed,
    waits=True,
)
def _never_its_turn(original: Callable) -> Callable:
    """Every add to dq waits for one more than comes before it, so that none is first: what the watchdog is for."""

    def wrong(call: Any, backward: bool) -> Any:
        lists = original(call, backward)
        if not backward or lists is None:
            return lists
        orders = {name: getattr(lists, name) for name in ("dq_write_order", "dq_write_order_full")}
        return lists._replace(**{name: None if order is None else order + 1 for name, order in orders.items()})

    return wrong


@result_in_kernels("kernel: bit of a token", "nsa_layer.kernels.union_lists.unions:union_lists", "layer.lists by token")
def _token_bit(unions: Any) -> Any:
    """In each tile the first block of the union is listed by its first token where it was not, and not where it was."""
    bits = unions.bits.clone()
    bits[..., 0, 0] ^= 1
    return unions._replace(bits=bits)


@result_in_kernels(
    "kernel: union without its last block",
    "nsa_layer.kernels.union_lists.unions:union_lists",
    "layer.lists by token",
)
def _short_union(unions: Any) -> Any:
    """Unions of two or more blocks lack the last one."""
    return unions._replace(counts=unions.counts - (unions.counts > 1).int())


@result_in_kernels("kernel: pair lost", "nsa_layer.kernels.union_lists.key_csr:pairs_by_block", "layer.lists by token")
def _lost_pair(pairs: Any) -> Any:
    """The last token that lists a block adds nothing to its gradients, if there are others."""
    items = pairs.items.clone()
    items[:, 2] -= (items[:, 2] - items[:, 1] > 1).int()
    return pairs._replace(items=items)
