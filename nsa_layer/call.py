"""A call: its static side and its tensors; what forward saves; and the auxiliary results of `nsa`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from nsa_layer.config import BRANCHES, NSAConfig

TOKEN_CACHES = ("k", "v", "k_win", "v_win", "k_index")
COMPRESSED_CACHES = ("k_cmp", "v_cmp")
CACHES = tuple(f"{name}_cache" for name in (*TOKEN_CACHES, *COMPRESSED_CACHES))
SCALES = tuple(f"{name}_scale" for name in (*TOKEN_CACHES, *COMPRESSED_CACHES))  # of `CACHES` in FP8
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class CallSpec:
    """The static side of one call.

    Attributes:
        config: the operator's options.
        causal: queries see no later token.
        softmax_scale: the factor of q . k, in all branches and in the selection of blocks.
        lengths: the packed sequences' lengths, or None for a batch of equal length.
        lengths_k: lengths of their keys, where queries have an offset among more keys; None: the same.
        listed: the lists of blocks are the caller's.
        bound: tokens at most of a packed sequence, where the host does not know the lengths; else None. With
            ``lengths_k`` of its queries.
        backend: that computes them.
        index_scale: the factor of q_index . k_index; None without an index.
        index_loss: the sums of the index' loss are computed.
        index_scores: the index' scores of the chosen blocks are a result.
        longest_win: tokens at most that k_win has of a packed sequence, with ``win_offset``.
    """

    config: NSAConfig
    causal: bool
    softmax_scale: float
    lengths: tuple[int, ...] | None = None
    lengths_k: tuple[int, ...] | None = None
    listed: bool = False
    bound: int | None = None
    backend: str = "cute"
    index_scale: float | None = None
    index_loss: bool = False
    index_scores: bool = False
    longest_win: int | None = None

    @property
    def key_lengths(self) -> tuple[int, ...] | None:
        """Lengths of the packed sequences' keys, or None for a batch."""
        return self.lengths if self.lengths_k is None else self.lengths_k

    def in_force(self) -> CallSpec:
        """The spec as it has to be computed now: deterministic where `torch.use_deterministic_algorithms` says so."""
        if self.config.deterministic or not torch.are_deterministic_algorithms_enabled():
            return self
        return replace(self, config=self.config.replace(deterministic=True))


