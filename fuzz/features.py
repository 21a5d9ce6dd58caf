"""Features of a drawn case, in words: counted in every run, and claimed of the strategies, so that a test can ask."""

from __future__ import annotations

from collections.abc import Iterator

from fuzz.attention import in_two_passes
from fuzz.case import FORMS, LAUNCHES, LAYOUTS, PATTERNS, Attention, Blocks, Edge, Fields, Packed, Texts, Window
from fuzz.corrupt import FAULTS, PACKED_FAULTS
from fuzz.kinds import heads_of_a_cta
from nsa_tools.testing.cases import Case


def features(case: object) -> set[str]:
    """The features of a case; what a kind of case can have stands in CLAIMS."""
    return set(_of[type(case)](case))


def _blocks(c: Blocks) -> Iterator[str]:
    yield f"pattern {c.pattern}"
    yield f"launch {c.launch}"
    yield {None: "no full lists", 0.0: "nothing full", 1.0: "all full"}.get(c.full, "some full")
    yield "rows in no order" if c.shuffle else "rising rows"
    yield "wide rows" if c.spare else "compact rows"
    yield "repeated lists" if c.repeat else "lists of their own"
    yield "grouped heads" if c.group > 1 else "heads alone"
    yield "one slot" if c.slots == 1 else "a slot for all" if c.slots >= c.B * c.H * c.N else "some slots"
    if c.M == 1 or c.N == 1:
        yield "one block"
    if c.fault:
        yield f"fault: {c.fault}"


def _packed(c: Packed) -> Iterator[str]:
    yield f"form {c.form}"
    yield f"pattern {c.pattern}"
    if any(0 in pair for pair in c.lengths):
        yield "an empty sequence"
    if any(pair == (0, 0) for pair in c.lengths):
        yield "nothing in a sequence"
    if len(c.lengths) > 5:
        yield "many tiny sequences"
    if len(c.lengths) == 1:
        yield "one sequence"
    if max(map(max, c.lengths)) >= 40:
        yield "one huge sequence"
    if c.fault:
        yield f"fault: {c.fault}"


