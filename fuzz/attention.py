"""One attention call made of a case: its tensors, its lists, what the kernels give, and what they have to give."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from fuzz.blocks import Table, each_tensor, lists_of, locks_of, pack, pattern_table
from fuzz.canary import Guarded, untouched
from fuzz.case import Attention, Kind
from fuzz.kinds import passes_by_room, two_passes
from fuzz.prop import Skip
from nsa_layer.fork import fork_status

PAST = 256  # rows and columns of a table past the longest sequence: whole tiles read it
NAMES = ("o", "dq", "dk", "dv")
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Call:
    """The tensors of a case on the GPU."""

    case: Attention
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor
    table: torch.Tensor | None  # [B, queries, keys], nonzero where a query sees a key
    blocks: list[tuple[Table, Table]] | None  # of each sequence, [1, heads, M, N]: listed, and full


def make(case: Attention, device: str = "cuda") -> Call:
    kind, generator = case.kind, torch.Generator().manual_seed(case.seed)
    dtype, Dv = getattr(torch, kind.dtype), kind.Dv or kind.D

    def draw(side: int, heads: int, width: int, scale: float = 1.0) -> torch.Tensor:
        tokens = (sum(pair[side] for pair in case.lengths),)
        if not kind.packed:
            tokens = (len(case.lengths), case.lengths[0][side])
        values = (torch.randn(*tokens, heads, width, generator=generator) * scale).to(dtype).to(device)
        return laid_out(values, case.layout)

    q, k = draw(0, kind.Hq, kind.D, case.scale), draw(1, kind.Hkv, kind.D, case.scale)
    v, do = draw(1, kind.Hkv, Dv), draw(0, kind.Hq, Dv)
    if kind.expanded == "batch":
        q, k, v = (x[:1].expand(x.shape) for x in (q, k, v))
    if kind.expanded == "heads":
        k, v = (x[..., :1, :].expand(x.shape) for x in (k, v))
    table = token_table(case, generator).to(device) if kind.mask == "table" else None
    return Call(case, q, k, v, do, table, block_tables(case) if kind.lists else None)


def token_table(case: Attention, generator: torch.Generator) -> torch.Tensor:
    """Pairs that a mask_mod lets through, int32 [B, queries, keys]: a pattern, and chance past the sequences' ends."""
    longest = [max(pair[side] for pair in case.lengths) + PAST for side in (0, 1)]
    table = torch.rand(len(case.lengths), *longest, generator=generator) < case.density
    draw = random.Random(case.seed)
    for b, (T_q, T_k) in enumerate(case.lengths):
        table[b, :T_q, :T_k] = pattern_table(case.pattern, T_q, T_k, case.density, draw)
    table[:, case.seed % 7 :: 11] = 0  # queries that see nothing
    table[:, :, case.seed % 5 :: 13] = 0  # keys that nobody sees
    return table.int()


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values with other strides."""
    if layout == "heads first":
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "fused":
        return torch.cat([x, x.flip(-2)], -2).narrow(-2, 0, x.shape[-2])
    if layout == "every other batch" and x.dim() == 4:
        return torch.stack([x, x.flip(0)], 1)[:, 0]
    return x


def block_tables(case: Attention) -> list[tuple[Table, Table]]:
    kind, draw = case.kind, random.Random(case.seed)
    heads = {"one": 1, "kv": kind.Hkv, "q": kind.Hq, "all": 1}[kind.heads]
    parts = []
    for T_q, T_k in case.lengths:
        if parts and kind.heads == "all" and not kind.packed:
            parts.append(parts[0])
            continue
        M, N = -(-T_q // kind.block_q), -(-T_k // kind.block_k)
        listed = torch.stack([pattern_table(case.pattern, M, N, case.density, draw) for _ in range(heads)])[None]
        full = torch.tensor([draw.random() < case.full for _ in range(listed.numel())]).bool().view(listed.shape)
        parts.append((listed, listed & full if kind.full_lists else torch.zeros_like(listed)))
    return parts


def lists_for(call: Call, backward: bool) -> Any:
    """Block lists as the kernels take them, on the GPU."""
    if call.blocks is None:
        return None
    case, kind = call.case, call.case.kind
    turned = [tuple(t.mT if backward else t for t in pair) for pair in call.blocks]
    draw, size, spt = random.Random(case.seed), (kind.block_q, kind.block_k), case.launch == "right to left"
    if kind.packed:
        before = ("cu_total_m_blocks", "cu_total_n_blocks")[backward]
        ordered = backward and ordered_adds(case) and not kind.plan
        launch = slice(None, None, -1 if spt else 1)
        locks = [locks_of(listed, range(listed.shape[3])[launch]).mT for listed, _ in call.blocks] if ordered else None
        lists = pack(turned, kind.form, before, size, has_full=kind.full_lists, locks=locks)
        lists = lists._replace(spt=spt) if ordered else lists
    else:
        one = slice(0, 1) if kind.heads == "all" else slice(None)
        listed, full = (torch.cat(parts[one]) for parts in zip(*turned, strict=True))
        lists = lists_of(
            listed, full if kind.full_lists else None, draw, shuffle=case.shuffle, spare=_spare(case, listed)
        )
        lists = lists._replace(block_size=size)
    if backward and kind.plan:
        lists = _planned(call, lists)
    elif backward and ordered_adds(case) and not kind.packed:
        lists = _ordered(call, lists)
    if backward and kind.passes is not None:  # autograd has no argument for it
        lists = lists._replace(passes=kind.passes)
    return each_tensor(lists, lambda t: t.to(call.q.device))


def in_two_passes(case: Attention) -> bool:
    """`two_passes` of a case, where it depends on how wide its lists are too."""
    kind = case.kind
    if not passes_by_room(kind):
        return two_passes(kind)
    from flash_attn.cute.fwd_sm90.persistence import capacity

    nothing = torch.empty(0)
    call = Call(case, nothing, nothing, nothing, nothing, None, block_tables(case))
    return two_passes(kind, capacity(lists_for(call, False)))


def _spare(case: Attention, listed: Table) -> int:
    """Places past the longest row that keep rows, which hold one place at least, as narrow as there are blocks."""
    longest = max(1, int(listed.sum(-1).max()) if listed.numel() else 0)
    return max(0, min(case.spare, listed.shape[3] - longest))


def ordered_adds(case: Attention) -> bool:
    """True if backward lists, or their plan, bring semaphore values: in two passes they may."""
    return case.kind.deterministic and (case.locks or case.kind.passes != 2)


def _planned(call: Call, lists: Any) -> Any:
    from flash_attn.cute.lists.backward_plan import plan_backward

    kind, N = call.case.kind, lists.mask_block_cnt.shape[-1]
    schedule: Any = call.case.launch
    queries = [-(-T_q // kind.block_q) for T_q, _ in call.case.lengths]
    if schedule == "shuffled":
        schedule = torch.randperm(N, generator=torch.Generator().manual_seed(call.case.seed))
    return plan_backward(
        lists,
        num_heads=kind.Hq,
        num_heads_kv=kind.Hkv,
        num_q_blocks=max(1, *queries),
        deterministic=ordered_adds(call.case),
        schedule=schedule,
        longest=1 + call.case.seed % 5,
        **(dict(cu_total_m_blocks=torch.tensor([0, *accumulate(queries)])) if kind.form == "stacked" else {}),
    )


def _ordered(call: Call, lists: Any) -> Any:
    from flash_attn.cute.lists.write_order import compute_dq_write_order

    spt = call.case.launch == "right to left"
    listed, full = (torch.cat(parts) for parts in zip(*call.blocks, strict=True))
    forward = lists_of(listed, full if call.case.kind.full_lists else None, random.Random(0))
    order, order_full = compute_dq_write_order(*forward[:4], *lists[:4], spt=spt)
    return lists._replace(dq_write_order=order, dq_write_order_full=order_full, spt=spt)


def options(call: Call) -> dict[str, Any]:
    """Arguments of forward and backward besides the tensors and the lists."""
    case, kind = call.case, call.case.kind
    arguments: dict[str, Any] = {"causal": kind.mask in ("causal", "compressed")}
    if kind.mask == "window":
        arguments |= {"window_size_left": case.window[0], "window_size_right": case.window[1]}
    if kind.mask == "compressed":
        arguments |= {"compress_factor": case.factor, "compress_offset": case.offset}
    if kind.mask == "table":
        from fuzz.mask_mods import looked_up

        arguments |= {"mask_mod": looked_up, "aux_tensors": [call.table]}
    if kind.packed:
        for side, name in enumerate("qk"):
            starts = [0, *accumulate(pair[side] for pair in case.lengths)]
            arguments[f"cu_seqlens_{name}"] = torch.tensor(starts, dtype=torch.int32, device=call.q.device)
            arguments[f"max_seqlen_{name}"] = max(pair[side] for pair in case.lengths)
    return arguments


def run(call: Call, *, times: int = 1) -> list[Tensors]:
    """o, lse, dq, dk and dv from the kernels; backward again for each of `times`.

    What the kernels allocate is NaN before, and guarded; the inputs have to stay as they are.
    """
    if call.case.kind.passes == 2 and torch.cuda.get_device_capability()[0] != 9:
        raise Skip
    unchanged = untouched({"q": call.q, "k": call.k, "v": call.v, "do": call.do})
    both, lists = options(call), (lists_for(call, False), lists_for(call, True))
    with Guarded("cuda") as guard:
        results = called(call, both, *lists, times=times)
        torch.cuda.synchronize()
    guard.check()
    unchanged()
    return results


def called(call: Call, both: dict[str, Any], forward: Any, backward: Any, *, times: int = 1) -> list[Tensors]:
    """As `run`, with nothing around it; `both` are `options`, the rest lists of both directions."""
    way = _through_autograd if call.case.autograd else _straight
    return way(call, both, forward, backward, times)


def _straight(call: Call, both: dict[str, Any], forward: Any, backward: Any, times: int) -> list[Tensors]:
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    kind, inputs = call.case.kind, (call.q, call.k, call.v)
    o, lse, *_ = _flash_attn_fwd(*inputs, **both, block_sparse_tensors=forward, pack_gqa=kind.pack_gqa, return_lse=True)
    results = []
    for _ in range(times):
        dq, dk, dv, *_ = _flash_attn_bwd(
            *inputs, o, call.do, lse, **both, block_sparse_tensors=backward, deterministic=kind.deterministic,
            **_passes(kind, forward),
        )  # fmt: skip
        results.append({"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv})
    return results


def _passes(kind: Kind, forward: Any) -> dict[str, Any]:
    """The arguments that let backward take two passes, as autograd does; the unpatched package has none."""
    if forward is None or fork_status().kind == "stock":
        return {}
    return dict(block_sparse_tensors_fwd=forward, passes=kind.passes)


def _through_autograd(call: Call, both: dict[str, Any], forward: Any, backward: Any, times: int) -> list[Tensors]:
    leaves = [x.detach().requires_grad_() for x in (call.q, call.k, call.v)]
    o, lse = public(call, leaves, both, forward, backward)
    results = []
    for _ in range(times):
        dq, dk, dv = torch.autograd.grad(o, leaves, call.do, retain_graph=True)
        results.append({"o": o.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv})
    return results


def public(call: Call, inputs: list[torch.Tensor], both: dict[str, Any], forward: Any, backward: Any) -> Any:
    """(o, lse) of the public function for q, k and v in place of the call's own; arguments as for the kernels."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    arguments = dict(both)
    window = arguments.pop("window_size_left", None), arguments.pop("window_size_right", None)
    lists = dict(block_sparse_tensors=forward, block_sparse_tensors_bwd=backward) if forward is not None else {}
    attend = flash_attn_varlen_func if call.case.kind.packed else flash_attn_func
    return attend(
        *inputs, **arguments, **lists, window_size=window, pack_gqa=call.case.kind.pack_gqa, return_lse=True,
        deterministic=call.case.kind.deterministic,
    )  # fmt: skip


