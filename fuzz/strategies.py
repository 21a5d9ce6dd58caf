"""Whole cases, drawn. Sizes are small where the property is quadratic; edges are drawn often, not waited for."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from hypothesis import strategies as st

from fuzz import case as cases
from fuzz.attention_lists import passes_by_capacity
from fuzz.case import Attention, Blocks, Edge, Fields, Packed, Ranks, Served, Texts, Window
from fuzz.corrupt import FAULTS, PACKED_FAULTS
from fuzz.serving import CACHE_FAULTS, CAPACITY, NEEDS, PAGE
from nsa_layer import NSAConfig
from nsa_layer.config import BRANCHES
from nsa_tools.testing.cases import OWN_KEYS, Case

PAST_32_BITS = ((1 << 31) - 1, 1 << 40)  # sides of a window, with a position added
SEEDS = st.integers(0, 1 << 20)
DENSITIES = st.sampled_from((0.4, 0.0, 0.1, 0.8, 1.0))
FULLS = st.sampled_from((0.5, None, 0.0, 1.0))


def blocks(faults: bool = False) -> st.SearchStrategy[Blocks]:
    """Block lists of a batch; with `faults`, to be spoilt in one of all known ways."""
    return st.builds(
        lambda Hkv, group, **more: Blocks(H=Hkv * group, group=group, **more),
        Hkv=st.integers(1, 2),
        group=st.integers(1, 3),
        B=st.integers(1, 2),
        M=st.integers(1, 9),
        N=st.integers(1, 9),
        pattern=st.sampled_from(cases.PATTERNS),
        density=DENSITIES,
        full=FULLS,
        shuffle=st.booleans(),
        spare=st.sampled_from((0, 0, 1, 3)),
        repeat=st.booleans(),
        launch=st.sampled_from(cases.LAUNCHES),
        slots=st.sampled_from((1, 2, 3, 7, 132)),
        interleave=st.integers(1, 4),
        longest=st.sampled_from((1, 2, 3, 32)),
        fault=st.sampled_from(FAULTS) if faults else st.just(""),
        seed=SEEDS,
    )


def packed(faults: bool = False) -> st.SearchStrategy[Packed]:
    """Block lists of packed sequences: empty ones, many tiny ones, one huge one among them."""
    length = st.one_of(st.integers(0, 20), st.sampled_from((0, 1, 4, 5)))
    usual = st.lists(st.tuples(length, length), min_size=1, max_size=5)
    tiny = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=6, max_size=12)
    huge = st.tuples(st.just((1, 1)), st.just((60, 45)), st.just((0, 3))).map(list)
    return st.builds(
        Packed,
        packed=st.one_of(usual, tiny, huge).map(tuple),
        form=st.sampled_from(cases.FORMS),
        block=st.sampled_from(((4, 4), (8, 4), (4, 2), (1, 1))),
        list_heads=st.sampled_from((1, 2, 4)),
        pattern=st.sampled_from(cases.PATTERNS),
        density=DENSITIES,
        lists=st.sampled_from(("both", "both", "both", "no full")),
        full=st.sampled_from((0.5, 0.0, 1.0)),
        fault=st.sampled_from(PACKED_FAULTS) if faults else st.just(""),
        seed=SEEDS,
    )


@st.composite
def edges(draw: st.DrawFn) -> Edge:
    """Tiles under compressed-causal masking, small ones and such as come near the end of 32 bits."""
    big = draw(st.integers(0, 3)) == 0
    factor = draw(st.one_of(st.integers(1, 9), st.sampled_from((16, 64, 1000)), st.integers(1, 1 << 22 if big else 70)))
    lengths = st.integers(1, 1 << 24) if big else st.one_of(st.integers(1, 40), st.sampled_from((1, 4, 8, 33)))
    T = draw(lengths)
    seen = max((T - 1) // factor + 1, 1)
    near = st.integers(max(seen - 5, 1), seen + 5)
    offset = st.one_of(
        st.sampled_from((0, factor - 1, -1, 1, factor)), st.integers(-60, 60), st.integers(-T - factor, T + factor)
    )
    return Edge(
        seqlen_q=T,
        seqlen_k=draw(st.one_of(near, lengths)),
        factor=factor,
        offset=max(-(1 << 29), min(1 << 29, draw(offset))),
        tile_m=draw(st.sampled_from((128, 64, 192) if big else (4, 1, 6, 8, 64))),
        tile_n=draw(st.sampled_from((128, 80, 64) if big else (4, 1, 8, 16, 80))),
        group=draw(st.sampled_from((1, 2, 3, 8))),
        heads=draw(st.sampled_from((8, 1, 2, 64))),
        num_sms=draw(st.sampled_from((132, 1, 148))),
    )


def windows() -> st.SearchStrategy[Window]:
    side = st.one_of(st.none(), st.integers(0, 45), st.sampled_from((-1, *PAST_32_BITS)))
    return st.builds(
        Window,
        seqlen_q=st.integers(1, 40),
        seqlen_k=st.integers(1, 40),
        left=side,
        right=side,
        causal=st.booleans(),
        block=st.sampled_from(((4, 4), (8, 4), (3, 5), (1, 1), (64, 16))),
        seed=SEEDS,
    )


LINES = st.one_of(
    st.sampled_from(
        (
            "def load(pointer, count):",
            "    values = read_from(pointer, count)",
            "    return values",
            "",
            "\t",
            "x",
            "        check_that_it_is_finite(value)",
            "        return values",
            "\r",
            "é = 'ü\u2028\x0c'",
        )  # fmt: skip
    ),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n"), max_size=30),
)


@st.composite
def texts(draw: st.DrawFn) -> Texts:
    """Two versions of a file: the second has lines of the first, moved, copied, indented or changed, among others."""
    text = st.lists(LINES, max_size=15)
    old = draw(text)
    place = st.integers(0, len(old))
    copied = st.builds(
        lambda begin, end, indent, word: [indent + line.replace("values", word) for line in old[begin:end]],
        *(place, place, st.sampled_from(("", "    ")), st.sampled_from(("values", "numbers"))),
    )
    new = draw(st.just([old]) | st.lists(copied | text, max_size=5))
    other = draw(st.none() | text.map("\n".join))
    return Texts(old="\n".join(old), new="\n".join(itertools.chain(*new)), other=other)


def forced() -> st.SearchStrategy[dict[str, int]]:
    """Numbers of forced blocks, with the default and none among them; there may be more than a list has entries."""
    any_of_them = st.fixed_dictionaries(dict(init_blocks=st.integers(0, 3), local_blocks=st.integers(0, 4)))
    return st.sampled_from(({}, dict(init_blocks=0, local_blocks=0))) | any_of_them


@st.composite
def configs(draw: st.DrawFn) -> NSAConfig:
    """Good configurations of small blocks."""
    size = draw(st.sampled_from((4, 1, 6, 16)))
    if draw(st.integers(0, 3)) == 3:
        rule = dict(rule="seed", compress_offset=0, init_blocks=0, local_blocks=0)
    else:
        stride = draw(st.none() | st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
        rule = dict(compress_stride=stride, compress_offset=draw(st.none() | st.integers(-20, 40)), **draw(forced()))
    wider = draw(st.booleans())
    tiles = [n for n in (2, 4, 8, 16, 32) if n % size == 0 or size % n == 0]
    if tiles and wider:
        q_tile = draw(st.sampled_from(tiles))
    else:
        q_tile = 1
        if rule.get("compress_stride"):
            rule["compress_size"] = rule["compress_stride"] * draw(st.integers(1, 6))
    return NSAConfig(
        block_size=size,
        block_counts=draw(st.integers(1, 6)),
        q_tile=q_tile,
        window_size=draw(st.just(0) | st.integers(1, 40)),
        deterministic=draw(st.booleans()),
        **rule,
    )


@st.composite
def layer_cases(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = (torch.float64,), **fixed: object) -> Case:
    """Calls of the operator. In fp64, unless said otherwise: a wrong mask cannot hide behind rounding there."""
    Hkv = draw(st.integers(1, 3))
    lengths = st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(any).map(tuple)
    options = dict(
        B=draw(st.integers(1, 3)),
        T=draw(st.one_of(st.integers(1, 90), st.sampled_from((1, 16, 32, 33)))),
        Hq=Hkv * draw(st.integers(1, 4)),
        Hkv=Hkv,
        D=draw(st.integers(2, 9)),
        Dv=draw(st.none() | st.integers(2, 9)),
        dtype=draw(st.sampled_from(dtypes)),
        config=draw(configs()),
        causal=draw(st.booleans()),
        lengths=draw(st.none() | lengths),
        gate=draw(st.sampled_from(("weight", "given", "none", "cmp", "slc", "swa"))),
        compress_weights=draw(st.booleans()),
        own_keys=tuple(name for name in OWN_KEYS if draw(st.booleans())),
        seed=draw(st.integers(0, 999)),
    )
    options |= fixed
    if not options["config"].window_size:  # then there are no keys of a window
        options["own_keys"] = tuple(name for name in options["own_keys"] if "win" not in name)
    return Case(**options)


@st.composite
def index_cases(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = (torch.float64,)) -> Case:
    """Calls that choose by an index, or leave out branches."""
    branches = draw(st.lists(st.sampled_from(BRANCHES), min_size=1, max_size=3, unique=True).map(tuple))
    by_index = "selected" in branches
    config = NSAConfig(
        rule="index" if by_index else "nsa",
        branches=branches,
        block_size=draw(st.sampled_from((4, 1, 6, 16))),
        block_counts=draw(st.integers(1, 6)),
        window_size=draw(st.integers(branches == ("window",), 40)),
        **draw(forced()),
    )
    fixed = dict(config=config, causal=by_index or draw(st.booleans()), own_keys=(), integers=draw(st.booleans()))
    fixed |= dict(gate=draw(st.sampled_from(("weight", "given", "none"))))
    if by_index:
        fixed |= dict(index_dim=draw(st.sampled_from((4, 1, 16))), one_key=draw(st.booleans()))
    if "compressed" not in branches:
        fixed |= dict(compress_weights=False)
    return draw(layer_cases(dtypes, **fixed))


@st.composite
def served(draw: st.DrawFn, faults: bool = False) -> Served:
    """Calls on caches with the capacity for all; with `faults`, the last call's are spoilt in a known way."""
    kept, B, stride = draw(st.sampled_from(cases.KEPT)), draw(st.integers(1, 3)), draw(st.sampled_from((8, 4)))
    shared = draw(st.integers(0, 2)) if kept == "pages" and stride == 8 and B > 1 else 0
    left, counts = [CAPACITY - shared * PAGE] * B, []
    for most in draw(st.lists(st.sampled_from((1, 4, 20, 40)), min_size=1, max_size=4)):
        call = [draw(st.integers(0, min(most, n))) for n in left]
        if any(call):
            counts.append(tuple(call))
            left = [n - own for n, own in zip(left, call)]
    return Served(
        kept=kept,
        counts=tuple(counts) or ((1,) * B,),
        shared=shared,
        stride=stride,
        index_heads=draw(st.sampled_from((0, 0, 1, 2))),
        needs=tuple(name for name in NEEDS if draw(st.integers(0, 3)) == 3),
        fault=draw(st.sampled_from(CACHE_FAULTS)) if faults else "",
        seed=draw(SEEDS),
    )


