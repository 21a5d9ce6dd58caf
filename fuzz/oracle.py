"""The right results of an attention call, dense attention under its mask in fp64, and the comparison with them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from fuzz.attention import SOFTCAP, Inputs, Tensors, sequences
from fuzz.attention_lists import block, tables
from fuzz.blocks import Table
from fuzz.case import Attention

RESULTS = ("o", "dq", "dk", "dv")


def visible(case: Attention, b: int, x: Inputs, device: torch.device | None = None) -> torch.Tensor:
    """The keys that each query of a sequence sees, bool [heads or 1, queries, keys]; on the inputs' device, or this."""
    device = device or x.q.device
    T_q, T_k = case.lengths[b]
    q, kv = torch.arange(T_q, device=device)[:, None], torch.arange(T_k, device=device)[None, :]
    seen = torch.ones(1, T_q, T_k, dtype=torch.bool, device=device)
    if case.mask_mod:
        from fuzz.mask_mods import MASK_MODS

        seen = seen & MASK_MODS[case.mask_mod][1](b, q, kv, x.aux)
    if case.lists is not None:
        listed, full = (spread(t, block(case), case.Hq)[:, :T_q, :T_k].to(device) for t in tables(case)[b])
        seen = listed & (full | seen)
    # Bottom-right aligned, unless an offset is given: the last query is the one that sees the last key.
    offset = 0 if case.offsets is None else case.offsets[b]
    at = q + (T_k - T_q if case.offsets is None else offset)
    left, right = case.window[0], 0 if case.causal else case.window[1]
    if left is not None:
        seen = seen & (kv >= at - left)
    if right is not None:
        seen = seen & (kv <= at + right)
    if case.compress is not None:
        factor, first_seen = case.compress
        seen = seen & (kv * factor + first_seen <= q + offset)
    return seen & (kv < case.used[b])


