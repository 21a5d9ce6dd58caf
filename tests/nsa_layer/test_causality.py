"""A rule that looks ahead is seen to; that others do not is a property of `fuzz/properties/layer.py`."""

from __future__ import annotations

import pytest

from fuzz.properties.layer import assert_backward_causal, assert_forward_causal
from nsa_layer import NSAConfig
from nsa_tools.testing.cases import Case

SMALL = NSAConfig(block_size=16, block_counts=4, q_tile=64, window_size=24)


@pytest.mark.parametrize("backend", ["eager", "reference"])
def test_offset_0_leaks_through_compressed_keys(backend: str) -> None:
    """The rule ``j <= t // l`` shows a block to the query that opens it: its later tokens are in the mean."""
    for gate in ("cmp", "weight"):
        case = Case(B=2, T=150, D=8, config=SMALL.replace(compress_offset=0), gate=gate)
        with pytest.raises(AssertionError, match=r"^o\[.* depends on tokens after 40"):
            assert_forward_causal(case, backend, 40)
        with pytest.raises(AssertionError, match=r"^dk\[.* after 40 is not 0"):
            assert_backward_causal(case, backend, 40)
    # The token before a block opens sees whole blocks only, and one token of slack is one token of leak.
    assert_forward_causal(case, backend, 47)
    almost = Case(T=150, D=8, config=SMALL.replace(compress_offset=14), gate="cmp")
    assert_forward_causal(almost, backend, 45)
    with pytest.raises(AssertionError, match="depends on tokens after 46"):
        assert_forward_causal(almost, backend, 46)


@pytest.mark.parametrize("backend", ["eager", "reference"])
def test_the_seeds_rule_leaks_through_the_choice(backend: str) -> None:
    """The mean over a tile's own queries lets its later queries choose for its earlier ones."""
    config = NSAConfig.seed(block_size=16, block_counts=5, q_tile=64, window_size=24)
    for gate in ("slc", "weight"):
        with pytest.raises(AssertionError, match=r"^(o|block_indices)\[.* depends on tokens after 128"):
            assert_forward_causal(Case(B=2, T=150, D=8, config=config, gate=gate), backend, 128)
    # At the end of a tile nothing is left that could leak: the fault is the choice, not the mask.
    assert_forward_causal(Case(B=2, T=150, D=8, config=config, gate="slc"), backend, 127)
