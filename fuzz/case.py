"""Each kind of drawn case as plain data, whose repr is an expression that makes it again.

Tensors are never drawn. A case holds sizes, choices and a seed, from which its tensors are filled: so a failure is one
line to paste, and hypothesis makes it smaller without touching what kernels are compiled for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nsa_tools.testing.pasteable import Pasteable

PATTERNS = (
    "random", "causal", "window", "full", "empty", "diagonal", "anti-diagonal", "comb", "one long column",
    "one long row", "documents", "prefix", "empty rows", "empty columns",
)  # fmt: skip
LAUNCHES = ("left to right", "right to left", "longest first", "shuffled")
FORMS = ("padded", "compact", "stacked", "ragged")
KEPT = ("batch", "rows", "pages")  # ways to keep sequences in caches
CALLS = ("nsa", "index", "selected_attention", "unshard_sequence")  # that ranks share
# What rank 1 of two gives otherwise, for each of these calls.
DIFFERENCES = ("", "cu_seqlens", "tokens", "class", "option", "tiles")
OPTIONS = ("score_mod", "softcap", "sink", "seqused")  # of an attention call
LAYOUTS = ("contiguous", "heads first", "fused", "every other batch")


@dataclass(frozen=True, kw_only=True, repr=False)
class Blocks(Pasteable):
    """Block lists: which blocks of keys each block of queries reads.

    Attributes:
        M, N: blocks of queries and of keys.
        pattern: one of PATTERNS; density: of the blocks that the pattern leaves to chance.
        full: the share of the listed blocks that need no mask; None: there are no full lists.
        shuffle: rows in no order. spare: unused entries in a row past the longest one.
        repeat: lists are one for all heads, repeated with stride 0.
        group: query heads that share a key/value head. launch: of key blocks, one of LAUNCHES.
        slots: CTAs that run at a time. interleave: query heads launched together.
        longest: entries of a plan's work tile at most.
        fault: what `fuzz.corrupt` does to the lists, where a property asks for wrong ones.
    """

    B: int = 1
    H: int = 2
    M: int = 6
    N: int = 5
    pattern: str = "random"
    density: float = 0.4
    full: float | None = 0.5
    shuffle: bool = False
    spare: int = 0
    repeat: bool = False
    group: int = 1
    launch: str = "left to right"
    slots: int = 3
    interleave: int = 1
    longest: int = 2
    fault: str = ""
    seed: int = 0

    @property
    def call(self) -> Attention:
        """A call of attention that has these lists."""
        names = ("B", "pattern", "density", "shuffle", "spare", "seed")
        return Attention(
            T_q=128 * self.M,
            T_k=128 * self.N,
            block=(128, 128),
            lists="no full" if self.full is None else "both",
            full=self.full or 0.0,
            list_heads=1 if self.repeat else self.H,
            **{name: getattr(self, name) for name in names},
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class Edge(Pasteable):
    """Compressed-causal masking on tiles: key j is visible to query t iff ``j * factor + offset <= t``."""

    seqlen_q: int = 10
    seqlen_k: int = 10
    factor: int = 1
    offset: int = 0
    tile_m: int = 4
    tile_n: int = 4
    group: int = 1
    heads: int = 8
    num_sms: int = 132

    @property
    def keys_seen(self) -> int:
        """Keys that the last query sees, were there no end of the keys."""
        return max((self.seqlen_q - 1 - self.offset) // self.factor + 1, 0)


@dataclass(frozen=True, kw_only=True, repr=False)
class Window(Pasteable):
    """A sliding window, or any dense mask, on blocks; None is no limit."""

    seqlen_q: int = 10
    seqlen_k: int = 10
    left: int | None = None
    right: int | None = None
    causal: bool = False
    block: tuple[int, int] = (4, 4)
    seed: int = 0


@dataclass(frozen=True, kw_only=True, repr=False)
class Texts(Pasteable):
    """A file before and after a patch, and another file to copy from."""

    old: str = ""
    new: str = ""
    other: str | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class Ranks(Pasteable):
    """A call that two ranks share.

    Attributes:
        call: one of CALLS.
        tokens: of each rank.
        lengths: of the packed sequences; None: one sequence.
        differs: what rank 1 gives otherwise, one of DIFFERENCES.
        others: lengths that rank 1 gives, of as many sequences and tokens.
    """

    call: str = "nsa"
    mode: str = "heads"
    load_balance: str | None = "zigzag"
    tokens: int = 8
    lengths: tuple[int, ...] | None = None
    differs: str = ""
    others: tuple[int, ...] | None = None
    validate: bool = False


@dataclass(frozen=True, kw_only=True, repr=False)
class Prompt(Pasteable):
    """A batch for a small model of transformers, and what is done to it.

    Attributes:
        T: columns; rows: padding of each in front and behind; in front T, of a row without tokens.
        first: columns that are given to a cache before the others; 0: there is no cache.
        ended: the last columns of these that are padding to the second call, of each row: its turn ended early.
        ours: the cache is NSAModelCache, not DynamicCache.
        gate, compression: of the model.
        mask: "bool" or "int64", what it is of; or the way in which it is wrong, one of `fuzz.properties.models.MASKS`.
        change: the field, option, cache or part of a model that a property is about.
    """

    T: int = 20
    rows: tuple[tuple[int, int], ...] = ((0, 0), (3, 2))
    first: int = 0
    ended: tuple[int, ...] = ()
    ours: bool = True
    gate: str = "input"
    compression: str = "mean"
    mask: str = "bool"
    change: str = "nsa"
    seed: int = 0


@dataclass(frozen=True, kw_only=True, repr=False)
class Fields(Pasteable):
    """Arguments of NSAConfig or of a command, or what is given in place of a dictionary of them; good or bad."""

    values: Any = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, repr=False)
class Served(Pasteable):
    """Calls on caches, one after the other.

    Attributes:
        kept: one of KEPT.
        counts: new tokens of each sequence, call by call.
        shared: pages of the first sequence's beginning, with which all others begin.
        stride: between compressed keys of 8 tokens.
        index_heads: of the keys of an index that chooses blocks, with two branches; 0: the compressed branch chooses.
        needs: arguments of the last call that need a gradient.
        fault: what `fuzz.serving` does to the last call's caches, where a property asks for wrong ones.
    """

    kept: str = "pages"
    counts: tuple[tuple[int, ...], ...] = ((20, 3), (1, 1))
    shared: int = 0
    stride: int = 8
    index_heads: int = 0
    needs: tuple[str, ...] = ()
    fault: str = ""
    seed: int = 0


@dataclass(frozen=True, kw_only=True, repr=False)
class Attention(Pasteable):
    """One call of attention under every mask that is given: what its kernels are compiled for, and its data.

    Attributes:
        packed: (queries, keys) of each sequence, in place of B, T_q and T_k.
        window: (left, right). compress: compress_factor and compress_offset. offsets: q_offset of each sequence.
        mask_mod: a key of `fuzz.mask_mods.MASK_MODS`; "table": one that looks the pair up. option: one of OPTIONS, or
            "seqused_q" for kernels that are not run.
        lists: "partial", "full", "both"; "no full": partial, and full_* is None.
        form: of packed lists, one of FORMS; "shared": padded, one list for all sequences of a pack or a batch.
        list_heads: heads with lists of their own: 1, Hkv or Hq. block: queries and keys of a block; None: what the
            architecture's kernels read. q_tiles: such blocks of queries that make one.
        launch: of key blocks in backward with lists, one of LAUNCHES, or "middle first" of a plan.
        plan: entries of a work tile, at most, on SM90; 0: no plan. per_group: of all query heads of a key/value head.
        passes: of backward with lists on SM90: 1 or 2, or None for the faster way.
        expanded: what is one in memory and repeated with stride 0: "batch", of q, k and v; "heads", of k and v.
        pattern, density: of the block lists and of the table; full, shuffle, spare: of the lists; as in `Blocks`, but
            "three of four" blocks as well; spare None: rows are as wide as there are blocks.
        locks: backward lists hold semaphore values where two passes, asked for, do without.
        layout: of q, k, v and do in memory, one of LAYOUTS. scale: of the values in q and k.
        autograd: through the public function and PyTorch's autograd, not straight to forward and backward.
    """

    D: int = 64
    Dv: int | None = None
    T_q: int = 300
    T_k: int = 300
    B: int = 2
    Hq: int = 4
    Hkv: int = 2
    packed: tuple[tuple[int, int], ...] = ()
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    compress: tuple[int, int] | None = None
    offsets: tuple[int, ...] | None = None
    mask_mod: str | None = None
    option: str | None = None
    lists: str | None = None
    form: str = "padded"
    list_heads: int = 1
    block: tuple[int, int] | None = None
    q_tiles: int = 1
    pack_gqa: bool | None = None
    overlap: bool | None = None
    deterministic: bool = False
    launch: str = "left to right"
    plan: int = 0
    per_group: bool = False
    passes: int | None = None
    expanded: str = ""
    dtype: str = "bfloat16"
    pattern: str = "three of four"
    density: float = 0.4
    full: float = 0.5
    shuffle: bool = True
    spare: int | None = None
    locks: bool = True
    layout: str = "contiguous"
    scale: float = 1.0
    autograd: bool = False
    seed: int = 0

    def __str__(self) -> str:
        """The id of tests: its repr, but for many sequences their number."""
        return repr(self).replace(repr(self.packed), f"{len(self.packed)}") if len(self.packed) > 50 else repr(self)

    @property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        return self.packed or ((self.T_q, self.T_k),) * self.B

    @property
    def used(self) -> tuple[int, ...]:
        """Keys of each sequence that the call uses: with the option "seqused" fewer in every other one."""
        return tuple(max(T_k - 70 * (b % 2) * (self.option == "seqused"), 0) for b, (_, T_k) in enumerate(self.lengths))

    @property
    def mask(self) -> str:
        """The mask in a word: "compressed", "window", "causal", that of the mask_mod, or "none"."""
        if self.compress is not None or self.window != (None, None):
            return "window" if self.compress is None else "compressed"
        return "causal" if self.causal else self.mask_mod or "none"

    @property
    def ordered(self) -> bool:
        """True if backward lists, or their plan, hold semaphore values: in two passes they may."""
        return self.deterministic and (self.locks or self.passes != 2)


@dataclass(frozen=True, kw_only=True, repr=False)
class Packed(Attention):
    """Block lists of packed sequences. fault: as in `Blocks`."""

    packed: tuple[tuple[int, int], ...] = ((10, 10),)
    lists: str | None = "both"
    form: str = "compact"
    block: tuple[int, int] | None = (4, 4)
    pattern: str = "random"
    shuffle: bool = False
    fault: str = ""
