"""The arguments of `nsa_with_kvcache` in one record, and their checks: errors come before anything is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nsa_layer import checks
from nsa_layer.call import OF_CACHES, CallSpec, require_choice_by_token
from nsa_layer.config import NSAConfig, require_int
from nsa_layer.derivatives import is_transformed

Tensor = torch.Tensor
TOKEN_CACHES = ("k", "v", "k_win", "v_win")
COMPRESSED_CACHES = ("k_cmp", "v_cmp")
CACHES = tuple(f"{name}_cache" for name in (*TOKEN_CACHES, *COMPRESSED_CACHES))


@dataclass(frozen=True, kw_only=True)
class CachedCall:
    """The arguments of one call, shaped as `nsa_with_kvcache` says; first the tensors of its operator, in their order.

    Its static side is a `CallSpec`, whose lengths and bound are those of the queries.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None = None
    v: Tensor | None = None
    cache_seqlens: Tensor | int
    page_table: Tensor | None = None
    cache_batch_idx: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
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
    block_indices: Tensor | None = None
    config: NSAConfig
    softmax_scale: float | None = None
    max_seqlen_q: int | None = None
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
    def capacity(self) -> int:
        """Tokens that a sequence may have in the caches."""
        page = self.k_cache.shape[1]
        return page if self.page_table is None else page * self.page_table.shape[1]

    @property
    def q_heads_per_list(self) -> int:
        """Query heads that share a list of blocks."""
        lists = self.k_cache if self.block_indices is None else self.block_indices
        return self.q.shape[-2] // lists.shape[-2]

    def longest(self, spec: CallSpec) -> int:
        """Queries of a sequence, at most."""
        return self.q.shape[1] if not self.packed else spec.bound or max(spec.lengths)

    def lengths(self, spec: CallSpec) -> tuple[int, ...] | None:
        """Queries of each sequence; None: the GPU alone knows them."""
        return spec.lengths if self.packed else (self.q.shape[1],) * self.q.shape[0]

    def caches(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        """The caches that are given, by name, of `TOKEN_CACHES` or `COMPRESSED_CACHES`."""
        named = {name: getattr(self, f"{name}_cache") for name in names}
        return {name: x for name, x in named.items() if x is not None}

    def most_completed(self, T: int) -> int:
        """The most blocks of compression that T tokens can complete."""
        return -(-T // self.config.stride)


TENSORS = tuple(CachedCall.__dataclass_fields__)[:-5]


def check_call(call: CachedCall, *, backend: str | None = "reference", validate: bool = True) -> CallSpec:
    """Check everything but the numbers on the device, and return the static side of the call.

    Raises:
        TypeError, ValueError: an argument is bad; the message names it.
        NotImplementedError: the configuration is of queries that a cache cannot serve.
    """
    q, paged, config = call.q, call.page_table is not None, call.config
    _check_options(call)
    layout = (checks.PACKED if call.packed else checks.BATCH) | dict(keys="total" if call.packed else "B T")

    def check(*names: str, sizes: dict[str, int]) -> None:
        for name in names:
            checks.check_tensor(name, getattr(call, name), q, sizes, layout)

    check("q", sizes=(sizes := dict(branches=len(config.branches))))
    if call.packed:
        checks.check_starts(call.cu_seqlens_q, "cu_seqlens_q")
    else:
        sizes["Tc"] = call.most_completed(q.shape[1])
    sizes["B"] = call.B
    if not paged and call.cache_batch_idx is None:
        sizes["rows"] = call.B
    check(*CACHES[:4], sizes=sizes)
    checks.check_groups(sizes, "k_cache")
    S = sizes["S"]
    sizes |= {"Sc": S // config.stride} if paged else {"rows_cmp": sizes["rows"]}  # compressed pages have a table
    for name in CACHES[4:]:
        check(name, sizes=sizes if paged else dict(sizes))
        x, least = getattr(call, name), config.compressed_length(S)
        if x is not None and not paged and x.shape[1] < least:
            raise ValueError(f"{name} must have slots for the {least} keys of {S} tokens, got {x.shape[1]}")
    numbers = ("page_table", "cmp_page_table", "cache_batch_idx", "cache_seqlens")
    check(*numbers[: 4 if isinstance(call.cache_seqlens, Tensor) else 3], sizes=sizes)
    _check_tables(call, S)
    checks.check_exclusive(call)
    spec = spec_of(call, checks.check_scale(call.softmax_scale, q.shape[-1]), backend=backend, validate=validate)
    if call.packed and spec.lengths is not None:
        sizes["blocks"] = sum(map(call.most_completed, spec.lengths))
    for name in (*OF_CACHES[1:], "out"):
        check(name, sizes=dict(sizes))
    _check_new(call)
    if call.out is not None:
        _refuse_overlap("out", call.out)
    if call.block_indices is not None:
        lengths = spec.lengths if call.packed else q.shape[1:2]
        tiles = None if lengths is None else list(map(config.num_tiles, lengths))
        checks.check_lists(call.block_indices, q, call.k_cache.shape[2], tiles, packed=call.packed)
    return spec


def spec_of(call: CachedCall, softmax_scale: float, *, backend: str | None, validate: bool) -> CallSpec:
    """The static side of a call, whose packed lengths are read and checked.

    They are left on the GPU, with a bound in their place, for kernels that attend to all sequences at once, without
    ``validate``; in a graph the operator reads them when it runs.
    """
    q, bound = call.q, None
    static, listed = (call.config, True, softmax_scale), call.block_indices is not None
    if call.packed and not validate and checks.leaves_starts_on_gpu(backend, call.cu_seqlens_q, q):
        from nsa_layer.cute.kvcache import needs_host_lengths

        bound = min(call.max_seqlen_q or q.shape[0], q.shape[0], call.capacity)
        bound = None if needs_host_lengths(call, CallSpec(*static, listed=listed, bound=bound)) else bound
    lengths = checks.check_packed_lengths(call.cu_seqlens_q, call.max_seqlen_q, q, suffix="_q", read=bound is None)
    longest = max(lengths) if lengths is not None else 0 if call.packed else q.shape[1]
    if longest > call.capacity:
        raise ValueError(f"q must have at most {call.capacity} tokens a sequence, the caches' capacity, got {longest}")
    return CallSpec(*static, lengths, listed=listed, bound=bound)


def _check_options(call: CachedCall) -> None:
    config = call.config
    checks.require_config(config)
    checks.require_published(config, "nsa_with_kvcache")
    if call.block_indices is None:
        require_choice_by_token(config, "nsa_with_kvcache")
    if config.offset < config.span - 1:
        raise NotImplementedError(
            f"nsa_with_kvcache with compress_offset={config.offset}: it shows keys that are made of tokens which are "
            f"not there yet; use compress_offset >= compress_size - 1 = {config.span - 1}"
        )
    require_int("num_splits", call.num_splits, least=0)
    if not isinstance(call.cache_seqlens, Tensor):
        require_int("cache_seqlens", call.cache_seqlens, least=0)


def _check_tables(call: CachedCall, S: int) -> None:
    """Tables belong to caches of pages, whose size is S."""
    paged = call.page_table is not None
    if paged and call.cache_batch_idx is not None:
        raise ValueError("cache_batch_idx and page_table exclude each other, got both; permute the table's rows")
    if paged and S % call.config.block_size:
        raise ValueError(f"k_cache's pages must have a multiple of {call.config.block_size} tokens, got {S}")
    if (paged and bool(call.caches(COMPRESSED_CACHES))) != (call.cmp_page_table is not None):
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


def check_slots(fits: Sequence[bool], call: CachedCall, lengths: Sequence[int]) -> None:
    """Raise ValueError for slots that are missing, or that a sequence shares with another one and writes to.

    Args:
        fits: for each sequence, whether the caches have slots for its tokens.
        lengths: queries of each sequence.
    """
    ends = [max(0, end + (0 if call.k is None else T)) for end, T in zip(call.cache_seqlens.tolist(), lengths)]
    if not all(fits):
        b = list(fits).index(False)
        raise ValueError(
            f"sequence {b} does not fit its caches, with {lengths[b]} queries and {ends[b]} tokens, new ones included: "
            "check cache_seqlens, page tables and cache_batch_idx"
        )
    spans, count = [(end - T, end) for end, T in zip(ends, lengths)], call.config.compressed_length
    compressed = [(count(first), count(end)) for first, end in spans]
    blocks = next((x.shape[1] for x in call.caches(COMPRESSED_CACHES).values()), 1)
    for name, size, spans, writes in (
        ("page_table", call.k_cache.shape[1], spans, call.k is not None),
        ("cmp_page_table", blocks, compressed, True),
        ("cache_batch_idx", call.capacity, spans, True),
    ):
        if (table := getattr(call, name)) is None:
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


def refuse_aliases(call: CachedCall) -> None:
    """Raise ValueError where two elements that the call writes to, or one and another cache's, have one address."""
    caches = {name: x for name in CACHES if (x := getattr(call, name)) is not None}
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
