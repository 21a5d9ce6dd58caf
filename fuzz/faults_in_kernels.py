"""Faults in the kernels themselves, found on a GPU; kernels are compiled anew with them, past the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fuzz.mutations import fault
from fuzz.prop import GPU


@fault(
    "kernel: no tail mask", "flash_attn.cute.mask:AttentionMask.apply_mask", "attention.is", needs=GPU, seconds=120.0
)
def _no_tail(original: Callable) -> Callable:
    """Keys past the end of a sequence are not masked on Hopper."""
    import inspect

    signature = inspect.signature(original)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.arguments["mask_seqlen"] = False
        return original(*given.args, **given.kwargs)

    return wrong


@fault(
    "kernel: classification off by one",
    "flash_attn.cute.compress:CompressedCausal.keys_seen_by",
    "attention.is",
    needs=GPU,
    seconds=120.0,
)
def _seen(original: Callable) -> Callable:
    """A query sees one compressed key too many."""
    return lambda self, row: original(self, row) + 1


@fault("kernel: dropped entry", "flash_attn.cute.query_walk:QueryWalk.create", "attention.is", needs=GPU, seconds=120.0)
def _dropped(original: Callable) -> Callable:
    """Backward leaves out the first entry of every list of two or more."""
    from dataclasses import replace

    def wrong(*args: Any, **kwargs: Any) -> Any:
        import cutlass
        from cutlass import Int32

        walk = original(*args, **kwargs)
        skip = cutlass.select_(walk.end - walk.begin > walk.subtiles, Int32(walk.subtiles), Int32(0))
        return replace(walk, begin=walk.begin + skip)

    return wrong


@fault("kernel: first sequence's rows", "flash_attn.cute.list_rows:find_row", "attention.is", needs=GPU, seconds=120.0)
def _rows(original: Callable) -> Callable:
    """Every batch reads the first one's lists; not in a pack, whose rows are of different widths."""

    def wrong(tensors: Any, rows_before: Any, batch: Any, head: Any, block: Any, across: Any) -> Any:
        own = batch * 0 if rows_before is None else batch
        return original(tensors, rows_before, own, head, block, across)

    return wrong
