"""The `compile` command, and the calls whose kernels it compiles: a few cover every option of the layer's kernels."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from nsa_layer import support
from nsa_layer.warm_up import lookup
from nsa_layer.warm_up.jobs import ENVIRONMENT
from nsa_tools.commands import compile
from nsa_tools.shape import Shape
from nsa_tools.testing import covering_calls
from nsa_tools.testing.covering_calls import all_calls

ARCHS = sorted(ENVIRONMENT)
CALL = all_calls()[0].signature()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a kernel cache of the test's own."""
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.sweep
@pytest.mark.parametrize("arch", ARCHS)
def test_every_option_compiles(arch: int, cache: Path) -> None:
    kernels = list(compile.compile_for(arch, covering_calls.covering_calls(strength=1), jobs=1))
    assert not {kernel.name: kernel.error for kernel in kernels if kernel.error}
    kinds = {kernel.name.split("/")[0] for kernel in kernels if kernel.seconds}
    assert kinds >= {
        "fwd",
        "bwd",
        "bwd_post",
        "nsa_mean_pool",
        "nsa_block_topk",
        "nsa_gated_sum",
        "nsa_gated_sum_backward",
    }
    assert kinds >= {"nsa_token_topk", "nsa_union_lists", "nsa_token_pairs", "bwd_dkdv"}
    assert len(kernels) == len({kernel.name for kernel in kernels}) == len([*cache.rglob("*.o")])


@pytest.mark.parametrize(("strength", "most"), [(1, 6), (2, 20)])
def test_covering_calls_hold_every_set_of_options(strength: int, most: int) -> None:
    every = covering_calls.combinations()
    chosen = covering_calls.covering(every, strength)
    held, meant = ({part for one in of for part in itertools.combinations(one, strength)} for of in (chosen, every))
    assert held == meant and len(chosen) <= most
    assert len(meant) >= (27 if strength == 1 else 300)


def test_calls_are_distinct_and_kernels_take_them() -> None:
    every = all_calls()
    assert len(set(every)) == len(every) > 1000
    assert {call.config.q_tile for call in every if call.config.deterministic} == {1, 2, 64, 128}
    assert not {support.missing_feature(call.call(), 90) for call in every[::7]} - {None}


def test_failure_is_noted_and_not_the_end(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("fwd/no-such-kernel", "bwd/neither")
    kernels = [lookup.compile_kernel(lookup.Kernel(name, cache / "none.o", CALL)) for name in names]
    assert all(kernel.seconds is None and kernel.error for kernel in kernels)
    compiled, cached = (kernels[0]._replace(error=None, seconds=seconds) for seconds in (1.25, None))
    line = compile.summary({90: [*kernels, compiled, cached]}).splitlines()[-1]
    assert [cell.strip() for cell in line.strip("|").split("|")] == ["sm_90a", "fwd", "1", "1", "1", "1.2"]


def test_it_compiles_the_calls_of_a_shape_and_says_how_long_it_took(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Shape] = []
    monkeypatch.setattr(compile, "compile_for", lambda _, calls, **__: asked.extend(calls) or [])
    assert compile.main(["--seqlen=300", "--arch=90", "--jobs=2", "--compress-weights"]) == 0
    assert [(call.T, "compress_k_weight" in call.tensor_shapes()) for call in asked] == [(300, True)]
    assert re.search(r"^\d+\.\d s, 2 at once$", capsys.readouterr().out, re.MULTILINE)


def test_without_a_cache_it_is_refused(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "0")
    with pytest.raises(SystemExit):
        compile.main(["--seqlen=300", "--arch=90", "--jobs=1"])
    assert "kernels are not kept on disk" in capfd.readouterr().err
