"""Kernels compile for Hopper and for datacenter Blackwell, whatever is asked of them, on a machine without a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from fuzz import strategies
from fuzz.attention import called, lists_for, make, options
from fuzz.case import FORMS, Attention, Kind
from fuzz.prop import SM90, SM100, Skip, holds


def compiles(case: Attention) -> None:
    """Forward and backward of a case; tensors have shapes and nothing in them."""
    call = make(replace(case, autograd=False), "cpu")  # autograd asks fake tensors for their GPU
    both, lists = options(call), [lists_for(call, backward) for backward in (False, True)]
    with FakeTensorMode():
        call = replace(call, **{name: _fake(getattr(call, name)) for name in ("q", "k", "v", "do")})
        both = {name: _fake(value) for name, value in both.items()}
        try:
            called(call, both, *(None if x is None else type(x)(*map(_fake, x)) for x in lists))
        except NotImplementedError:
            raise Skip from None


def _fake(value: object) -> object:
    if isinstance(value, list):
        return [_fake(each) for each in value]
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")


@st.composite
def any_kind(draw: st.DrawFn, arch: int) -> Attention:
    """Every combination of features that one of the kernels may be asked for."""
    D, Dv = draw(st.sampled_from(((64, None), (128, None), (96, None), (192, 128))))
    Hkv = draw(st.sampled_from((1, 2, 4))) if Dv is None else 4  # heads share keys only where v is as wide as they are
    lists = D in (64, 128) and draw(st.booleans())
    packed = draw(st.booleans())
    form = draw(st.sampled_from(FORMS)) if lists and packed else "padded"
    mask = draw(st.sampled_from(("none", "causal", "window", "compressed", "table")))
    block_q = draw(st.sampled_from((64, 128, 192, 256) if arch == 90 else (128, 256, 384))) if lists else 128
    deterministic = draw(st.booleans())
    heads = draw(st.sampled_from(("one", "kv", "q", "all"))) if lists else "one"
    plans = form != "padded" if packed else heads != "all"  # a plan is of every sequence's lists
    passes: tuple[int | None, ...] = (None,)
    if lists and arch == 90:
        two = mask != "compressed" and block_q % 128 == 0
        passes = (None, 1, *((2,) if two else ()))
    kind = Kind(
        D=D,
        Dv=Dv,
        dtype=draw(st.sampled_from(("bfloat16", "float16"))),
        Hq=4,
        Hkv=Hkv,
        packed=packed,
        mask=mask,
        lists=lists,
        form=form,
        heads=heads,
        block_q=block_q,
        block_k=draw(st.sampled_from((64, 128))) if lists and arch == 90 else 128,
        full_lists=draw(st.booleans()) if lists else True,
        deterministic=deterministic,
        plan=lists and plans and draw(st.booleans()),
        passes=draw(st.sampled_from(passes)),
        expanded=draw(st.sampled_from(("", "batch", "heads") if not packed else ("", "heads"))),
    )
    return draw(strategies.attention(kind))


holds("compiling.sm_90", partial(any_kind, 90), needs=SM90)(compiles)
holds("compiling.sm_100", partial(any_kind, 100), needs=SM100)(compiles)
