"""Kernels compile for Hopper and for datacenter Blackwell, whatever is asked of them, on a machine without a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from fuzz import strategies
from fuzz.attention import make_inputs, results
from fuzz.case import FORMS, Attention
from fuzz.kinds import COMPRESSED, PACKED, WINDOW
from fuzz.prop import SM90, SM100, Skip, holds


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
