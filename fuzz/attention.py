"""One attention call made of a case: its inputs, what the kernels give, straight and through autograd."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fuzz.attention_lists import backward_lists, forward_lists, on_device
from fuzz.blocks import pattern_table
from fuzz.canary import Guarded, untouched
from fuzz.case import Attention
from fuzz.prop import Skip

PAST = 256  # rows and columns of a table past the longest sequence: whole tiles read it
SOFTCAP = 3.0
NAMES = ("o", "lse", "dq", "dk", "dv")
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Inputs:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor
    aux: list[torch.Tensor] | None = None
    cu_seqlens: tuple[torch.Tensor, torch.Tensor] | None = None
    sink: torch.Tensor | None = None


def make_inputs(case: Attention, device: str = "cuda") -> Inputs:
    """Unit normal tensors, from the case's seed; fake ones under FakeTensorMode."""

    def tensor(side: int, heads: int, width: int, scale: float = 1.0) -> torch.Tensor:
        lead = (sum(pair[side] for pair in case.packed),) if case.packed else (case.B, case.lengths[0][side])
        x = torch.randn(*lead, heads, width, dtype=getattr(torch, case.dtype), device=device)
        return laid_out(scale * x, case.layout)

    torch.manual_seed(case.seed)
    Dv, keys = case.Dv or case.D, max(pair[1] for pair in case.lengths)
    q, k = tensor(0, case.Hq, case.D, case.scale), tensor(1, case.Hkv, case.D, case.scale)
    v, do = tensor(1, case.Hkv, Dv), tensor(0, case.Hq, Dv)
    if case.expanded == "batch":
        q, k, v = (x[:1].expand(x.shape) for x in (q, k, v))
    if case.expanded == "heads":
        k, v = (x[..., :1, :].expand(x.shape) for x in (k, v))
    aux = cu_seqlens = sink = None
    if case.mask_mod == "keyed":
        aux = [torch.randint(0, 3, (keys,), dtype=torch.int32, device=device)]
    if case.mask_mod == "table":
        with unset_fake_temporarily():
            table = token_table(case)
        aux = [on_device(table, device)]
    if case.packed:
        starts = ([0, *accumulate(pair[side] for pair in case.packed)] for side in (0, 1))
        cu_seqlens = tuple(torch.tensor(of, dtype=torch.int32, device=device) for of in starts)
    if case.option == "sink":
        sink = torch.randn(case.Hq, dtype=torch.bfloat16, device=device)
    return Inputs(q, k, v, do, aux, cu_seqlens, sink)


def token_table(case: Attention) -> torch.Tensor:
    """Pairs that a mask_mod lets through, int32 [B, queries, keys]: a pattern, and chance past the sequences' ends."""
    longest = [max(pair[side] for pair in case.lengths) + PAST for side in (0, 1)]
    generator, draw = torch.Generator().manual_seed(case.seed), random.Random(case.seed)
    table = torch.rand(len(case.lengths), *longest, generator=generator) < case.density
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


def options(case: Attention, x: Inputs) -> dict[str, Any]:
    """Arguments of forward and backward besides the tensors and the lists."""
    given: dict[str, Any] = {
        "causal": case.causal or case.compress is not None,
        "window_size_left": case.window[0],
        "window_size_right": case.window[1],
        "aux_tensors": x.aux,
    }

    def ints(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=x.q.device)

    if case.mask_mod or case.option == "score_mod":
        from fuzz.mask_mods import MASK_MODS, double

        given |= {"mask_mod": MASK_MODS[case.mask_mod][0]} if case.mask_mod else {"score_mod": double}
    if case.compress is not None:
        given |= dict(zip(("compress_factor", "compress_offset"), case.compress))
    if case.offsets is not None:
        given["q_offset"] = ints(case.offsets)
    if case.option == "seqused":
        given["seqused_k"] = ints(case.used)
    if case.option == "seqused_q":
        given["seqused_q"] = torch.empty(len(case.lengths), dtype=torch.int32, device=x.q.device)
    given |= {"softcap": {"softcap": SOFTCAP}, "sink": {"learnable_sink": x.sink}}.get(case.option, {})
    for side, name in enumerate("qk" if case.packed else ""):
        given |= {f"cu_seqlens_{name}": x.cu_seqlens[side], f"max_seqlen_{name}": max(p[side] for p in case.packed)}
    return given