def spread(table: Table, block: tuple[int, int], heads: int) -> Table:
    """Blocks [lists, M, N] as pairs of tokens, [heads, queries, keys], or [1, ...] of one list."""
    seen = table.repeat_interleave(block[0], 1).repeat_interleave(block[1], 2)
    return seen if len(seen) == 1 else seen.repeat_interleave(heads // len(seen), 0)


def reference(case: Attention, x: Inputs, dtype: torch.dtype) -> Tensors:
    """`dense` of a case."""
    scores = {"score_mod": lambda s: s + s, "softcap": lambda s: SOFTCAP * (s / SOFTCAP).tanh()}
    inputs = (x.q, x.k, x.v) if x.sink is None else (x.q, x.k, x.v, x.sink)
    seen, score = partial(visible, case, x=x), scores.get(case.option, lambda s: s)
    return dense(inputs, x.do, seen, dtype, lengths=case.packed or None, score=score)


def dense(
    inputs: tuple[torch.Tensor, ...],
    do: torch.Tensor,
    seen: Callable[[int], torch.Tensor],
    dtype: torch.dtype,
    *,
    lengths: tuple[tuple[int, int], ...] | None = None,
    score: Callable[[torch.Tensor], torch.Tensor] = lambda scores: scores,
) -> Tensors:
    """Dense attention under a mask; a row that sees nothing gives 0, log-sum-exp -inf and no gradient.

    Args:
        inputs: q, k and v, and the sink [Hq] if there is one.
        seen: which keys each query of a sequence sees, bool [heads or 1, queries, keys].
        lengths: queries and keys of packed sequences. score: of the scores, before they are masked.
    """
    leaves = [t.detach().to(dtype).contiguous().requires_grad_() for t in inputs]
    parts = [t.split([pair[i > 0] for pair in lengths]) if lengths else t for i, t in enumerate(leaves[:3])]
    os, lses = [], []
    for b, (q, k, v) in enumerate(zip(*parts, strict=True)):
        shown, group = seen(b), q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        # The softmax of half-precision scores is one in fp32, as eager attention has it. A finite floor, not -inf: its
        # softmax has gradients where a row sees nothing.
        floored = torch.where(shown, score(scores.to(torch.promote_types(dtype, torch.float32))), -1e30)
        for sink in leaves[3:]:
            floored = torch.cat([floored, sink.to(floored.dtype)[:, None, None].expand(-1, len(q), 1)], -1)
        p = floored.softmax(-1)[..., : len(k)] * shown
        lses.append(floored.masked_fill(floored == -1e30, -torch.inf).detach().logsumexp(-1))
        os.append(torch.einsum("hqk,khd->qhd", p.to(dtype), v))
    o, lse = (torch.cat(os), torch.cat(lses, 1)) if lengths else (torch.stack(os), torch.stack(lses))
    grads = torch.autograd.grad(o, leaves, do.to(dtype))
    return {"o": o.detach(), "lse": lse} | dict(zip(("dq", "dk", "dv", "dsink"), grads))


def rounded_terms(x: Inputs, name: str) -> float:
    """The error of dq and dk from rounding o and the probabilities once, by the sizes of their terms.

    A row that sees few keys has scores with next to no gradient: large terms cancel, each rounded. Plain PyTorch's own
    error is one draw of that, too small a sample where tensors are small. The roundings of D products add up as
    their square root.
    """
    if name not in ("dq", "dk") or not x.k.numel() or not x.q.numel():
        return 0.0
    rows, values = (float(x.double().norm(dim=-1).max()) for x in (x.do, x.v))
    other = float((x.k if name == "dq" else x.q).abs().max())
    softmax_scale = rounded = x.q.shape[-1] ** -0.5
    return torch.finfo(x.q.dtype).eps / 2 * rows * values * rounded * other * softmax_scale


def assert_close(
    name: str, mine: torch.Tensor, exact: torch.Tensor, rough: torch.Tensor, rounding: float = 0.0, floor: float = 1e-4
) -> None:
    """Within twice the error of plain PyTorch in the same dtype, or what rounding alone can make, and a rounding."""
    if mine.numel() == 0:
        return
    assert mine.isfinite().all(), f"{name}: {int((~mine.isfinite()).sum())} values are not finite"
    error, true = (mine.double() - exact).abs(), float(exact.abs().max())
    limit = max(2 * float((rough.double() - exact).abs().max()), rounding)
    limit += torch.finfo(mine.dtype).eps / 2 * true + floor
    worst = int(error.argmax())
    at = [int(i) for i in torch.unravel_index(torch.tensor(worst), error.shape)]
    assert float(error.max()) <= limit, (
        f"{name}{at}: {mine.flatten()[worst]:.6f}, should be {exact.flatten()[worst]:.6f}; off by {error.max():.3e}, "
        f"limit {limit:.3e}"
    )


def assert_right(
    case: Attention, x: Inputs, got: Tensors, rounding: Callable[[str], float] = lambda name: 0.0, floor: float = 1e-4
) -> None:
    """Output, log-sum-exp and gradients are those of the definition; what is hidden is exactly nothing."""
    exact, rough = (reference(case, x, dtype) for dtype in (torch.float64, x.q.dtype))
    lse, true = got["lse"], exact["lse"]
    try:
        assert lse.isneginf().equal(true.isneginf()), "log-sum-exp: -inf in the wrong rows"
        some = ~true.isneginf()
        torch.testing.assert_close(lse[some].double(), true[some], rtol=1e-3, atol=2e-3, msg="lse: {}".format)
        for name in exact.keys() - {"lse"}:
            assert_close(name, got[name], exact[name], rough[name], rounding(name), floor)
        parts = [sequences(case, got[name], name in ("dk", "dv")) for name in RESULTS]
        for b, of_sequence in enumerate(zip(*parts, strict=True)):
            shown = visible(case, b, x)
            blind, unseen = ~shown.any(0).any(1), ~shown.any(0).any(0)
            for name, part in zip(RESULTS, of_sequence, strict=True):
                hidden = part[unseen if name in ("dk", "dv") else blind]
                assert not hidden.any(), f"{name} of sequence {b} is not 0 where nothing is visible"
    except AssertionError as error:
        raise AssertionError(f"{case!r}: {error}") from None