class KVCache(NamedTuple):
    """The caches of a call of `nsa_with_kvcache`, with the names and shapes of its arguments."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    cache_seqlens: torch.Tensor | int
    page_table: torch.Tensor | None = None
    cache_batch_idx: torch.Tensor | None = None
    k_cmp_cache: torch.Tensor | None = None
    v_cmp_cache: torch.Tensor | None = None
    cmp_page_table: torch.Tensor | None = None
    k_win_cache: torch.Tensor | None = None
    v_win_cache: torch.Tensor | None = None
    k_index_cache: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    k_win_scale: torch.Tensor | None = None
    v_win_scale: torch.Tensor | None = None
    k_index_scale: torch.Tensor | None = None
    k_cmp_scale: torch.Tensor | None = None
    v_cmp_scale: torch.Tensor | None = None
    num_splits: int = 0

    @property
    def capacity(self) -> int:
        """Tokens that a sequence may have in the caches."""
        page = self.k_cache.shape[1]
        return page if self.page_table is None else page * self.page_table.shape[1]

    @property
    def in_fp8(self) -> bool:
        """True if numbers in the caches are `FP8`, times a scale of their head."""
        return self.k_cache.dtype == FP8

    def scale(self, name: str) -> torch.Tensor | None:
        """fp32 [heads] of one of `TOKEN_CACHES` or `COMPRESSED_CACHES` in FP8; None: 1."""
        return getattr(self, f"{name}_scale")

    def named(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """The caches that are not None, of `TOKEN_CACHES` or `COMPRESSED_CACHES`, by these names."""
        return {name: x for name in names if (x := getattr(self, f"{name}_cache")) is not None}


class Call(NamedTuple):
    """A call: tensors in the order of the operators' arguments, static options, caches.

    Tensors up to `block_indices` are arguments of `nsa`. `q_offset` and later ones make it a part of a larger call,
    such as a prefill chunk or a rank's shard: queries that begin anywhere among their keys.

    Attributes:
        q_offset: int32 [B], packed [sequences]: the position of each sequence's first query among its keys, of which
            there may be more than queries; None: the queries are the last ones.
        cu_seqlens_k: starts of packed keys, where they differ from the queries'.
        pages: int32 [B, n], pages of each sequence; k and v are [pages, page, Hkv, D] then, and there is no backward.
        win_offset: where k_win and v_win have other rows than k and v, ``q_offset`` among these; else None.
        cu_seqlens_win: with it, the starts of packed k_win and v_win.
        spec: None until the arguments have been checked.
        cache: keys and values are in caches, and k, v, k_cmp, v_cmp, k_win, v_win and k_index the added ones, or
            None.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gate_weight: torch.Tensor | None = None
    gates: torch.Tensor | None = None
    compress_k_weight: torch.Tensor | None = None
    compress_v_weight: torch.Tensor | None = None
    k_cmp: torch.Tensor | None = None
    v_cmp: torch.Tensor | None = None
    k_win: torch.Tensor | None = None
    v_win: torch.Tensor | None = None
    q_index: torch.Tensor | None = None
    k_index: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    block_indices: torch.Tensor | None = None
    q_offset: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    pages: torch.Tensor | None = None
    win_offset: torch.Tensor | None = None
    cu_seqlens_win: torch.Tensor | None = None
    spec: CallSpec | None = None
    cache: KVCache | None = None

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Call:
        """The call of arguments by name, fields of `KVCache` too."""
        cache = {name: arguments[name] for name in KVCache._fields if name in arguments}
        return cls(*map(arguments.get, cls._fields[:-2]), cache=KVCache(**cache) if cache else None)

    @property
    def by_name(self) -> dict[str, Any]:
        """All fields, of `KVCache` too."""
        return self._asdict() | ({} if self.cache is None else self.cache._asdict())

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """All tensors, in the order of `TENSORS`."""
        return self[: len(TENSORS)]

    @property
    def differentiable(self) -> tuple[torch.Tensor | None, ...]:
        """Tensors that may have gradients."""
        return self[: len(DIFFERENTIABLE)]

    @property
    def needs_grad(self) -> bool:
        """True if a gradient may be asked for."""
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in self.differentiable)

    @property
    def config(self) -> NSAConfig:
        """The operator's options."""
        return self.spec.config

    @property
    def dims(self) -> tuple[int, int]:
        """D and Dv."""
        return self.q.shape[-1], (self.v if self.cache is None else self.cache.v_cache).shape[-1]

    @property
    def one_branch(self) -> bool:
        """True if the output is that of the selected branch: there is no other, nor a gate."""
        return self.config.branches == ("selected",) and self.gate == "none"

    @property
    def packed(self) -> bool:
        """True if q is [total, Hq, D]."""
        return self.q.dim() == 3

    @property
    def lengths_known(self) -> bool:
        """True if the host knows all lengths: of a batch, or of packed sequences whose starts it has read."""
        return not self.packed or self.spec.lengths is not None

    @property
    def B(self) -> int:
        """Sequences."""
        if not self.packed:
            return self.q.shape[0]
        return len(self.spec.lengths) if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def query_lengths(self) -> tuple[int, ...] | None:
        """Queries of each sequence; None: the GPU alone knows them."""
        return self.spec.lengths if self.packed else (self.q.shape[1],) * self.q.shape[0]

    @property
    def offsets(self) -> tuple[int, ...]:
        """Position of each sequence's first query among its keys, where its queries are the last ones."""
        of_k = self.spec.key_lengths or (self.k.shape[1],) * self.B
        return tuple(S - T for T, S in zip(self.query_lengths, of_k, strict=True))

    @property
    def longest(self) -> int:
        """Queries of a sequence, at most."""
        return self.q.shape[1] if not self.packed else self.spec.bound or max(self.spec.lengths)

    @property
    def longest_k(self) -> int:
        """Keys of a sequence, at most."""
        if self.pages is not None:
            return self.pages.shape[1] * self.k.shape[1]
        if self.spec.key_lengths is not None:
            return max(self.spec.key_lengths)
        return (self.cu_seqlens_k is None and self.spec.bound) or self.v.shape[-3]

    @property
    def of_window(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the sliding window."""
        return self.k if self.k_win is None else self.k_win, self.v if self.v_win is None else self.v_win

    @property
    def index(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys of the index, in the accumulation dtype."""
        return tuple(x.to(accumulation_dtype(x.dtype)) for x in (self.q_index, self.k_index))

    @property
    def has_own_window(self) -> bool:
        """True if the window has keys or values of its own."""
        return self.k_win is not None or self.v_win is not None

    @property
    def gate(self) -> str:
        """The kind of gates, "given", "weight" or "none": as they are, made with a weight, or equal shares."""
        return "given" if self.gates is not None else "none" if self.gate_weight is None else "weight"

    @property
    def q_heads_per_list(self) -> int:
        """Query heads that share a list of blocks."""
        keys = self.k if self.cache is None else self.cache.k_cache
        return self.q.shape[-2] // (keys if self.block_indices is None else self.block_indices).shape[-2]

    @property
    def num_compressed(self) -> int:
        """Rows of compressed keys, of a sequence or of all packed ones: as the caller has them, or as many as any
        lengths need."""
        of_caller, keys = self.k_cmp if self.v_cmp is None else self.v_cmp, self.k.shape[-3]
        if of_caller is not None:
            return of_caller.shape[-3]
        return self.config.compressed_capacity(keys) if self.packed else self.config.compressed_length(keys)

    def with_scores(self, asked: bool) -> Call:
        """The call; if asked for, the scores of chosen blocks by an index are among its results."""
        if not asked or self.config.rule != "index":
            return self
        return self._replace(spec=replace(self.spec, index_scores=True))

    @property
    def num_lists(self) -> list[int]:
        """Lists of each packed sequence, or of a batch's first."""
        return list(map(self.config.num_tiles, self.spec.lengths or self.q.shape[1:2]))

    def sequences(self) -> Iterator[Call]:
        """The call of each sequence, without a dimension of the batch: weights are in all of them, starts and positions
        in none."""
        spec, present = self.spec, {name: x for name in OF_SEQUENCES if (x := getattr(self, name)) is not None}
        if spec.lengths is None:
            split = {name: x.unbind() for name, x in present.items()}
        else:
            config, keys = spec.config, spec.key_lengths
            of_window = keys if self.cu_seqlens_win is None else self.cu_seqlens_win.diff().tolist()
            sizes = dict.fromkeys(("q", "gates", "q_index"), spec.lengths) | dict.fromkeys(("k", "v", "k_index"), keys)
            sizes |= dict.fromkeys(("k_win", "v_win"), of_window)
            compressed = config.compressed_length if self.cache is None else config.most_completed
            sizes |= dict.fromkeys(("k_cmp", "v_cmp"), tuple(map(compressed, keys)))
            sizes["block_indices"] = tuple(map(config.num_tiles, spec.lengths))
            # split, not slices: the backward of a slice fills a gradient as long as the whole pack. There may be more
            # lists and compressed keys than these lengths need.
            split = {name: x.split((*sizes[name], len(x) - sum(sizes[name])))[:-1] for name, x in present.items()}
        for parts in zip(*split.values(), strict=True):
            yield self._replace(**dict(zip(split, parts)) | dict.fromkeys(OF_PACK))

    def map(self, change: Callable[[torch.Tensor], torch.Tensor], names: Iterable[str] = ()) -> Call:
        """Copy of the call with `change` applied to every tensor that is not None, or only to `names`."""
        present = ((name, getattr(self, name)) for name in names or TENSORS)
        return self._replace(**{name: change(x) for name, x in present if x is not None})

    def as_batch(self) -> Call:
        """A sequence, or packed ones, as a batch of one: [T, H, D] -> [1, T, H, D]; what has no tokens stays."""
        return self.map(lambda x: x.unsqueeze(0), OF_SEQUENCES)


TENSORS = Call._fields[: Call._fields.index("pages")]
DIFFERENTIABLE = TENSORS[:13]
OWN_KEYS = ("k_cmp", "v_cmp", "k_win", "v_win")  # that a branch reads instead of keys and values made of k and v
STARTS = ("cu_seqlens", "cu_seqlens_k")
OF_PACK = (*STARTS, "cu_seqlens_win", "q_offset", "win_offset")
# Tensors with rows of each sequence.
OF_SEQUENCES = ("q", "k", "v", "gates", *OWN_KEYS, "q_index", "k_index", "block_indices")
LSES = dict(zip(BRANCHES, ("lse_cmp", "lse_slc", "lse_swa")))  # fields of `Saved` and `Aux`


class Signature(NamedTuple):
    """A call without its numbers: all that its kernels depend on.

    Attributes:
        tensors: (name, shape, dtype) of each tensor, of `KVCache` too.
        spec: lengths and bound are of the queries in a call on caches.
        plan: the `MemoryPlan`; None for a call on caches.
        backward: backward too.
    """

    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    spec: CallSpec
    plan: Hashable = None
    backward: bool = False

    @classmethod
    def of(cls, call: Call, plan: Hashable = None, **more: bool) -> Signature:
        """The signature of a call."""
        spec, tensors = call.spec, call.by_name
        if not call.lengths_known and plan is not None:  # kernels for other lengths within these bounds are the same
            total, keys = len(call.q), len(call.k)
            lengths_k = spec.lengths_k if call.cu_seqlens_k is None else (keys, 0)
            spec = replace(spec, lengths=(spec.bound, total - spec.bound), lengths_k=lengths_k, bound=None)
        left_out = () if plan is None else STARTS
        kept = ((name, x) for name, x in tensors.items() if isinstance(x, torch.Tensor) and name not in left_out)
        return cls(tuple((name, tuple(x.shape), x.dtype) for name, x in kept), spec, plan, **more)


class Saved(NamedTuple):
    """Tensors that forward saves for backward, of all heads or of a group; None for one that is not saved.

    Attributes:
        block_indices, block_counts: the selection, int32 [B, M, Hs, n] and, where the kernels read lists of key tiles,
            [B, Hkv, M]; packed without B.
        k_cmp, v_cmp: compressed keys and values as attention reads them; None where they are the caller's.
        k_mean, v_mean: the means of their blocks in fp32 where these are projected.
        o_cmp, o_slc, o_swa: the branches' outputs; None where backward recomputes them.
        lse_cmp, lse_slc, lse_swa: fp32 or fp64 [B, Hq, T], packed [Hq, total], natural, -inf where a row sees no key.
        g: the gates, fp32 or fp64 [..., Hq, branches]; None for equal shares.
        index_scores: fp32 or fp64, of chosen blocks by an index, like `block_indices`, where they are asked for; -inf
            for padding.
        index_dz: for the index' loss, like `block_indices`: the gradient of its numerator by the score of each chosen
            block that is not forced, else 0.
        index_tokens: with plain PyTorch the tokens of these scores.
        index_sums: [2], the loss' numerator and denominator.

    Plain PyTorch saves the selection, log-sum-exps, gates and the fields of an index.
    """

    block_indices: torch.Tensor | None = None
    block_counts: torch.Tensor | None = None
    k_cmp: torch.Tensor | None = None
    v_cmp: torch.Tensor | None = None
    k_mean: torch.Tensor | None = None
    v_mean: torch.Tensor | None = None
    o_cmp: torch.Tensor | None = None
    o_slc: torch.Tensor | None = None
    o_swa: torch.Tensor | None = None
    lse_cmp: torch.Tensor | None = None
    lse_slc: torch.Tensor | None = None
    lse_swa: torch.Tensor | None = None
    g: torch.Tensor | None = None
    index_scores: torch.Tensor | None = None
    index_dz: torch.Tensor | None = None
    index_tokens: torch.Tensor | None = None
    index_sums: torch.Tensor | None = None

    def aux(self, call: Call) -> Aux:
        """`Aux` of the call; a selection is [B, M, Hs, n]. Rows and columns that its lengths do not need are cut."""
        lists, scores = self.block_indices, self.index_scores
        if call.block_indices is not None:
            lists = call.block_indices
        elif call.spec.lengths is not None:
            rows, width = sum(call.num_lists), call.config.list_width(max(call.spec.key_lengths))
            lists, scores = (x if x is None else x[:rows, :, :width] for x in (lists, scores))
        lse_swa = self.lse_swa
        if lse_swa is None and "window" in call.config.branches:
            lse_swa = call.q.new_full(lse_shape(call.q), -torch.inf, dtype=accumulation_dtype(call.q.dtype))
        g = equal_gates(call.q, len(call.config.branches)) if self.g is None else self.g
        return Aux(lists, g, self.lse_cmp, self.lse_slc, lse_swa, scores)


SAVED_FIELDS = len(Saved._fields)
Lses = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # of the branches, in their order


@dataclass
class Aux:
    """Auxiliary results of `nsa`, without gradients.

    Attributes:
        block_indices: int32 [B, M, Hs, n], Hs = Hkv (Hq with ``rule="seed"``): the chosen blocks of each query
            tile (of each token with ``q_tile=1``), ascending, padded with -1. Packed: [tiles of all sequences in order,
            Hs, n], blocks counted from each sequence's start. Where the host does not know their lengths (in a graph,
            or with ``cu_seqlens`` on a GPU, on the kernels) they have the capacity for any: rows and columns of -1
            at the end. None without the selected branch.
        gates: [B, T, Hq, 3], packed [total, Hq, 3]: compressed, selected, sliding window, without absent branches.
        lse_cmp, lse_slc, lse_swa: [B, Hq, T], packed [Hq, total]: each branch's log-sum-exp (natural), -inf where a row
            sees no key, as everywhere with ``window_size=0``; None for an absent branch.
        index_scores: with ``rule="index"`` scores of the chosen blocks, like `block_indices`, -inf for padding.
    """

    block_indices: torch.Tensor | None
    gates: torch.Tensor
    lse_cmp: torch.Tensor | None
    lse_slc: torch.Tensor | None
    lse_swa: torch.Tensor | None
    index_scores: torch.Tensor | None = None


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32, or fp64 where the input is fp64."""
    return torch.promote_types(dtype, torch.float32)


def equal_gates(q: torch.Tensor, branches: int = 3) -> torch.Tensor:
    """Equal shares as a view of one number, in the accumulation dtype: q [..., Hq, D] -> [..., Hq, branches]."""
    return q.new_full((), 1 / branches, dtype=accumulation_dtype(q.dtype)).expand(*q.shape[:-1], branches)


def loss_of_sums(sums: torch.Tensor) -> torch.Tensor:
    """The index' loss of ``Saved.index_sums``: numerator over denominator, a constant; 0 where that is 0."""
    total = sums[1].detach()
    return sums[0] / total.masked_fill(total == 0, 1)


def lse_shape(q: torch.Tensor) -> tuple[int, ...]:
    """Shape of a log-sum-exp: q [B, T, Hq, D] -> [B, Hq, T], packed [total, Hq, D] -> [Hq, total]."""
    return (*q.shape[:-3], q.shape[-2], q.shape[-3])


def mean_scale(n: int) -> int:
    """The power of two to divide n numbers by before they are summed, so that their mean cannot overflow on the way.

    Such a division is exact, so dividing the sum by ``n / mean_scale(n)`` gives the bits of ``sum / n``.
    """
    return 1 << (n - 1).bit_length()