@st.composite
def ranks(draw: st.DrawFn) -> Ranks:
    """Calls that two ranks share, which are given the same, or differ in one thing: packings in half of these."""
    call, tokens = draw(st.sampled_from(cases.CALLS)), 4 * draw(st.integers(1, 6))
    cuts = st.lists(st.integers(0, 2 * tokens), min_size=1, max_size=4).map(sorted)
    first = draw(st.none() | cuts)
    differs = draw(st.sampled_from(cases.DIFFERENCES))
    second = None
    if call in ("nsa", "index") and differs == "tiles" or call == "unshard_sequence" and differs not in ("", "tokens"):
        differs = ""
    if call != "unshard_sequence" and draw(st.booleans()):
        differs = "cu_seqlens"
    if differs == "cu_seqlens":
        first = draw(cuts) if first is None else first
        second = draw(st.lists(st.integers(0, 2 * tokens), min_size=len(first), max_size=len(first)).map(sorted))
        differs = "" if first == second else differs
    lengths, others = (
        None if each is None else tuple(end - begin for begin, end in itertools.pairwise((0, *each, 2 * tokens)))
        for each in (first, second)
    )
    return Ranks(
        call=call,
        mode=draw(st.sampled_from(("heads", "gather"))),
        load_balance=draw(st.sampled_from(("zigzag", None))),
        tokens=tokens,
        lengths=None if differs == "tiles" else lengths,
        differs=differs,
        others=others if differs == "cu_seqlens" else None,
        validate=call != "unshard_sequence" and draw(st.booleans()),
    )