def _edge(c: Edge) -> Iterator[str]:
    seen = max((c.seqlen_q - 1 - c.offset) // c.factor + 1, 0)
    yield "no query sees a key" if seen == 0 else "all keys are seen" if seen >= c.seqlen_k else "some keys are seen"
    if c.offset < 0:
        yield "offset below 0"
    if c.offset >= c.seqlen_q:
        yield "offset past the queries"
    if c.factor == 1:
        yield "factor 1"
    if c.group > 1:
        yield "packed heads"
    if c.seqlen_q > 1 << 20:
        yield "many queries"
    if c.factor * c.tile_n > 1 << 24:
        yield "a tile that spans more than 2**24 tokens"
    if c.seqlen_q % c.tile_m:
        yield "a tail of queries"
    if c.seqlen_k % c.tile_n:
        yield "a tail of keys"


def _window(c: Window) -> Iterator[str]:
    yield "no limit to the left" if c.left in (None, -1) else "a limit to the left"
    yield "no limit to the right" if c.right in (None, -1) and not c.causal else "a limit to the right"
    if c.causal:
        yield "causal"
    yield "fewer keys" if c.seqlen_k < c.seqlen_q else "as many keys, or more"


def _texts(c: Texts) -> Iterator[str]:
    yield "the same text" if c.old == c.new else "another text"
    if not c.old or not c.new:
        yield "an empty text"
    if c.other is not None:
        yield "another file at hand"
    if "\r" in c.old + c.new:
        yield "carriage returns"


def _fields(c: Fields) -> Iterator[str]:
    yield from c.values
    yield "nothing given" if not c.values else "something given"


def _layer(c: Case) -> Iterator[str]:
    yield f"gate {c.gate}"
    yield f"rule {c.config.rule}"
    yield "causal" if c.causal else "not causal"
    yield "packed" if c.lengths else "a batch"
    yield str(c.dtype).removeprefix("torch.")
    if c.lengths and 0 in c.lengths:
        yield "an empty sequence"
    if c.T < c.config.block_size and not c.lengths:
        yield "no complete block"
    if c.T == 1:
        yield "one token"
    if c.config.stride < c.config.block_size:
        yield "overlapping blocks"
    if c.config.offset < c.config.block_size - 1:
        yield "an offset that leaks"
    if not c.config.force_blocks:
        yield "nothing forced"
    if c.config.q_tile < c.config.block_size:
        yield "tiles smaller than blocks"
    if c.compress_weights:
        yield "compression weights"
    if c.Hq == c.Hkv:
        yield "heads alone"
    if c.Dv not in (None, c.D):
        yield "another width of v"


def _attention(c: Attention) -> Iterator[str]:
    yield f"mask {c.kind.mask}"
    yield f"layout {c.layout}"
    yield f"lists {c.kind.form}" if c.kind.lists else "no lists"
    yield "autograd" if c.autograd else "no autograd"
    if c.kind.lists or c.kind.mask == "table":
        yield f"pattern {c.pattern}"
    if c.kind.lists:
        yield "rows in no order" if c.shuffle else "rising rows"
        yield "wide rows" if c.spare else "compact rows"
        yield "two passes" if in_two_passes(c) else "one pass"
    if c.kind.deterministic:
        yield f"deterministic, {c.launch}"
        if c.kind.lists:
            yield "lock values" if c.locks else "no lock values"
    heads, group = heads_of_a_cta(c), c.kind.Hq // c.kind.Hkv
    if heads > 1:
        yield "a CTA walks all heads of a group" if heads == group else "a CTA walks some heads of a group"
    if any(0 in pair for pair in c.lengths):
        yield "an empty sequence"
    if (1, 1) in c.lengths or c.lengths[0][0] == 1:
        yield "one token"
    if len(c.lengths) > 5:
        yield "many tiny sequences"
    if max(map(max, c.lengths)) >= 1500:
        yield "one huge sequence"
    yield "fewer keys" if c.lengths[0][1] < c.lengths[0][0] else "as many keys, or more"


_of = {
    Blocks: _blocks, Packed: _packed, Edge: _edge, Window: _window, Texts: _texts, Fields: _fields, Case: _layer,
    Attention: _attention,
}  # fmt: skip

_PATTERNS = tuple(f"pattern {name}" for name in PATTERNS)
CLAIMS: dict[type, tuple[str, ...]] = {
    Blocks: (
        *_PATTERNS, *(f"launch {name}" for name in LAUNCHES), "no full lists", "nothing full", "all full", "some full",
        "rows in no order", "rising rows", "wide rows", "compact rows", "repeated lists", "lists of their own",
        "grouped heads", "heads alone", "one slot", "a slot for all", "some slots", "one block",
    ),
    Packed: (
        *_PATTERNS, *(f"form {name}" for name in FORMS), "an empty sequence", "nothing in a sequence",
        "many tiny sequences", "one sequence", "one huge sequence",
    ),
    Edge: (
        "no query sees a key", "all keys are seen", "some keys are seen", "offset below 0", "offset past the queries",
        "factor 1", "packed heads", "many queries", "a tile that spans more than 2**24 tokens", "a tail of queries",
        "a tail of keys",
    ),
    Window: (
        "no limit to the left", "a limit to the left", "no limit to the right", "a limit to the right", "causal",
        "fewer keys", "as many keys, or more",
    ),
    Texts: ("the same text", "another text", "an empty text", "another file at hand", "carriage returns"),
    Fields: ("block_size", "block_stride", "rule", "nothing given", "something given"),
    Case: (
        *(f"gate {name}" for name in ("weight", "given", "none", "cmp", "slc", "swa")), "rule nsa", "rule seed",
        "causal", "not causal", "packed", "a batch", "an empty sequence", "no complete block", "one token",
        "overlapping blocks", "an offset that leaks", "nothing forced", "tiles smaller than blocks",
        "compression weights", "heads alone", "another width of v",
    ),
    Attention: (
        *_PATTERNS, *(f"layout {name}" for name in LAYOUTS), "one token", "fewer keys", "as many keys, or more",
        "autograd", "no autograd", "rows in no order", "rising rows", "wide rows", "compact rows",
    ),
}  # fmt: skip
FAULT_CLAIMS = {
    Blocks: tuple(f"fault: {name}" for name in FAULTS),
    Packed: tuple(f"fault: {name}" for name in PACKED_FAULTS),
}
