"""The `check` command passes right calls, and finds one wrong row, key or list in a long one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import TINY

from nsa_layer import NSAConfig, nsa
from nsa_layer.call import Aux
from nsa_tools.commands.check import main
from nsa_tools.shape import Shape, long_tailed
from nsa_tools.testing import sampled_check
from nsa_tools.testing.sampled_check import Samples, Verdict

CONFIG = NSAConfig(block_size=8, block_counts=4, q_tile=16, window_size=11)
SHAPE = Shape(B=1, T=300, Hq=4, Hkv=2, D=16, Dv=16, dtype=torch.bfloat16, device="cpu", config=CONFIG)
ALL = Samples(rows=1000, keys=1000, tiles=1000)


class _Wrong(torch.autograd.Function):
    """The identity, whose gradient is wrong at one token."""

    @staticmethod
    def forward(ctx, x, token):
        ctx.token = token
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        dx = dx.clone()
        dx[:, ctx.token] *= 1.25
        return dx, None


def outcome(attend=nsa, **changes: object) -> dict[str, Verdict]:
    """The verdicts on every row, key and tile of a call of `SHAPE`, with some changes."""
    report = sampled_check.check(replace(SHAPE, **changes), "eager", attend=attend, samples=ALL)
    return {v.name: v for v in report.verdicts}


def test_a_choice_by_token_passes_and_its_neighbours_does_not() -> None:
    config = CONFIG.replace(q_tile=1, compress_size=4, compress_stride=2)

    def attend(*args, return_aux: bool = False, **options):
        o, aux = nsa(*args, return_aux=True, **options)
        aux = replace(aux, block_indices=aux.block_indices.roll(1, 1))
        return (o, aux) if return_aux else o

    for dtype in (torch.bfloat16, torch.float32):
        found = outcome(config=config, dtype=dtype)
        assert all(verdict.ok for verdict in found.values()), found
    assert not outcome(attend, config=config, backward=False)["choice"].ok


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_right_calls_pass(dtype: torch.dtype, gated: bool) -> None:
    found = outcome(dtype=dtype, gate="weight" if gated else "none")
    assert all(verdict.ok for verdict in found.values()), found
    names = ["choice", "o", "lse", "row sums", "dq", "dk", "dv"] + ["d_gate_weight"] * gated
    assert list(found) == names
    assert list(outcome(backward=False)) == ["choice", "o", "lse"]


FORCED = [dict(init_blocks=0, local_blocks=0), dict(init_blocks=2, local_blocks=4), dict(window_size=0)]


@pytest.mark.parametrize("changes", FORCED, ids=str)
@pytest.mark.parametrize("q_tile", [1, 16])
def test_right_calls_of_other_options_pass(q_tile: int, changes: dict[str, int]) -> None:
    found = outcome(config=CONFIG.replace(q_tile=q_tile, **changes))
    assert all(verdict.ok for verdict in found.values()), found


def test_sequences_of_a_batch_and_of_a_pack_are_told_apart() -> None:
    found = outcome(B=2, T=100)
    assert all(v.ok for v in found.values()) and {"o [0]", "dk [1]"} <= found.keys()
    found = outcome(lengths=(90, 1, 200, 9))
    assert all(v.ok for v in found.values()) and {"dq [0]", "dv [1]", "choice [2]"} <= found.keys()


@pytest.mark.parametrize(("name", "tensor", "token"), [("dq", "q", 277), ("dk", "k", 150), ("dv", "v", 3)])
def test_a_gradient_that_is_wrong_at_one_token_is_found(name: str, tensor: str, token: int) -> None:
    def attend(*args, **options):
        options |= dict(zip("qkv", args))
        return nsa(**options | {tensor: _Wrong.apply(options[tensor], token)})

    found = outcome(attend)
    assert [verdict.name for verdict in found.values() if not verdict.ok] == [name]
    assert found[name].at == token


def other_row(o: torch.Tensor, aux: Aux) -> tuple:
    return o * torch.where(torch.arange(o.shape[1]) == 222, 1.1, 1.0)[:, None, None].to(o.dtype), aux


def not_a_number(o: torch.Tensor, aux: Aux) -> tuple:
    return torch.where(torch.arange(o.shape[1])[:, None, None] == 7, torch.nan, o), aux


def other_block(o: torch.Tensor, aux: Aux) -> tuple:
    lists = aux.block_indices.clone()
    lists[0, 15, 1, 0] = -1 if 0 not in lists[0, 15, 1].tolist() else 1
    return o, replace(aux, block_indices=lists)


def other_lse(o: torch.Tensor, aux: Aux) -> tuple:
    lse = aux.lse_slc.clone()
    lse[0, 2, 199] += 0.5
    return o, replace(aux, lse_slc=lse)


@pytest.mark.parametrize(
    ("change", "name", "at"),
    [(other_row, "o", 222), (not_a_number, "o", 7), (other_lse, "lse", 199), (other_block, "choice", None)],
)
def test_what_is_wrong_is_found(change, name: str, at: int | None) -> None:
    def attend(*args, return_aux: bool = False, **options):
        o, aux = nsa(*args, return_aux=True, **options)
        if return_aux:  # the call that is checked, not those that its row sums are made of
            o, aux = change(o, aux)
        return (o, aux) if return_aux else o

    found = outcome(attend, backward=False)
    if name == "choice":
        assert not found[name].ok and found[name].note
        return
    assert [verdict.name for verdict in found.values() if not verdict.ok] == [name] and found[name].at == at
    assert change is not not_a_number or found[name].error == float("inf")


def test_samples_cover_the_length_and_the_borders_of_32_bits() -> None:
    T, elements = 1 << 22, 4096
    tokens = sampled_check._sample(T, 64, elements, seed=0).tolist()
    assert tokens == sorted(set(tokens)) and {0, T - 1} <= set(tokens) and len(tokens) <= 64
    assert {(1 << 31) // elements - 1, (1 << 31) // elements, (1 << 33) // elements} <= set(tokens)
    assert max(b - a for a, b in zip(tokens, tokens[1:])) < 4 * T // 64
    assert sampled_check._sample(5, 64, elements, seed=0).tolist() == [0, 1, 2, 3, 4]


def test_lengths_of_a_pack_are_long_tailed_and_always_the_same() -> None:
    lengths = long_tailed(65536, 16)
    assert sum(lengths) == 65536 and min(lengths) >= 1 and lengths == long_tailed(65536, 16)
    assert max(lengths) > 4 * sorted(lengths)[8]
    assert long_tailed(3, 3) == (1, 1, 1)
    with pytest.raises(ValueError, match="at most the 3 tokens"):
        long_tailed(3, 4)


def test_the_command_prints_and_writes_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "check.json"
    assert main([*TINY, "--seqlen", "200", "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "| dk " in shown and shown.rstrip().endswith("passed")
    (report,) = json.loads(file.read_text())
    assert report["ok"] and {v["name"] for v in report["verdicts"]} >= {"o", "dq", "dk", "dv"}


@pytest.mark.gpu
@pytest.mark.parametrize("extra", [[], ["--packed=5"], ["--ungated", "--shape=B", "--seqlen=8193"], ["--mode=forward"]])
def test_the_kernels_pass(extra: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seqlen=5000", "--rows=64", *extra]) == 0, capsys.readouterr().out
    assert "peak, inputs included" in capsys.readouterr().out
