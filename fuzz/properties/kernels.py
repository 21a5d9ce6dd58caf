"""The kernels: against dense attention in fp64, bits that repeat, one call and another, on a GPU; and compiled."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from fuzz import strategies
from fuzz.attention import make_inputs, results, run, sequences
from fuzz.case import FORMS, Attention
from fuzz.kinds import COMPRESSED, EXACT, KINDS, PACKED, WINDOW
from fuzz.oracle import assert_right, rounded_terms
from fuzz.prop import GPU, SM90, SM100, Skip, holds


@holds("attention.is its definition", strategies.attention, kinds=KINDS, needs=GPU)
def is_its_definition(case: Attention) -> None:
    x = make_inputs(case)
    (got,) = run(case, x)
    assert_right(case, x, got, partial(rounded_terms, x))


@holds("attention.same bits", strategies.attention, kinds=EXACT, needs=GPU)
def same_bits(case: Attention) -> None:
    """Output and deterministic gradients, 200 times over, while other work comes and goes."""
    x, first = make_inputs(case), None
    other, square = torch.cuda.Stream(), torch.randn(1024, 1024, device="cuda")
    for turn in range(20):
        with torch.cuda.stream(other):
            for _ in range((case.seed + 7 * turn) % 20):
                square @ square
        for again in run(case, x, times=10):
            first = again if first is None else first
            for name, t in again.items():
                assert t.equal(first[name]), f"{name} has {int((t != first[name]).sum())} other numbers in round {turn}"


PACKS = tuple(kind for kind in KINDS if kind.packed)
CAUSAL = tuple(
    kind for kind in KINDS if kind.mask in ("causal", "compressed") and not (kind.packed or kind.lists or kind.expanded)
)


def near(name: str, one: torch.Tensor, other: torch.Tensor, roundings: float = 8) -> None:
    """Two ways to the same numbers: some roundings of the largest apart."""
    if one.numel() == 0:
        return
    assert one.isfinite().all() and other.isfinite().all(), f"{name} is not finite"
    apart = (one.double() - other.double()).abs().max()
    limit = roundings * torch.finfo(one.dtype).eps * max(float(one.double().abs().max()), 0.05) + 1e-3
    assert float(apart) <= limit, f"{name}: {float(apart):.3e} apart, limit {limit:.3e}"


@holds("relations.neighbours", strategies.attention, kinds=PACKS, needs=GPU)
def neighbours(case: Attention) -> None:
    """NaN, inf or huge numbers in other sequences change no bit of an output, or of a deterministic gradient."""
    x, mine = make_inputs(case), case.seed % len(case.lengths)
    value = (math.nan, math.inf, torch.finfo(x.q.dtype).max)[case.seed % 3]

    def among_others(name: str) -> torch.Tensor:
        parts = sequences(case, getattr(x, name), name in ("k", "v"))
        return torch.cat([part if b == mine else torch.full_like(part, value) for b, part in enumerate(parts)])

    spoilt = replace(x, **{name: among_others(name) for name in ("q", "k", "v", "do")})
    (once,), (other,) = run(case, x), run(case, spoilt)
    for name in once:
        of = (got[name].mT if name == "lse" else got[name] for got in (once, other))
        clean, beside = (sequences(case, t, name in ("dk", "dv"))[mine] for t in of)
        if case.deterministic or name in ("o", "lse"):
            assert beside.equal(clean), f"{name} of sequence {mine} has {int((beside != clean).sum())} other numbers"
        else:
            near(name, beside, clean)


def keys_seen(case: Attention, t: int) -> int:
    """Keys that query t of a causal case sees: so many of the first."""
    T_q, T_k = case.lengths[0]
    factor, offset = case.compress or (1, T_q - T_k)
    seen = (t - offset) // factor + 1
    return max(0, min(T_k, seen))


@holds("relations.causality", strategies.attention, kinds=CAUSAL, needs=GPU)
def causality(case: Attention) -> None:
    """Later queries and keys change no bit of an output, and get no gradient from it."""
    case = replace(case, layout="contiguous")
    x, t = make_inputs(case), case.seed % case.T_q
    seen = keys_seen(case, t)
    x.do[:, t + 1 :] = 0
    sides = {"q": t + 1, "k": seen, "v": seen}
    changed = {name: torch.cat([of[:, :n], 3 - of[:, n:]], 1) for name, n in sides.items() for of in [getattr(x, name)]}
    (once,), (other,) = run(case, x), run(case, replace(x, **changed))
    assert once["o"][:, : t + 1].equal(other["o"][:, : t + 1]), f"what comes after query {t} changes o"
    assert once["lse"][..., : t + 1].equal(other["lse"][..., : t + 1]), f"what comes after query {t} changes lse"
    for name, n in (("dq", t + 1), ("dk", seen), ("dv", seen)):
        for result in (once, other):
            assert not result[name][:, n:].any(), f"{name} past {n} is not 0, for outputs up to query {t}"


def compiles(case: Attention) -> None:
    """Forward and backward of a case; tensors have shapes and nothing in them, which autograd cannot work on."""
    case = replace(case, autograd=False)
    with FakeTensorMode():
        try:
            results(case, make_inputs(case))
        except NotImplementedError:
            raise Skip from None


@st.composite
def any_kind(draw: st.DrawFn, arch: int) -> Attention:
    """Every combination of features that one of the kernels may be asked for."""
    D, Dv = draw(st.sampled_from(((64, None), (128, None), (96, None), (192, 128))))
    Hkv = draw(st.sampled_from((1, 2, 4))) if Dv is None else 4  # heads share keys only where v is as wide as they are
    packed, deterministic = draw(st.booleans()), draw(st.booleans())
    masks = ({}, dict(causal=True), WINDOW, COMPRESSED, dict(mask_mod="table"))
    options = draw(st.sampled_from(masks)) | (PACKED if packed else {})
    if D in (64, 128) and draw(st.booleans()):
        form = draw(st.sampled_from(FORMS if packed else ("padded", "shared")))
        block_q = draw(st.sampled_from((64, 128, 192, 256) if arch == 90 else (128, 256, 384)))
        two = arch == 90 and "compress" not in options and block_q % 128 == 0
        options |= dict(
            lists=draw(st.sampled_from(("both", "no full"))),
            form=form,
            list_heads=1 if form == "shared" else draw(st.sampled_from((1, Hkv, 4))),
            block=(block_q, draw(st.sampled_from((64, 128))) if arch == 90 else 128),
            # A plan is of every sequence's lists.
            plan=int(form != ("padded" if packed else "shared") and draw(st.booleans())),
            passes=draw(st.sampled_from((None, 1, 2) if two else (None, 1) if arch == 90 else (None,))),
        )
    kind = Attention(
        **options,
        D=D,
        Dv=Dv,
        Hkv=Hkv,
        deterministic=deterministic,
        dtype=draw(st.sampled_from(("bfloat16", "float16"))),
        expanded=draw(st.sampled_from(("", "batch", "heads") if not packed else ("", "heads"))),
    )
    return draw(strategies.attention(kind))


holds("compiling.sm_90", partial(any_kind, 90), needs=SM90)(compiles)
holds("compiling.sm_100", partial(any_kind, 100), needs=SM100)(compiles)
