"""Relations between one call of the kernels and another, whatever the right result is."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import torch
from torch.nn.functional import pad

from fuzz import strategies
from fuzz.attention import PAST, Call, Tensors, alone, make, run, sequences, visible
from fuzz.case import Attention, Kind
from fuzz.kinds import KINDS
from fuzz.prop import GPU, Skip, holds

PACKS = tuple(kind for kind in KINDS if kind.packed)
PACKED = tuple(kind for kind in KINDS if kind.packed and not kind.deterministic)[:5]
LISTED = tuple(kind for kind in KINDS if kind.lists and not kind.packed and kind.mask in ("none", "table"))[:4]
PLAIN = tuple(kind for kind in KINDS if not kind.lists and not kind.packed)[:5]
COMPRESSED = tuple(kind for kind in KINDS if kind.mask == "compressed" and not kind.packed and not kind.lists)

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


def all_near(one: Tensors, other: Tensors, names: tuple[str, ...] = ("o", "dq", "dk", "dv")) -> None:
    for name in names:
        near(name, one[name], other[name])


@holds("relations.packed is one at a time", strategies.attention, kinds=PACKED, needs=GPU, stock=True)
def packed_is_one_at_a_time(case: Attention) -> None:
    call = make(case)
    (whole,) = run(call)
    longest = max(range(len(case.lengths)), key=lambda b: min(case.lengths[b]))
    if 0 in case.lengths[longest]:
        raise Skip
    (single,) = run(alone(call, longest))
    for name in ("o", "dq", "dk", "dv"):
        near(name, sequences(case, whole[name], name in ("dk", "dv"))[longest], single[name][0])


@holds("relations.neighbours", strategies.attention, kinds=PACKS, needs=GPU)
def neighbours(case: Attention) -> None:
    """NaN, inf or huge numbers in other sequences change no bit of an output, or of a deterministic gradient."""
    call, mine = make(case), case.seed % len(case.lengths)
    value = (math.nan, math.inf, torch.finfo(call.q.dtype).max)[case.seed % 3]

    def among_others(name: str) -> torch.Tensor:
        parts = sequences(case, getattr(call, name), name in ("k", "v"))
        return torch.cat([part if b == mine else torch.full_like(part, value) for b, part in enumerate(parts)])

    (once,), (other,) = run(call), run(replace(call, **{name: among_others(name) for name in ("q", "k", "v", "do")}))
    for name in once:
        of = (got[name].mT if name == "lse" else got[name] for got in (once, other))
        clean, beside = (sequences(case, x, name in ("dk", "dv"))[mine] for x in of)
        if case.kind.deterministic or name in ("o", "lse"):
            assert beside.equal(clean), f"{name} of sequence {mine} has {int((beside != clean).sum())} other numbers"
        else:
            near(name, beside, clean)


@holds("relations.lists are a mask", strategies.attention, kinds=LISTED, needs=GPU, stock=True)
def lists_are_a_mask(case: Attention) -> None:
    """Lists, and a mask_mod that hides what they do not list, one head at a time."""
    call = make(case)
    (sparse,) = run(call)
    head = case.seed % case.kind.Hq
    kv = head // (case.kind.Hq // case.kind.Hkv)
    kind = Kind(D=case.kind.D, dtype=case.kind.dtype, Hq=1, Hkv=1, mask="table")
    shape = (len(case.lengths), *(n + PAST for n in case.lengths[0]))
    table = torch.zeros(shape, dtype=torch.int32, device=call.q.device)
    for b in range(len(case.lengths)):
        seen = visible(call, b)
        table[b, : seen.shape[1], : seen.shape[2]] = seen[head if len(seen) > 1 else 0]
    own = [t[:, :, h : h + 1].contiguous() for t, h in ((call.q, head), (call.k, kv), (call.v, kv), (call.do, head))]
    (dense,) = run(Call(replace(case, kind=kind, layout="contiguous"), *own, table, None))
    near("o", sparse["o"][:, :, head], dense["o"][:, :, 0])
    near("dq", sparse["dq"][:, :, head], dense["dq"][:, :, 0])


@holds("relations.rows in any order", strategies.attention, kinds=LISTED, needs=GPU, stock=True)
def rows_in_any_order(case: Attention) -> None:
    """The blocks of a row may be listed in any order, in rows of any width."""
    (rising,), (mixed,) = (run(make(replace(case, shuffle=mixed, spare=5 * mixed))) for mixed in (False, True))
    all_near(rising, mixed)


@holds("relations.unlisted keys", strategies.attention, kinds=LISTED, needs=GPU, stock=True)
def unlisted_keys(case: Attention) -> None:
    """Blocks of keys that no row lists change nothing, and get no gradient."""
    (T_q, T_k), wide = case.lengths[0], case.kind.block_k
    T_k, more = -(-T_k // wide) * wide, (1 + case.seed % 2) * wide  # the last block's keys have to stay the same ones
    case = replace(case, lengths=((T_q, T_k),) * len(case.lengths), layout="contiguous")
    call, longer = make(case), replace(case, lengths=((T_q, T_k + more),) * len(case.lengths))
    k, v = (torch.cat([t, 100 * torch.ones_like(t[:, :1]).expand(-1, more, -1, -1)], 1) for t in (call.k, call.v))
    blocks = [tuple(pad(t, (0, more // wide)) for t in pair) for pair in call.blocks]
    table = None if call.table is None else pad(call.table, (0, more))
    (once,), (other,) = run(call), run(Call(longer, call.q, k, v, call.do, table, blocks))
    assert not other["dk"][:, T_k:].any() and not other["dv"][:, T_k:].any(), "unlisted keys have a gradient"
    all_near(once, other | {name: other[name][:, :T_k] for name in ("dk", "dv")})


@holds("relations.permutations", strategies.attention, kinds=PLAIN, needs=GPU, stock=True)
def permutations(case: Attention) -> None:
    """Batches, and key/value heads with their query heads, in another order; the same numbers in that order."""
    call = make(case)
    (once,) = run(call)
    draw, G = random.Random(case.seed), case.kind.Hq // case.kind.Hkv
    batches, groups = list(range(len(case.lengths))), list(range(case.kind.Hkv))
    draw.shuffle(batches), draw.shuffle(groups)
    heads = [g * G + i for g in groups for i in range(G)]
    order = {"q": heads, "k": groups, "v": groups, "do": heads}
    moved = {name: getattr(call, name)[batches][:, :, own].contiguous() for name, own in order.items()}
    table = None if call.table is None else call.table[batches].contiguous()
    (other,) = run(replace(call, **moved, table=table))
    for name, own in (("o", heads), ("dq", heads), ("dk", groups), ("dv", groups)):
        near(name, other[name], once[name][batches][:, :, own])


@holds("relations.doubled key/value heads", strategies.attention, kinds=PLAIN, needs=GPU, stock=True)
def doubled_heads(case: Attention) -> None:
    """Keys and values repeated for every query head of a group: the same output, and gradients that add up."""
    kind = case.kind
    if kind.Hq == kind.Hkv:
        raise Skip
    call = make(case)
    (once,) = run(call)
    repeated = {name: getattr(call, name).repeat_interleave(kind.Hq // kind.Hkv, -2) for name in ("k", "v")}
    own = replace(case, kind=replace(kind, Hkv=kind.Hq, pack_gqa=None), layout="contiguous")
    (doubled,) = run(replace(call, case=own, **repeated))
    summed = {
        name: doubled[name].float().unflatten(-2, (kind.Hkv, -1)).sum(-2).to(call.k.dtype) for name in ("dk", "dv")
    }
    all_near(once, doubled | summed)


@holds("relations.twice the values", strategies.attention, kinds=PLAIN, needs=GPU, stock=True)
def twice_the_values(case: Attention) -> None:
    """Linear in v and in do: a factor of 2 rounds nowhere, so the output has exactly the bits of twice itself."""
    call = make(case)
    (once,) = run(call)
    (values,) = run(replace(call, v=call.v * 2))
    if case.kind.dtype == "bfloat16":  # the smallest numbers of float16 do round
        assert values["o"].equal(once["o"] * 2), "o is not linear in v"
    near("o", values["o"], once["o"] * 2)
    (outputs,) = run(replace(call, do=call.do * 2))
    all_near({name: once[name] * 2 for name in ("dq", "dk", "dv")}, outputs, ("dq", "dk", "dv"))


@holds("relations.rows of dS sum to 0", strategies.attention, kinds=PLAIN + LISTED[:2], needs=GPU, stock=True)
def rows_sum_to_0(case: Attention) -> None:
    """A vector added to all keys changes no softmax: the gradient of k sums to 0 over the keys."""
    call = make(replace(case, scale=1.0))
    dk = run(call)[0]["dk"].double()
    rounding = torch.finfo(call.k.dtype).eps * float(dk.abs().max()) * max(4.0, dk.shape[1] ** 0.5) * 4
    off = float(dk.sum(1).abs().max())
    # delta comes from the output as it was stored: each query's row of dS errs by a rounding of that.
    stored = torch.finfo(call.k.dtype).eps * case.lengths[0][0] ** 0.5 * 8
    assert off <= rounding + stored, f"dk sums to {off:.3e}, limit {rounding + stored:.3e}"


@holds("relations.unseen keys", strategies.attention, kinds=COMPRESSED, needs=GPU)
def unseen_keys(case: Attention) -> None:
    """Keys that no query sees change nothing, and get no gradient."""
    T_q, T_k = case.lengths[0]
    seen = max((T_q - 1 - case.offset) // case.factor + 1, 0)
    T_k = max(T_k, seen, 1)
    case = replace(case, lengths=((T_q, T_k),) * len(case.lengths), layout="contiguous")
    call = make(case)
    more = 1 + case.seed % 200
    huge = [torch.cat([t, 100 * torch.ones_like(t[:, :1]).expand(-1, more, -1, -1)], 1) for t in (call.k, call.v)]
    (once,), longer = run(call), replace(case, lengths=((T_q, T_k + more),) * len(case.lengths))
    (other,) = run(replace(call, case=longer, k=huge[0], v=huge[1]))
    assert not other["dk"][:, T_k:].any() and not other["dv"][:, T_k:].any(), "unseen keys have a gradient"
    cut = {name: other[name][:, :T_k] for name in ("dk", "dv")}
    all_near(once, other | cut)


def keys_seen(case: Attention, t: int) -> int:
    """Keys that query t of a causal case sees: so many of the first."""
    T_q, T_k = case.lengths[0]
    compressed = case.kind.mask == "compressed"
    seen = (t - case.offset) // case.factor + 1 if compressed else t + T_k - T_q + 1
    return max(0, min(T_k, seen))


@holds("relations.causality", strategies.attention, kinds=CAUSAL, needs=GPU, stock=True)
def causality(case: Attention) -> None:
    """Later queries and keys change no bit of an output, and get no gradient from it."""
    call = make(replace(case, layout="contiguous"))
    t = case.seed % case.lengths[0][0]
    seen = keys_seen(case, t)
    call.do[:, t + 1 :] = 0
    sides = {"q": t + 1, "k": seen, "v": seen}
    changed = {name: torch.cat([x[:, :n], 3 - x[:, n:]], 1) for name, n in sides.items() for x in [getattr(call, name)]}
    (once,), (other,) = run(call), run(replace(call, **changed))
    assert once["o"][:, : t + 1].equal(other["o"][:, : t + 1]), f"what comes after query {t} changes o"
    assert once["lse"][..., : t + 1].equal(other["lse"][..., : t + 1]), f"what comes after query {t} changes lse"
    for name, n in (("dq", t + 1), ("dk", seen), ("dv", seen)):
        for result in (once, other):
            assert not result[name][:, n:].any(), f"{name} past {n} is not 0, for outputs up to query {t}"
