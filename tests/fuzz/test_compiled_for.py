"""Data compiles nothing: drawn cases of a kind ask for the kernels that one of them asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import cutlass.cute as cute
import pytest
from cutlass.base_dsl import Arch
from cutlass.base_dsl.dsl import BaseDSL
from hypothesis import HealthCheck, given, settings

from flash_attn.cute import interface
from flash_attn.cute.cache_utils import JITCache
from fuzz import strategies
from fuzz.case import Attention, Kind
from fuzz.kinds import KINDS, passes_by_room
from fuzz.properties.compiling import compiles
from nsa_layer.compile_ahead import ENVIRONMENT

FEW = 8  # kernels of a kind that is cut to fit, of which two or three are for what is around attention
LONG = 300  # more than one block of any kernel
KEPT = ("kind", "window", "launch", "locks", "autograd")  # or whether they are given, which kernels are compiled for


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[set]:
    """The keys of attention kernels that are asked for; none is compiled."""
    for name, value in (ENVIRONMENT[90] | {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0"}).items():
        monkeypatch.setenv(name, value)
    found: set = set()
    keep = JITCache.__setitem__

    def note(cache: JITCache, key: object, kernel: object) -> None:
        found.add(key)
        keep(cache, key, kernel)

    monkeypatch.setattr(JITCache, "__setitem__", note)
    monkeypatch.setattr(BaseDSL, "get_arch_enum", lambda dsl: Arch.sm_90a)  # it looks at the environment once
    monkeypatch.setattr(interface, "_get_device_arch", lambda *given: 90)
    monkeypatch.setattr(cute, "compile", lambda *args, **options: lambda *args, **options: None)
    for function in (interface._flash_attn_fwd, interface._flash_attn_bwd):
        monkeypatch.setattr(function, "compile_cache", JITCache())
    yield found


def long(case: Attention, like: Attention) -> Attention:
    """The case with what kernels are compiled for, and sequences that have several blocks."""
    lengths = tuple((T_q + LONG, T_k + LONG) for T_q, T_k in case.lengths)
    window = tuple(None if given is None else drawn or 0 for given, drawn in zip(like.window, case.window, strict=True))
    kept = {name: getattr(like, name) for name in KEPT} | {"window": window}
    return replace(case, lengths=lengths if len(lengths) > 1 else lengths * 2, **kept)


def cut_to_fit(kind: Kind) -> bool:
    """True if kernels depend on the sizes: on how queries are shared out, or how many heads a CTA of backward walks."""
    return not kind.lists and (kind.mask == "compressed" or kind.mask == "window" and kind.Hq > kind.Hkv)


SOME = [pytest.param(kind, marks=pytest.mark.sweep if n % 4 else ()) for n, kind in enumerate(KINDS)]


@pytest.mark.parametrize("kind", SOME, ids=repr)
def test_data_compiles_nothing(kind: Kind, keys: set) -> None:
    like = Attention(kind=kind, window=(100, None), factor=16, offset=15, launch="left to right")
    for passes in (1, 2) if passes_by_room(kind) else (kind.passes,):
        compiles(long(like, replace(like, kind=replace(kind, passes=passes))))
    first = set(keys)
    assert first

    @settings(max_examples=6, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(strategies.attention(kind))
    def draw(case: Attention) -> None:
        compiles(long(case, like))
        assert keys == first or cut_to_fit(kind), f"{case} asks for another kernel"

    draw()
    assert len(keys) <= FEW