def visible(call: Call, b: int) -> torch.Tensor:
    """The keys that each query of a sequence sees, bool [heads or 1, queries, keys]."""
    case, kind, device = call.case, call.case.kind, call.q.device
    T_q, T_k = case.lengths[b]
    t, j = torch.arange(T_q, device=device)[:, None], torch.arange(T_k, device=device)[None, :]
    seen = torch.ones(1, T_q, T_k, dtype=torch.bool, device=device)
    if call.table is not None:
        seen = call.table[b, :T_q, :T_k].bool()[None]
    if call.blocks is not None:
        size = (kind.block_q, kind.block_k)
        listed, full = (spread(part[0], size, kind.Hq)[:, :T_q, :T_k].to(device) for part in call.blocks[b])
        seen = listed & (full | seen)
    at = t + T_k - T_q  # aligned at the ends, but for compressed keys
    if kind.mask == "causal":
        seen = seen & (j <= at)
    if kind.mask == "compressed":
        seen = seen & (j * case.factor + case.offset <= t)
    if kind.mask == "window":
        left, right = case.window
        seen = seen & (j >= at - left) if left is not None else seen
        seen = seen & (j <= at + right) if right is not None else seen
    return seen


def spread(table: Table, block: tuple[int, int], heads: int) -> Table:
    """Blocks [lists, M, N] as pairs of tokens, [heads, queries, keys], or [1, ...] of one list."""
    seen = table.repeat_interleave(block[0], 1).repeat_interleave(block[1], 2)
    return seen if len(seen) == 1 else seen.repeat_interleave(heads // len(seen), 0)


def reference(call: Call, dtype: torch.dtype) -> Tensors:
    """`dense` of a call."""
    lengths = call.case.lengths if call.case.kind.packed else None
    return dense((call.q, call.k, call.v), call.do, partial(visible, call), dtype, lengths=lengths)


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


def sequences(case: Attention, tensor: torch.Tensor, keys: bool) -> list[torch.Tensor]:
    """The sequences of a batch or a pack, [T, H, D] each."""
    return list(tensor.split([pair[keys] for pair in case.lengths])) if case.kind.packed else list(tensor)


def rounded_terms(call: Call, name: str) -> float:
    """The error of dq and dk from rounding o and the probabilities once, by the sizes of their terms.

    A row that sees few keys has scores with next to no gradient: large terms cancel, each rounded. Plain PyTorch's own
    error is one draw of that, too small a sample where tensors are small. The roundings of D products add up as
    their square root.
    """
    if name not in ("dq", "dk") or not call.k.numel() or not call.q.numel():
        return 0.0
    rows, values = (float(x.double().norm(dim=-1).max()) for x in (call.do, call.v))
    other = float((call.k if name == "dq" else call.q).abs().max())
    softmax_scale = rounded = call.q.shape[-1] ** -0.5
    return torch.finfo(call.q.dtype).eps / 2 * rows * values * rounded * other * softmax_scale


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
