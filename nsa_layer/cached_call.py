"""The arguments of `nsa_with_kvcache` in one record, and their checks: errors come before anything is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nsa_layer.call_spec import DIFFERENTIABLE, require_choice_by_token
from nsa_layer.checks import (
    BATCH,
    PACKED,
    check_exclusive,
    check_groups,
    check_lengths,
    check_lists,
    check_scale,
    check_starts,
    check_tensor,
    leaves_starts_on_gpu,
    require_config,
)
from nsa_layer.config import NSAConfig, require_int
from nsa_layer.derivatives import is_transformed

Tensor = torch.Tensor
TOKEN_CACHES = ("k", "v", "k_win", "v_win")
COMPRESSED_CACHES = ("k_cmp", "v_cmp")


@dataclass(frozen=True, kw_only=True)
class CachedCall:
    """The tensors of one call, shaped as `nsa_with_kvcache` says, and its options."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None = None
    v: Tensor | None = None
    cache_seqlens: Tensor | int
    page_table: Tensor | None = None
    cache_batch_idx: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    max_seqlen_q: int | None = None
    k_cmp_cache: Tensor | None = None
    v_cmp_cache: Tensor | None = None
    cmp_page_table: Tensor | None = None
    k_cmp: Tensor | None = None
    v_cmp: Tensor | None = None
    k_win: Tensor | None = None
    v_win: Tensor | None = None
    k_win_cache: Tensor | None = None
    v_win_cache: Tensor | None = None
    gate_weight: Tensor | None = None
    gates: Tensor | None = None
    compress_k_weight: Tensor | None = None
    compress_v_weight: Tensor | None = None
    config: NSAConfig
    softmax_scale: float | None = None
    block_indices: Tensor | None = None
    num_splits: int = 0
    out: Tensor | None = None

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def B(self) -> int:
        """Sequences."""
        return len(self.cu_seqlens_q) - 1 if self.packed else self.q.shape[0]

    @property
    def room(self) -> int:
        """Tokens that a sequence may have in the caches."""
        page = self.k_cache.shape[1]
        return page if self.page_table is None else page * self.page_table.shape[1]

    @property
    def most_queries(self) -> int:
        """Queries at most of a packed sequence, as far as shapes and ``max_seqlen_q`` say."""
        return min(self.q.shape[0] if self.max_seqlen_q is None else self.max_seqlen_q, self.q.shape[0], self.room)

    @property
    def bytes_of_room(self) -> int:
        """Bytes of the tokens that a sequence may have."""
        return sum(self.room * x.shape[2:].numel() * x.element_size() for x in self.caches(TOKEN_CACHES).values())

    def caches(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        """The caches that are given, by name, of `TOKEN_CACHES` or `COMPRESSED_CACHES`."""
        named = {name: getattr(self, f"{name}_cache") for name in names}
        return {name: x for name, x in named.items() if x is not None}

    def filled(self, T: int) -> int:
        """The most blocks of compression that T tokens can complete."""
        return -(-T // self.config.stride)


def check_call(
    call: CachedCall, *, backend: str | None = "reference", validate: bool = True
) -> tuple[tuple[int, ...] | None, float]:
    """Check everything but the numbers on the device.

    Returns:
        The number of queries of each sequence, as `query_lengths` gives it, and the factor of q . k.

    Raises:
        TypeError, ValueError: an argument is bad; the message names it.
        NotImplementedError: the configuration is of queries that a cache cannot serve.
    """
    _check_config(call)
    q, paged, config = call.q, call.page_table is not None, call.config
    layout = (PACKED if call.packed else BATCH) | dict(keys="total" if call.packed else "B T")
    check_tensor("q", q, q, sizes := {}, layout)
    if call.packed:
        check_starts(call.cu_seqlens_q, "cu_seqlens_q")
    else:
        sizes["Tc"] = call.filled(q.shape[1])
    sizes["B"] = call.B
    if not paged and call.cache_batch_idx is None:
        sizes["rows"] = call.B
    for name in TOKEN_CACHES:
        check_tensor(f"{name}_cache", getattr(call, f"{name}_cache"), q, sizes, layout)
    check_groups(sizes, "k_cache")
    S = sizes["S"]
    if paged:  # those of compressed keys are pages of another table
        sizes["Sc"] = S // config.stride
    else:
        sizes["rows_cmp"] = sizes["rows"]
    for name, x in call.caches(COMPRESSED_CACHES).items():
        check_tensor(f"{name}_cache", x, q, sizes if paged else dict(sizes), layout)
        if not paged and x.shape[1] < (least := config.compressed_length(S)):
            raise ValueError(f"{name}_cache must have room for the {least} keys of {S} tokens, got {x.shape[1]}")
    _check_places(call, sizes, layout)
    lengths = _check_lengths(call, backend, validate)
    if call.packed and lengths is not None:
        sizes["blocks"] = sum(map(call.filled, lengths))
    check_exclusive(call)
    for name in DIFFERENTIABLE[1:]:
        check_tensor(name, getattr(call, name), q, dict(sizes), layout)
    check_tensor("out", call.out, q, sizes, layout)
    _check_new(call)
    if call.out is not None:
        _refuse_overlap("out", call.out)
    if call.block_indices is not None:
        of = lengths if call.packed else call.q.shape[1:2]
        tiles = None if of is None else list(map(call.config.num_tiles, of))
        check_lists(call.block_indices, call.q, call.k_cache.shape[2], tiles, packed=call.packed)
    return lengths, check_scale(call.softmax_scale, call.q.shape[-1])


def _check_config(call: CachedCall) -> None:
    config = call.config
    require_config(config)
    if call.block_indices is None:
        require_choice_by_token(config, "nsa_with_kvcache")
    if config.offset < config.span - 1:
        raise NotImplementedError(
            f"nsa_with_kvcache with compress_offset={config.offset}: it shows keys that are made of tokens which are "
            f"not there yet; use compress_offset >= compress_size - 1 = {config.span - 1}"
        )
    require_int("num_splits", call.num_splits, least=0)


def query_lengths(call: CachedCall, *, backend: str | None, validate: bool) -> tuple[int, ...] | None:
    """Queries of each sequence.

    None in a graph with packed ones, where the operator checks them when it runs, and for kernels that leave those of
    ``cu_seqlens_q`` on the GPU there, without ``validate``, where they attend to all sequences at a time.
    """
    if not call.packed:
        return (call.q.shape[1],) * call.q.shape[0]
    leave = not validate and leaves_starts_on_gpu(backend, call.cu_seqlens_q, call.q)
    if leave:
        from nsa_layer.cute.kvcache import goes_in_parts

        leave = not goes_in_parts(call)
    return check_lengths(call.cu_seqlens_q, call.q, "cu_seqlens_q", "q", read=not leave)


def refuse_places(there: Sequence[bool], call: CachedCall, lengths: Sequence[int]) -> None:
    """Raise ValueError unless all sequences have places in the caches; reads ``cache_seqlens`` then."""
    if not all(there):
        at = list(there).index(False)
        tokens = int(call.cache_seqlens[at]) + (0 if call.k is None else lengths[at])
        raise ValueError(
            f"cache_seqlens, page tables and cache_batch_idx must lead to places in the caches; sequence {at} has "
            f"{lengths[at]} queries and {tokens} tokens, new ones included"
        )


def refuse_shared(call: CachedCall, lengths: Sequence[int]) -> None:
    """Raise ValueError where a sequence, whose places are in the caches, has a page twice or writes to another's."""
    ends = [max(0, end + (0 if call.k is None else T)) for end, T in zip(call.cache_seqlens.tolist(), lengths)]
    written, count = [(end - T, end) for end, T in zip(ends, lengths)], call.config.compressed_length
    made = [(count(first), count(end)) for first, end in written]
    blocks = next((x.shape[1] for x in call.caches(COMPRESSED_CACHES).values()), 1)
    for name, size, spans, writes in (
        ("page_table", call.k_cache.shape[1], written, call.k is not None),
        ("cmp_page_table", blocks, made, True),
        ("cache_batch_idx", call.room, written, True),
    ):
        if (table := getattr(call, name)) is None:
            continue
        rows = [row[: -(-end // size)] for row, (_, end) in zip(table.view(len(lengths), -1).tolist(), spans)]
        lowest: dict[int, tuple[int, int]] = {}  # place of a page that is written to, and the sequence
        for b, (row, (first, end)) in enumerate(zip(rows, spans)):
            if lengths[b] and len(set(row)) < len(row):
                page = next(page for i, page in enumerate(row) if page in row[:i])
                raise ValueError(f"{name} must name no page of a sequence twice, got {page} twice for sequence {b}")
            for i in range(first // size, len(row)) if writes and end > first else ():
                lowest[row[i]] = min(lowest.get(row[i], (size, b)), (max(0, first - i * size), b))
        for b, (row, (_, end)) in enumerate(zip(rows, spans)):
            for i, page in enumerate(row):
                place, writer = lowest.get(page, (size, b))
                if writer != b and end - i * size > place:
                    raise ValueError(
                        f"{name} must let no two sequences write to the same place, or one where another has tokens, "
                        f"got {page} for sequences {min(b, writer)} and {max(b, writer)}"
                    )


def refuse_aliases(call: CachedCall) -> None:
    """Raise ValueError where what the call writes to has two elements at one address, or one of another cache."""
    caches = {f"{name}_cache": x for name, x in call.caches((*TOKEN_CACHES, *COMPRESSED_CACHES)).items()}
    written = {name: x for name, x in caches.items() if call.k is not None or "cmp" in name}
    for name, x in (written if call.out is None else written | {"out": call.out}).items():
        _refuse_overlap(name, x)
        for other, y in caches.items():
            if name != other and _meet(x, y):
                raise ValueError(f"{name} must have memory of its own, got a tensor that overlaps {other}")


def _refuse_overlap(name: str, x: Tensor) -> None:
    """Raise ValueError for a tensor with several elements at one address, which cannot be written to."""
    reach = 0
    for step, size in sorted((step, size) for step, size in zip(x.stride(), x.shape) if size > 1):
        if step <= reach:
            raise ValueError(
                f"{name} is written to, must not be expanded, nor overlap itself, got strides {x.stride()}"
            )
        reach += step * (size - 1)


def _meet(x: Tensor, y: Tensor) -> bool:
    """True if tensors of one dtype have an element at the same address; False where they have no addresses."""
    if torch.compiler.is_compiling() or is_transformed() or {type(x), type(y)} != {Tensor} or not x.numel() * y.numel():
        return False
    high, low = Counter(), Counter()  # the most and, negated, the least of each step between an element of x and y
    for bound, tensor in ((high, x), (low, y)):
        for step, size in zip(tensor.stride(), tensor.shape):
            bound[step] += size - 1

    def is_sum(gap: int, steps: Sequence[int]) -> bool:
        if not steps:
            return gap == 0
        step, *rest = steps
        least, most = -sum(low[other] * other for other in rest), sum(high[other] * other for other in rest)
        counts = range(max(-low[step], -((most - gap) // step)), min(high[step], (gap - least) // step) + 1)
        return any(is_sum(gap - n * step, rest) for n in counts)

    gap = (y.data_ptr() - x.data_ptr()) // x.element_size()
    return is_sum(gap, sorted({*high, *low} - {0}, reverse=True))


def _check_lengths(call: CachedCall, backend: str | None, validate: bool) -> tuple[int, ...] | None:
    if call.max_seqlen_q is not None:
        require_int("max_seqlen_q", call.max_seqlen_q, least=1)
        if not call.packed:
            raise ValueError(f"max_seqlen_q is for packed q, got {call.max_seqlen_q} without cu_seqlens_q")
    lengths = query_lengths(call, backend=backend, validate=validate)
    if call.max_seqlen_q is not None and lengths is not None and call.max_seqlen_q < max(lengths):
        raise ValueError(f"max_seqlen_q must be at least {max(lengths)}, got {call.max_seqlen_q}")
    if lengths is not None and max(lengths) > call.room:
        raise ValueError(f"q must have at most {call.room} tokens a sequence, the caches' room, got {max(lengths)}")
    return lengths


def _check_places(call: CachedCall, sizes: dict[str, int], layout: dict[str, str]) -> None:
    """What says where in the caches sequences are."""
    q, paged, S = call.q, call.page_table is not None, sizes["S"]
    if isinstance(call.cache_seqlens, torch.Tensor):
        check_tensor("cache_seqlens", call.cache_seqlens, q, sizes, layout)
    else:
        require_int("cache_seqlens", call.cache_seqlens, least=0)
    for name in ("page_table", "cmp_page_table", "cache_batch_idx"):
        check_tensor(name, getattr(call, name), q, sizes, layout)
    if paged and call.cache_batch_idx is not None:
        raise ValueError("cache_batch_idx and page_table exclude each other, got both; permute the table's rows")
    if paged and S % call.config.block_size:
        raise ValueError(f"k_cache's pages must have a multiple of {call.config.block_size} tokens, got {S}")
    wanted = paged and bool(call.caches(COMPRESSED_CACHES))
    if wanted != (call.cmp_page_table is not None):
        raise ValueError("cmp_page_table must be given where compressed caches have pages, and nowhere else")


def _check_new(call: CachedCall) -> None:
    """New keys and values have caches to be written to."""
    of_window = ("k_win", "v_win", "k_win_cache", "v_win_cache")
    if not call.config.window_size and (found := [name for name in of_window if getattr(call, name) is not None]):
        raise ValueError(f"{found[0]} must be None where there is no window, got one with window_size=0")
    if (call.k is None) != (call.v is None):
        raise ValueError("k and v must be given together, or neither")
    for name in (*TOKEN_CACHES, *COMPRESSED_CACHES):
        x, cache = getattr(call, name), getattr(call, f"{name}_cache")
        if x is not None and cache is None:
            raise ValueError(f"{name} needs {name}_cache to be written to, got none")
        if "win" in name and cache is not None and (x is None) != (call.k is None):
            raise ValueError(f"{name} must be given where k is and {name}_cache is, and where neither is not")
