"""SM90 forward whose CTAs loop over many tiles: which calls have it, and that no bit of a result depends on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from fa_cases import Case, forward, make_inputs
from fa_compile import built_kernels

from fuzz.canary import Guarded


def stages(case: Case) -> int:
    """Stages of keys and values, beside two tiles of queries, of a forward kernel whose tiles overlap; else 0."""
    with built_kernels("FlashAttentionForwardSm90") as kernels:
        forward(case, make_inputs(case))
    return kernels[0].num_stages if kernels[0].overlap_tiles else 0


@contextmanager
def one_cta_a_tile() -> Iterator[None]:
    from flash_attn.cute import interface

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interface.persistence, "overlapped_stages", lambda *_, **__: 0)
        yield


def assert_same_bits(call: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse of a call, which are those of a CTA to each tile: all of it is written, every time."""
    with one_cta_a_tile():
        expected = call()
    assert expected[0].isfinite().all() and not expected[1].isnan().any()
    for _ in range(3):
        with Guarded("cuda"):
            got = call()
            torch.cuda.synchronize()
        assert all(map(torch.equal, got, expected))
    return expected
