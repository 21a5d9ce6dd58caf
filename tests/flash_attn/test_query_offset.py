"""q_offset: queries that are a range of a longer context, under the compressed-causal mask, windows and plain causal.

A call knows of each sequence's offset on the device alone.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from fa_compile import Worker, compile_backward, compile_forward, kernel_fields, swept
from fa_compress import FIXED
from fa_reference import assert_case

from fuzz.attention import compile_case
from fuzz.case import Attention as Case

SIZES = dict(T_q=300, T_k=1000, offsets=(0, 611))
PACKED = dict(packed=((300, 300), (1, 700), (0, 50), (257, 900)), offsets=(0, 699, 20, 311))
KINDS = [
    replace(FIXED, D=128, Hq=8, offsets=(0, 0)),
    replace(FIXED, Hkv=4, packed=((1, 1),), offsets=(0,)),
    Case(D=128, Hq=8, window=(127, 0), **SIZES),
    Case(window=(100, 60), **PACKED),
    replace(FIXED, D=64, Hkv=4, deterministic=True, offsets=(0, 0)),
    Case(Hkv=4, window=(511, 0), deterministic=True, **SIZES),
    replace(FIXED, D=96, pack_gqa=True, packed=((1, 1),), offsets=(0,)),
    Case(D=128, Hq=6, Hkv=1, window=(511, 0), deterministic=True, **PACKED),
    Case(D=128, causal=True, **SIZES),
    Case(Hkv=4, causal=True, deterministic=True, **PACKED),
]


def with_edges(kind: Case) -> Iterator[Case]:
    """Calls that are compiled as `kind` is."""
    if kind.compress is None:
        yield kind
        if not kind.packed:
            # One query; queries past the last key; keys past what the last query sees, by many tiles and by one.
            for T_q, T_k, offsets in [
                (1, 513, (512, 3)),
                (200, 150, (40, 149)),
                (129, 2000, (77, 1000)),
                (65, 64, (0, 1)),
            ]:
                yield replace(kind, T_q=T_q, T_k=T_k, offsets=offsets, seed=T_q)
        return
    pairs = [(64, 63), (16, 31), (3, -20), (1, 0), (1000, 999)]
    for seed, compress in enumerate(pairs):
        T_k = 5000 // compress[0] + 3
        if kind.packed:
            lengths = ((300, T_k), (1, T_k), (0, 7), (513, T_k // 2), (64, 0))
            yield replace(kind, packed=lengths, compress=compress, offsets=(0, 4999, 3, 1717, 90), seed=seed)
        else:
            for T_q, offsets in [(700, (0, 4300)), (1, (62, 4999)), (128, (1000, 1))]:
                yield replace(kind, T_q=T_q, T_k=T_k, compress=compress, offsets=offsets, seed=seed)


@pytest.mark.parametrize("kind", swept(KINDS, 5), ids=str)
def test_compiles(compiler: Worker, kind: Case) -> None:
    compiler.trace(compile_case, next(with_edges(kind)))


def test_offsets_share_kernels(compiler_sm90: Worker) -> None:
    """Those of a call without any are others."""
    first, second, without = (Case(window=(127, 0), T_q=300, T_k=1000, offsets=of) for of in ((0, 0), (300, 17), None))
    for compile_ in (compile_forward, compile_backward):
        alone, both, apart = (
            len(compiler_sm90.trace(kernel_fields, "", compile_, *calls, kind="Flash"))
            for calls in ([first], [first, second], [first, without])
        )
        assert (both, apart) == (alone, alone + 1)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_numbers(kind: Case) -> None:
    for case in with_edges(kind):
        assert_case(case)