def outputs(case: Attention, x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensors for o and lse, for backward where no kernel runs."""
    rows = (case.Hq, len(x.q)) if case.packed else (case.B, case.Hq, case.T_q)
    return torch.empty_like(x.do), x.q.new_empty(rows, dtype=torch.float32)


def forward(case: Attention, x: Inputs, lists: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse, from the kernel; `lists` in place of the case's own."""
    from flash_attn.cute.interface import _flash_attn_fwd

    o, lse, *_ = _flash_attn_fwd(
        x.q, x.k, x.v, **options(case, x), intra_wg_overlap=case.overlap, pack_gqa=case.pack_gqa, return_lse=True,
        block_sparse_tensors=forward_lists(case, device=x.q.device) if lists is None else lists,
    )  # fmt: skip
    return o, lse


def backward(
    case: Attention, x: Inputs, o: torch.Tensor, lse: torch.Tensor, lists: Any = None, **more: Any
) -> tuple[torch.Tensor | None, ...]:
    """dq, dk and dv, from the kernel; `lists` in place of the case's own, and `more` arguments."""
    from flash_attn.cute.interface import _flash_attn_bwd

    given = options(case, x) | dict(deterministic=case.deterministic)
    if case.option == "score_mod":
        from fuzz.mask_mods import double_bwd

        given["score_mod_bwd"] = double_bwd
    lists = backward_lists(case, device=x.q.device) if lists is None else lists
    return _flash_attn_bwd(x.q, x.k, x.v, o, x.do, lse, **(given | dict(block_sparse_tensors=lists) | more))


def arguments(case: Attention, x: Inputs, **more: Any) -> dict[str, Any]:
    """Arguments of the public functions besides q, k and v; `more` has lists, if there are any."""
    given = options(case, x) | dict(deterministic=case.deterministic, pack_gqa=case.pack_gqa, return_lse=True) | more
    return given | dict(window_size=(given.pop("window_size_left"), given.pop("window_size_right")))


def attend(case: Attention, x: Inputs, leaves: list[torch.Tensor], **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse of the public function, for leaves in place of q, k and v."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    return (flash_attn_varlen_func if case.packed else flash_attn_func)(*leaves, **arguments(case, x, **more))


def both_lists(case: Attention, device: Any = "cuda") -> dict[str, Any]:
    """Lists of both directions as arguments of the public functions; none where the case has none."""
    if case.lists is None:
        return {}
    lists = (of(case, device=device) for of in (forward_lists, backward_lists))
    return dict(zip(("block_sparse_tensors", "block_sparse_tensors_bwd"), lists))


def attended(case: Attention, x: Inputs, **more: Any) -> Tensors:
    """o, lse, dq, dk and dv of the public function, whose arguments `more` are, by autograd."""
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    o, lse = attend(case, x, leaves, **more)
    return dict(zip(NAMES, (o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, x.do)), strict=True))


def results(case: Attention, x: Inputs, *, times: int = 1) -> list[Tensors]:
    """o, lse, dq, dk and dv, in as many passes as autograd would take, for each of `times`."""
    lists = both_lists(case, x.q.device)
    if case.autograd:
        return [attended(case, x, **lists) for _ in range(times)]
    forwards, backwards = lists.values() if lists else (None, None)
    o, lse = forward(case, x, forwards)
    passes = dict(block_sparse_tensors_fwd=forwards, passes=case.passes) if lists else {}
    grads = [backward(case, x, o, lse, backwards, **passes)[:3] for _ in range(times)]
    return [dict(zip(NAMES, (o, lse, *each))) for each in grads]


def run(case: Attention, x: Inputs, *, times: int = 1) -> list[Tensors]:
    """`results`; what the kernels allocate is NaN before, and guarded; the inputs have to stay as they are."""
    if case.passes == 2 and torch.cuda.get_device_capability()[0] != 9:
        raise Skip
    unchanged = untouched({"q": x.q, "k": x.k, "v": x.v, "do": x.do})
    with Guarded("cuda"):
        found = results(case, x, times=times)
    unchanged()
    return found


def compile_case(case: Attention) -> None:
    """Forward and backward of a case, on fake tensors."""
    x = make_inputs(case)
    o, lse = forward(case, x)
    backward(case, x, o, lse)


def sequences(case: Attention, tensor: torch.Tensor, keys: bool) -> list[torch.Tensor]:
    """The sequences of a batch or a pack, [T, H, D] each."""
    return list(tensor.split([pair[keys] for pair in case.packed])) if case.packed else list(tensor)
