"""One attention call made of a case: its tensors, its lists, what the kernels give, and what they have to give."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from fuzz.blocks import Table, lists_of, pack, pattern_table
from fuzz.canary import Guarded, untouched
from fuzz.case import Attention, Kind

BLOCK_Q = 128
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
    v, do = draw(1, kind.Hkv, Dv), draw(0, kind.Hq, Dv).contiguous()
    table = None
    if kind.mask == "table":
        longest = [max(pair[side] for pair in case.lengths) + PAST for side in (0, 1)]
        table = (torch.rand(len(case.lengths), *longest, generator=generator) < case.density).int().to(device)
        table[:, case.seed % 7 :: 11] = 0  # queries that see nothing
        table[:, :, case.seed % 5 :: 13] = 0  # keys that nobody sees
    return Call(case, q, k, v, do, table, block_tables(case) if kind.lists else None)


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values (for "expanded batch" the first batch's), with other strides."""
    if layout == "heads first":
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "fused":
        return torch.cat([x, x.flip(-2)], -2).narrow(-2, 0, x.shape[-2])
    if layout == "expanded batch":
        return x[:1].expand(x.shape)
    return x


def block_tables(case: Attention) -> list[tuple[Table, Table]]:
    kind, draw = case.kind, random.Random(case.seed)
    heads = {"one": 1, "kv": kind.Hkv, "q": kind.Hq}[kind.heads]
    parts = []
    for T_q, T_k in case.lengths:
        M, N = -(-T_q // BLOCK_Q), -(-T_k // kind.block_k)
        rows = [pattern_table(case.pattern, M, N, case.density, draw) for _ in range(heads)]
        listed = torch.tensor(rows, dtype=torch.bool).view(1, heads, M, N)
        full = torch.tensor([draw.random() < case.full for _ in range(listed.numel())]).bool().view(listed.shape)
        parts.append((listed, listed & full if kind.full_lists else torch.zeros_like(listed)))
    return parts


def lists_for(call: Call, backward: bool) -> Any:
    """Block lists as the kernels take them, on the GPU."""
    if call.blocks is None:
        return None
    case, kind = call.case, call.case.kind
    turned = [tuple(t.mT if backward else t for t in pair) for pair in call.blocks]
    draw, size = random.Random(case.seed), (BLOCK_Q, kind.block_k)
    if kind.packed:
        lists = pack(
            turned, kind.form, ("cu_total_m_blocks", "cu_total_n_blocks")[backward], size, has_full=kind.full_lists
        )
    else:
        listed, full = (torch.cat(parts) for parts in zip(*turned, strict=True))
        lists = lists_of(listed, full if kind.full_lists else None, draw, shuffle=case.shuffle)
        lists = lists._replace(block_size=size)
    if backward and kind.plan:
        lists = _planned(call, lists)
    elif backward and kind.deterministic:
        lists = _ordered(call, lists)
    tensors = {name: t.to(call.q.device) for name, t in lists._asdict().items() if isinstance(t, torch.Tensor)}
    return lists._replace(**tensors)


def _planned(call: Call, lists: Any) -> Any:
    from flash_attn.cute.backward_plan import plan_backward

    kind, N = call.case.kind, lists.mask_block_cnt.shape[2]
    schedule: Any = call.case.launch
    if schedule == "shuffled":
        schedule = torch.randperm(N, generator=torch.Generator().manual_seed(call.case.seed))
    return plan_backward(
        lists,
        num_heads=kind.Hq,
        num_heads_kv=kind.Hkv,
        num_q_blocks=-(-call.case.lengths[0][0] // BLOCK_Q),
        deterministic=kind.deterministic,
        schedule=schedule,
        longest=1 + call.case.seed % 5,
    )


def _ordered(call: Call, lists: Any) -> Any:
    from flash_attn.cute.write_order import compute_dq_write_order

    spt = call.case.launch == "right to left"
    listed, full = (torch.cat(parts) for parts in zip(*call.blocks, strict=True))
    forward = lists_of(listed, full if call.case.kind.full_lists else None, random.Random(0))
    order, order_full = compute_dq_write_order(*forward[:4], *lists[:4], spt=spt)
    return lists._replace(dq_write_order=order, dq_write_order_full=order_full, spt=spt)


def options(call: Call) -> dict[str, Any]:
    """What forward and backward take besides the tensors and the lists."""
    case, kind = call.case, call.case.kind
    given: dict[str, Any] = {"causal": kind.mask in ("causal", "compressed")}
    if kind.mask == "window":
        given |= {"window_size_left": case.window[0], "window_size_right": case.window[1]}
    if kind.mask == "compressed":
        given |= {"compress_factor": case.factor, "compress_offset": case.offset}
    if kind.mask == "table":
        from fuzz.mask_mods import looked_up

        given |= {"mask_mod": looked_up, "aux_tensors": [call.table]}
    if kind.packed:
        for side, name in enumerate("qk"):
            starts = [0, *accumulate(pair[side] for pair in case.lengths)]
            given[f"cu_seqlens_{name}"] = torch.tensor(starts, dtype=torch.int32, device=call.q.device)
            given[f"max_seqlen_{name}"] = max(pair[side] for pair in case.lengths)
    return given


def run(call: Call, *, times: int = 1) -> list[Tensors]:
    """o, lse, dq, dk and dv from the kernels; backward again for each of `times`.

    Whatever the kernels get room for is NaN before, and guarded; the inputs have to stay as they are.
    """
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    both, results = options(call), []
    unchanged = untouched({"q": call.q, "k": call.k, "v": call.v, "do": call.do})
    forward, backward = lists_for(call, False), lists_for(call, True)
    with Guarded("cuda") as guard:
        o, lse, *_ = _flash_attn_fwd(
            call.q,
            call.k,
            call.v,
            **both,
            block_sparse_tensors=forward,
            pack_gqa=call.case.kind.pack_gqa,
            return_lse=True,
        )
        for _ in range(times):
            dq, dk, dv, *_ = _flash_attn_bwd(
                call.q, call.k, call.v, o, call.do, lse, **both, block_sparse_tensors=backward,
                deterministic=call.case.kind.deterministic,
            )  # fmt: skip
            results.append({"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv})
        torch.cuda.synchronize()
    guard.check()
    unchanged()
    return results


def visible(call: Call, b: int) -> torch.Tensor:
    """Which keys each query of a sequence sees, bool [heads or 1, queries, keys]."""
    case, kind, device = call.case, call.case.kind, call.q.device
    T_q, T_k = case.lengths[b]
    t, j = torch.arange(T_q, device=device)[:, None], torch.arange(T_k, device=device)[None, :]
    seen = torch.ones(1, T_q, T_k, dtype=torch.bool, device=device)
    if call.table is not None:
        seen = call.table[b, :T_q, :T_k].bool()[None]
    if call.blocks is not None:
        listed, full = (_spread(part[0], kind, T_q, T_k).to(device) for part in call.blocks[b])
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


def _spread(table: torch.Tensor, kind: Kind, T_q: int, T_k: int) -> torch.Tensor:
    seen = table.repeat_interleave(BLOCK_Q, 1)[:, :T_q].repeat_interleave(kind.block_k, 2)[:, :, :T_k]
    return seen if len(seen) == 1 else seen.repeat_interleave(kind.Hq // len(seen), 0)


def reference(call: Call, dtype: torch.dtype) -> Tensors:
    """Dense attention under the mask; a row that sees nothing gives 0, log-sum-exp -inf and no gradient."""
    kind = call.case.kind
    leaves = [t.detach().to(dtype).contiguous().requires_grad_() for t in (call.q, call.k, call.v)]
    os, lses = [], []
    for b, (q, k, v) in enumerate(zip(*(sequences(call.case, t, i > 0) for i, t in enumerate(leaves)), strict=True)):
        seen = visible(call, b)
        k, v = (t.repeat_interleave(kind.Hq // kind.Hkv, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * kind.D**-0.5
        # A finite floor, not -inf: its softmax has gradients where a row sees nothing.
        floored = torch.where(seen, scores.to(torch.promote_types(dtype, torch.float32)), -1e30)
        p = floored.softmax(-1) * seen
        lses.append(floored.masked_fill(~seen, -torch.inf).detach().logsumexp(-1))
        os.append(torch.einsum("hqk,khd->qhd", p.to(dtype), v))
    o = torch.cat(os) if kind.packed else torch.stack(os)
    lse = torch.cat(lses, 1) if kind.packed else torch.stack(lses)
    grads = torch.autograd.grad(o, leaves, call.do.to(dtype))
    return {"o": o.detach(), "lse": lse} | dict(zip(("dq", "dk", "dv"), grads, strict=True))


def sequences(case: Attention, tensor: torch.Tensor, keys: bool) -> list[torch.Tensor]:
    """Of a batch or a pack, [T, H, D] each."""
    return list(tensor.split([pair[keys] for pair in case.lengths])) if case.kind.packed else list(tensor)


def alone(call: Call, b: int) -> Call:
    """One sequence of a pack as a batch of its own."""
    case = call.case
    kind = replace(case.kind, packed=False, form="padded")
    own = replace(case, kind=kind, lengths=(case.lengths[b],), layout="contiguous")
    parts = [
        sequences(case, t, keys)[b][None].contiguous()
        for t, keys in ((call.q, 0), (call.k, 1), (call.v, 1), (call.do, 0))
    ]
    table = None if call.table is None else call.table[b : b + 1].contiguous()
    return Call(own, *parts, table, None if call.blocks is None else call.blocks[b : b + 1])


def rounded_terms(call: Call, name: str) -> float:
    """What rounding o and the probabilities once can make of dq and dk, from the sizes of their terms.

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
    name: str, mine: torch.Tensor, exact: torch.Tensor, rough: torch.Tensor, *, rounding: float = 0.0
) -> None:
    """Within twice the error of plain PyTorch in the same dtype, or what rounding alone can make, and a rounding."""
    if mine.numel() == 0:
        return
    assert mine.isfinite().all(), f"{name}: {int((~mine.isfinite()).sum())} values are not finite"
    error, true = (mine.double() - exact).abs(), float(exact.abs().max())
    limit = max(2 * float((rough.double() - exact).abs().max()), rounding)
    limit += torch.finfo(mine.dtype).eps / 2 * true + 1e-4
    worst = int(error.argmax())
    at = [int(i) for i in torch.unravel_index(torch.tensor(worst), error.shape)]
    assert float(error.max()) <= limit, (
        f"{name}{at}: {mine.flatten()[worst]:.6f}, should be {exact.flatten()[worst]:.6f}; off by {error.max():.3e}, "
        f"limit {limit:.3e}"
    )
