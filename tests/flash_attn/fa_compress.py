"""Compressed-causal attention calls as data, their kernels' results, and dense attention to compare with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

import torch
from fa_cases import Case
from fa_lists import backward_lists, forward_lists
from fa_reference import assert_close
from fa_reference import visible as visible_in_lists


@dataclass(frozen=True)
class Kind:
    """What kernels are compiled for."""

    D: int = 128
    Dv: int | None = None
    Hq: int = 4
    Hkv: int = 2
    packed: bool = False  # both cu_seqlens
    pack_gqa: bool | None = None
    deterministic: bool = False
    option: str | None = None  # one of OPTIONS: what else the call asks for

    def __str__(self) -> str:
        given = ((field, getattr(self, field.name)) for field in fields(self))
        return ", ".join(f"{field.name}={value!r}" for field, value in given if value != field.default)


@dataclass(frozen=True)
class Data:
    """What kernels are run on: queries and keys of each sequence, and the mask's edge."""

    lengths: tuple[tuple[int, int], ...]
    factor: int
    offset: int


@dataclass
class Tensors:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor
    sink: torch.Tensor | None = None


KINDS = [
    Kind(D=64, Hkv=4),
    Kind(D=64, packed=True, deterministic=True),
    Kind(D=96, pack_gqa=False),
    Kind(deterministic=True),
    Kind(Hkv=4, packed=True),
    Kind(Hq=6, Hkv=1, packed=True, pack_gqa=True),
    Kind(Hkv=4, deterministic=True),
    Kind(D=192, Dv=128, Hkv=4),
    Kind(D=192, Dv=128, Hkv=4, packed=True, deterministic=True),
    Kind(D=256, pack_gqa=True),
    Kind(D=256, Hkv=4, packed=True),
]


def thirds_mask_mod() -> Any:
    import cutlass.cute as cute

    @cute.jit
    def thirds(batch, head, q, kv, seqlen_info, aux_tensors):
        return (q + kv) % 3 != 0

    return thirds


