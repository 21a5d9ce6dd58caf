"""Checks of the slots of caches: missing ones, and those that two sequences or two tensors share and one writes to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from nsa_layer.call import CACHES, COMPRESSED_CACHES, Call
from nsa_layer.derivatives import is_transformed

Tensor = torch.Tensor


def check_slots(fits: Sequence[bool], call: Call) -> None:
    """Raise ValueError for slots that are missing, or that a sequence shares with another one and writes to.

    Args:
        fits: for each sequence, whether the caches have slots for its tokens.
    """
    cache, lengths = call.cache, call.query_lengths
    ends = [max(0, end + (0 if call.k is None else T)) for end, T in zip(cache.cache_seqlens.tolist(), lengths)]
    if not all(fits):
        b = list(fits).index(False)
        raise ValueError(
            f"sequence {b} does not fit its caches, with {lengths[b]} queries and {ends[b]} tokens, new ones included: "
            "check cache_seqlens, page tables and cache_batch_idx"
        )
    spans, count = [(end - T, end) for end, T in zip(ends, lengths)], call.config.compressed_length
    compressed = [(count(first), count(end)) for first, end in spans]
    blocks = next((x.shape[1] for x in cache.named(COMPRESSED_CACHES).values()), 1)
    for name, size, spans, writes in (
        ("page_table", cache.k_cache.shape[1], spans, call.k is not None),
        ("cmp_page_table", blocks, compressed, True),
        ("cache_batch_idx", cache.capacity, spans, True),
    ):
        if (table := getattr(cache, name)) is None:
            continue
        uses = [  # a page, the sequence that has it, the first slot of the page that it writes, the last that it has
            (page, b, max(0, first - i * size) if writes and first < end else size, min(size, end - i * size))
            for b, (row, (first, end)) in enumerate(zip(table.view(len(lengths), -1).tolist(), spans))
            for i, page in enumerate(row[: -(-end // size)])
        ]
        for (page, b), n in Counter(use[:2] for use in uses).items():
            if n > 1 and lengths[b]:
                raise ValueError(f"{name} must name no page of a sequence twice, got {page} twice for sequence {b}")
        lowest: dict[int, tuple[int, int]] = {}
        for page, b, written, _ in uses:
            lowest[page] = min(lowest.get(page, (size, b)), (written, b))
        for page, b, _, end in uses:
            written, writer = lowest[page]
            if writer != b and end > written:
                raise ValueError(
                    f"{name} must let no two sequences write to the same slot, or one where another has tokens, "
                    f"got {page} for sequences {min(b, writer)} and {max(b, writer)}"
                )


def refuse_aliases(call: Call, out: Tensor | None) -> None:
    """Raise ValueError where a tensor that the call writes to overlaps itself or another cache."""
    caches = {name: x for name in CACHES if (x := getattr(call.cache, name)) is not None}
    written = {name: x for name, x in caches.items() if call.k is not None or "cmp" in name}
    for name, x in (written if out is None else written | {"out": out}).items():
        refuse_overlap(name, x)
        for other, y in caches.items():
            if name != other and _meet(x, y):
                raise ValueError(f"{name} must have memory of its own, got a tensor that overlaps {other}")


def refuse_overlap(name: str, x: Tensor) -> None:
    """Raise ValueError for a tensor with several elements at one address, which cannot be written to."""
    reach = 0
    for step, size in sorted((step, size) for step, size in zip(x.stride(), x.shape) if size > 1):
        if step <= reach:
            raise ValueError(
                f"{name} is written to, must not be expanded, nor overlap itself, got strides {x.stride()}"
            )
        reach += step * (size - 1)


def _meet(x: Tensor, y: Tensor) -> bool:
    """True if elements of two tensors share a byte; False where these have no addresses."""
    if torch.compiler.is_compiling() or is_transformed() or {type(x), type(y)} != {Tensor} or not x.numel() * y.numel():
        return False
    high, low = Counter(), Counter()  # the most and, negated, the least of each step between a byte of x and of y
    for bound, tensor in ((high, x), (low, y)):
        bytes_of = tensor.element_size()
        bound[1] += bytes_of - 1
        for step, size in zip(tensor.stride(), tensor.shape):
            bound[step * bytes_of] += size - 1

    def is_sum(gap: int, steps: Sequence[int]) -> bool:
        if not steps:
            return gap == 0
        step, *rest = steps
        least, most = -sum(low[other] * other for other in rest), sum(high[other] * other for other in rest)
        counts = range(max(-low[step], -((most - gap) // step)), min(high[step], (gap - least) // step) + 1)
        return any(is_sum(gap - n * step, rest) for n in counts)

    return is_sum(y.data_ptr() - x.data_ptr(), sorted({*high, *low} - {0}, reverse=True))
