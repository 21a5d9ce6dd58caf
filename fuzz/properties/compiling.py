"""Kernels compile for Hopper and for datacenter Blackwell, whatever is asked of them, on a machine without a GPU."""

from __future__ import annotations

from functools import partial

import torch
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from fuzz import strategies
from fuzz.attention import lists_for, make, options
from fuzz.case import FORMS, Attention, Kind
from fuzz.prop import SM90, SM100, Skip, holds


def compiles(case: Attention) -> None:
    """Forward and backward of a case; tensors have shapes and nothing in them."""
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    call = make(case, "cpu")
    both, lists = options(call), [lists_for(call, backward) for backward in (False, True)]
    with FakeTensorMode():
        q, k, v, do = map(_fake, (call.q, call.k, call.v, call.do))
        both = {name: _fake(value) for name, value in both.items()}
        forward, backward = (None if x is None else type(x)(*map(_fake, x)) for x in lists)
        try:
            pack_gqa = case.kind.pack_gqa
            o, lse, *_ = _flash_attn_fwd(
                q, k, v, **both, block_sparse_tensors=forward, pack_gqa=pack_gqa, return_lse=True
            )
            _flash_attn_bwd(
                q, k, v, o, do, lse, **both, block_sparse_tensors=backward, deterministic=case.kind.deterministic
            )
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
    # Lists of packed sequences bring no lock values here.
    deterministic = draw(st.booleans()) and not (lists and packed)
    kind = Kind(
        D=D,
        Dv=Dv,
        dtype=draw(st.sampled_from(("bfloat16", "float16"))),
        Hq=4,
        Hkv=Hkv,
        packed=packed,
        mask=draw(st.sampled_from(("none", "causal", "window", "compressed", "table"))),
        lists=lists,
        form=form,
        heads=draw(st.sampled_from(("one", "kv", "q"))) if lists else "one",
        block_k=draw(st.sampled_from((64, 128))) if lists and arch == 90 else 128,
        full_lists=draw(st.booleans()) if lists else True,
        deterministic=deterministic,
        plan=lists and not packed and arch == 90 and draw(st.booleans()),
    )
    return draw(strategies.attention(kind))


holds("compiling.sm_90", partial(any_kind, 90), needs=SM90)(compiles)
holds("compiling.sm_100", partial(any_kind, 100), needs=SM100)(compiles)