def doubling_score_mods() -> tuple[Any, Any]:
    import cutlass.cute as cute

    @cute.jit
    def double(score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
        return score + score

    @cute.jit
    def double_bwd(grad, score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
        return grad + grad

    return double, double_bwd


OPTIONS = ["mask_mod", "score_mod", "softcap", "sink", "seqused", "lists"]
SOFTCAP = 3.0


def make(kind: Kind, lengths: tuple[tuple[int, int], ...], seed: int = 0) -> Tensors:
    torch.manual_seed(seed)
    Dv = kind.Dv or kind.D
    shapes = [(0, kind.Hq, kind.D), (1, kind.Hkv, kind.D), (1, kind.Hkv, Dv), (0, kind.Hq, Dv)]

    def tensor(which: int, heads: int, size: int) -> torch.Tensor:
        tokens = (sum(pair[which] for pair in lengths),) if kind.packed else (len(lengths), lengths[0][which])
        return torch.randn(*tokens, heads, size, dtype=torch.bfloat16, device="cuda")

    x = Tensors(*(tensor(*shape) for shape in shapes))
    if kind.option == "sink":
        x.sink = torch.randn(kind.Hq, dtype=torch.bfloat16, device="cuda")
    return x


def run(kind: Kind, data: Data, x: Tensors, *, times: int = 1) -> Iterator[dict[str, torch.Tensor]]:
    """The kernels' results; what they do not write stays NaN. Backward again for each of `times`."""
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    both: dict[str, Any] = {"causal": True, "compress_factor": data.factor, "compress_offset": data.offset}
    fwd: dict[str, Any] = {"pack_gqa": kind.pack_gqa}
    bwd: dict[str, Any] = {"deterministic": kind.deterministic}
    if kind.packed:
        for which, name in enumerate("qk"):
            ends = accumulate((pair[which] for pair in data.lengths), initial=0)
            both[f"cu_seqlens_{name}"] = torch.tensor([*ends], dtype=torch.int32, device="cuda")
            both[f"max_seqlen_{name}"] = max(pair[which] for pair in data.lengths)
    if kind.option == "seqused":
        used = [T_k for _, T_k in seqused(data)]
        both["seqused_k"] = torch.tensor(used, dtype=torch.int32, device="cuda")
    if kind.option == "mask_mod":
        both["mask_mod"] = thirds_mask_mod()
    if kind.option == "score_mod":
        both["score_mod"], bwd["score_mod_bwd"] = doubling_score_mods()
    if kind.option == "softcap":
        both["softcap"] = SOFTCAP
    if kind.option == "sink":
        both["learnable_sink"] = x.sink
    if kind.option == "lists":
        fwd["block_sparse_tensors"] = forward_lists(lists(kind, data))
        bwd["block_sparse_tensors"] = backward_lists(lists(kind, data))
    o = torch.full_like(x.do, torch.nan)
    o, lse, *_ = _flash_attn_fwd(x.q, x.k, x.v, return_lse=True, out=o, **both, **fwd)
    for _ in range(times):
        grads = [torch.full_like(t, torch.nan) for t in (x.q, x.k, x.v)]
        dq, dk, dv, *dsink = _flash_attn_bwd(
            x.q, x.k, x.v, o, x.do, lse, **both, **bwd, **dict(zip(("dq", "dk", "dv"), grads))
        )
        yield {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv} | ({"dsink": dsink[0]} if dsink else {})


def seqused(data: Data) -> tuple[tuple[int, int], ...]:
    """The lengths of which a call with seqused_k uses so many keys: fewer in every other sequence."""
    return tuple((T_q, max(T_k - 70 * (b % 2), 0)) for b, (T_q, T_k) in enumerate(data.lengths))


def lists(kind: Kind, data: Data) -> Case:
    """A case whose block lists, partial and full ones, the option "lists" takes."""
    (T_q, T_k), B = data.lengths[0], len(data.lengths)
    return Case(D=kind.D, T_q=T_q, T_k=T_k, B=B, Hq=kind.Hq, Hkv=kind.Hkv, lists="both")


def at_most_seen(T: int, factor: int, offset: int) -> int:
    return max((T - 1 - offset) // factor + 1, 0)


def fixed_data() -> list[Data]:
    """Keys below, at and above what is seen; tiles that no query sees; rows that see nothing."""
    edges = [
        (300, 1, 1), (513, 1, 31), (300, 1, -45), (300, 2, 0), (385, 3, 2), (1000, 3, -20), (513, 5, 4), (640, 7, 31),
        (1000, 16, 15), (1000, 16, 31), (777, 60, 59), (2100, 64, 63), (1025, 64, -100), (1500, 96, 0),
        (2100, 1000, 999), (2100, 1024, -1024), (129, 3, 0), (127, 3, 5),
    ]  # fmt: skip
    data = []
    for T, factor, offset in edges:
        seen = at_most_seen(T, factor, offset)
        for T_k in sorted({max(seen - 7, 1), max(seen, 1), seen + 1, seen + 290}):
            data.append(Data(((T, T_k),) * 2, factor, offset))
    # One query; no query sees any key; all queries see all keys.
    data += [Data(((1, 5),) * 2, 4, 0), Data(((1, 5),) * 2, 4, -9), Data(((200, 50),) * 2, 3, 200)]
    data += [Data(((130, 400),) * 2, 1, 200), Data(((200, 300),) * 2, 3, -3000)]
    return data


def packed_data() -> list[Data]:
    lengths = [
        ((300, 18), (1, 1), (513, 40), (64, 3)),
        ((0, 0), (200, 150), (40, 0), (0, 30), (700, 233)),
        ((128, 128), (129, 129), (127, 127), (1, 200)),
        ((1000, 62), (20, 9), (256, 400)),
    ]
    pairs = [(16, 15), (16, 31), (3, 2), (1, 1), (1, -30), (60, -200), (1000, 999), (5, 0)]
    return [Data(each, *pair) for each in lengths for pair in pairs]


def visible(kind: Kind, data: Data, b: int, device: torch.device) -> torch.Tensor:
    T_q, T_k = data.lengths[b]
    t, j = torch.arange(T_q, device=device)[:, None], torch.arange(T_k, device=device)[None, :]
    seen = j * data.factor + data.offset <= t
    if kind.option == "seqused":
        seen = seen & (j < seqused(data)[b][1])
    if kind.option == "lists":
        seen = seen & visible_in_lists(lists(kind, data), b, None, device)[0]
    return seen & ((t + j) % 3 != 0) if kind.option == "mask_mod" else seen


def reference(kind: Kind, data: Data, x: Tensors, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Dense attention under the mask; a row that sees nothing gives o = 0, lse = -inf and no gradient."""
    given = [x.q, x.k, x.v] + ([x.sink] if x.sink is not None else [])
    q, k, v, *sink = leaves = [t.detach().to(dtype).requires_grad_() for t in given]
    os, lses = [], []
    for b, (q_b, k_b, v_b) in enumerate(zip(*(split(kind, data, t, i > 0) for i, t in enumerate((q, k, v))))):
        seen = visible(kind, data, b, q.device)
        k_b, v_b = (t.repeat_interleave(kind.Hq // kind.Hkv, 1) for t in (k_b, v_b))
        scores = torch.einsum("qhd,khd->hqk", q_b, k_b) * kind.D**-0.5
        scores = scores.to(torch.promote_types(dtype, torch.float32))
        if kind.option == "score_mod":
            scores = scores + scores
        if kind.option == "softcap":
            scores = SOFTCAP * (scores / SOFTCAP).tanh()
        # A finite floor, not -inf: its softmax has gradients where a row sees nothing.
        floored = torch.where(seen, scores, -1e30)
        if sink:
            column = sink[0].to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
            floored = torch.cat([floored, column], -1)
        p = floored.softmax(-1)[..., : seen.shape[1]] * seen
        lse = floored.masked_fill(floored == -1e30, -torch.inf).detach().logsumexp(-1)
        os.append(torch.einsum("hqk,khd->qhd", p.to(dtype), v_b))
        lses.append(lse)
    o = torch.cat(os) if kind.packed else torch.stack(os)
    lse = torch.cat(lses, 1) if kind.packed else torch.stack(lses)
    names = ("dq", "dk", "dv", "dsink")
    return {"o": o.detach(), "lse": lse} | dict(zip(names, torch.autograd.grad(o, leaves, x.do.to(dtype))))


def split(kind: Kind, data: Data, t: torch.Tensor, keys: bool) -> list[torch.Tensor]:
    return list(t.split([pair[keys] for pair in data.lengths])) if kind.packed else list(t)


# What fp32 sums in different orders leave of gradients that cancel to 0: those of rows that see one key.
CANCELLED = 1e-4


def assert_data(kind: Kind, data: Data, seed: int = 0) -> None:
    x = make(kind, data.lengths, seed)
    (got,) = run(kind, data, x)
    exact, plain = reference(kind, data, x, torch.float64), reference(kind, data, x, torch.bfloat16)
    lse, true = got.pop("lse"), exact.pop("lse")
    if kind.option == "seqused":
        for b, (_, T_k) in enumerate(seqused(data)):
            got["dk"][b, T_k:] = got["dv"][b, T_k:] = 0  # nobody writes there
    assert lse.isneginf().equal(true.isneginf()), f"rows that see nothing, {kind}, {data}"
    some = ~true.isneginf()
    torch.testing.assert_close(lse[some].double(), true[some], rtol=1e-3, atol=2e-3, msg=f"lse of {kind}, {data}")
    for name, mine in got.items():
        if mine.numel():
            assert_close(f"{name} of {kind}, {data}", mine, exact[name], plain[name].double() + CANCELLED)
    # What sees nothing and what nobody sees is zero to the bit.
    for b, parts in enumerate(zip(*(split(kind, data, got[n], n in ("dk", "dv")) for n in ("o", "dq", "dk", "dv")))):
        seen = visible(kind, data, b, x.q.device)
        for name, part, blind in zip(("o", "dq", "dk", "dv"), parts, [~seen.any(1)] * 2 + [~seen.any(0)] * 2):
            assert not part[blind].any(), f"{name} where nothing is visible, sequence {b} of {kind}, {data}"