def fields() -> st.SearchStrategy[Fields]:
    """Arguments of NSAConfig, mostly good ones, and what may come in place of a dictionary of them."""
    long = st.sampled_from((1 << 20, 1 << 21, (1 << 31) - 1))
    sizes = st.one_of(st.sampled_from((1, 2, 16, 64, 128, 512)), st.integers(-2, 300), long)
    odd = st.sampled_from((None, True, 1.0, "64", (), 0, -1, 1 << 40, float("nan")))
    good = {
        "block_size": sizes, "compress_size": st.none() | sizes, "compress_stride": st.none() | sizes,
        "block_counts": sizes, "q_tile": sizes, "window_size": sizes,
        "compress_offset": st.none() | st.integers(-200, 200), "init_blocks": sizes, "local_blocks": sizes,
        "deterministic": st.booleans(), "rule": st.sampled_from(("nsa", "seed", "")),
    }  # fmt: skip
    values = st.fixed_dictionaries({}, optional={name: own | odd for name, own in good.items()})
    no_fields = st.sampled_from((None, 1, "block_size", [("q_tile", 1)], {1: 1}, {None: 64}, {"block_sizes": 64}))
    return st.builds(Fields, values=st.one_of(values, values, no_fields))


@st.composite
def attention(draw: st.DrawFn, kind: Attention) -> Attention:
    """Data for kernels that are compiled for `kind`: nothing drawn here compiles anything anew, but that lists of few
    blocks take two passes where the kind leaves it to them."""
    by_capacity = passes_by_capacity(kind)
    length = st.one_of(st.integers(1, 700), st.sampled_from((1, 64, 127, 128, 129, 256, 513, 1000)))
    if by_capacity:
        length = st.one_of(length, st.integers(600, 1000))
    some = st.one_of(st.integers(0, 400), st.sampled_from((0, 1, 128, 129)))
    usual = st.lists(st.tuples(some, some), min_size=1, max_size=5)
    tiny = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=8, max_size=40)
    huge = st.just([(1, 1), (2000, 1500), (0, 7), (3, 0)])
    if kind.packed:
        packs = st.one_of(usual, usual, tiny, huge).filter(lambda x: all(map(sum, zip(*x))))
        sizes = dict(packed=packs.map(tuple))
    else:
        sizes = dict(T_q=length, T_k=length, B=st.integers(2 if kind.expanded == "batch" else 1, 3))
    side = st.one_of(st.integers(0, 300), st.sampled_from((0, 127, 128, *PAST_32_BITS)))
    factor = draw(st.one_of(st.sampled_from((16, 1, 2, 3, 7, 64)), st.integers(1, 300)))
    offset = draw(st.one_of(st.sampled_from((factor - 1, 0, -1, 1)), st.integers(-300, 300)))
    if kind.compress:
        sizes["compress"] = st.just((factor, offset if (factor, offset) != (1, 0) else 1))  # that is plain causal
    if kind.mask == "window":
        sizes["window"] = st.one_of(st.tuples(side, side), st.tuples(side, st.none()), st.tuples(st.none(), side))
    if kind.plan:
        sizes["plan"] = st.integers(1, 5)
    data = dict(
        pattern=st.sampled_from(cases.PATTERNS),
        density=st.sampled_from((0.4, 0.1, 0.8)),
        full=st.sampled_from((0.5, 0.0, 1.0)),
        shuffle=st.booleans(),
        spare=st.sampled_from((0, 3, 8) if by_capacity else (0, 0, 3)),
        launch=st.sampled_from(cases.LAUNCHES[:3] if not kind.plan else cases.LAUNCHES),
        layout=st.sampled_from(cases.LAYOUTS if not kind.packed else cases.LAYOUTS[:3]),
        autograd=st.booleans(),
        locks=st.booleans() if kind.passes == 2 and kind.deterministic else st.just(True),
        scale=st.sampled_from((1.0, 0.1, 4.0)),
        seed=SEEDS,
    )
    return replace(kind, **{name: draw(of) for name, of in (sizes | data).items()})
