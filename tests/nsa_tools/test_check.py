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
OVERLAPPING = CONFIG.replace(q_tile=1, compress_size=4, compress_stride=2)
DTYPES = (torch.bfloat16, torch.float32, torch.float64)
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


BY_TOKEN = CONFIG.replace(q_tile=1)
RIGHT = [dict(dtype=dtype, gate=gate) for dtype in DTYPES for gate in ("weight", "none")]
RIGHT += [dict(dtype=dtype, config=OVERLAPPING) for dtype in DTYPES[:2]]
RIGHT += [
    dict(config=config.replace(**changes))
    for config in (CONFIG, BY_TOKEN)
    for changes in (dict(init_blocks=0, local_blocks=0), dict(init_blocks=2, local_blocks=4), dict(window_size=0))
]
BY_INDEX = BY_TOKEN.replace(rule="index", branches=("selected",))
RIGHT += [
    dict(config=BY_INDEX, gate="none", index_dim=Di, one_key=one_key, dtype=dtype)
    for Di, one_key, dtype in ((16, False, DTYPES[0]), (32, True, DTYPES[1]))
]
RIGHT += [dict(B=2, T=100), dict(lengths=(90, 1, 200, 9)), dict(backward=False)]


@pytest.mark.parametrize("changes", RIGHT, ids=str)
def test_right_calls_pass(changes: dict[str, object]) -> None:
    found = outcome(**changes)
    assert all(verdict.ok for verdict in found.values()), found
    names = ["choice", "o", "lse"] + ["row sums", "dq", "dk", "dv"] * changes.get("backward", True)
    sequences = min(sampled_check.SEQUENCES, len(changes.get("lengths", ())) or changes.get("B", 1))
    if sequences == 1:
        assert list(found) == names + ["d_gate_weight"] * ("dv" in names and changes.get("gate") != "none")
    else:
        assert {f"{name} [{i}]" for name in names for i in range(sequences)} <= found.keys()


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


def neighbours_block(o: torch.Tensor, aux: Aux) -> tuple:
    return o, replace(aux, block_indices=aux.block_indices.roll(1, 1))


def other_lse(o: torch.Tensor, aux: Aux) -> tuple:
    lse = aux.lse_slc.clone()
    lse[0, 2, 199] += 0.5
    return o, replace(aux, lse_slc=lse)


@pytest.mark.parametrize(
    ("change", "name", "at", "config"),
    [(other_row, "o", 222, CONFIG), (not_a_number, "o", 7, CONFIG), (other_lse, "lse", 199, CONFIG)]
    + [(other_block, "choice", None, CONFIG), (neighbours_block, "choice", None, OVERLAPPING)],
)
def test_what_is_wrong_is_found(change, name: str, at: int | None, config: NSAConfig) -> None:
    def attend(*args, return_aux: bool = False, **options):
        o, aux = nsa(*args, return_aux=True, **options)
        if return_aux:  # the call that is checked, not those that its row sums are made of
            o, aux = change(o, aux)
        return (o, aux) if return_aux else o

    found = outcome(attend, backward=False, config=config)
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
