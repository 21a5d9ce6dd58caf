"""Assertions that no later token has a say in what an earlier one gets, forward and backward."""

from __future__ import annotations

from dataclasses import replace

import torch

from nsa_tools.testing.cases import LSES, Backend, Case, make_inputs, run


def assert_forward_causal(case: Case, backend: Backend, t: int, device: torch.device | str = "cpu") -> None:
    """Changing every input of the tokens after t changes no bit of what belongs to the tokens up to t.

    That is o, the LSEs, and the lists of the tiles that start at t or before.

    Raises:
        AssertionError: naming what changed, at which coordinate, with the case ready to paste.
    """
    inputs, other = make_inputs(case, device), make_inputs(replace(case, seed=case.seed + 1), device)
    changed = {}
    for name in ("q", "k", "v", "gates", "k_win", "v_win"):
        x = getattr(inputs, name)
        if x is not None:
            # Large, so that other blocks are chosen wherever later tokens have a say.
            later = x[:, t + 1 :] if name == "gates" else 8 * getattr(other, name)[:, t + 1 :]
            changed[name] = torch.cat([x[:, : t + 1], later], dim=1)
    before, after = run(backend, inputs), run(backend, replace(inputs, **changed))
    tiles = t // case.config.q_tile + 1
    kept = {"o": (before.o[:, : t + 1], after.o[:, : t + 1])}
    kept["block_indices"] = tuple(r.aux.block_indices[:, :tiles] for r in (before, after))
    kept |= {name: tuple(getattr(r.aux, name)[..., : t + 1] for r in (before, after)) for name in LSES}
    for name, (old, new) in kept.items():
        differ = (old != new).nonzero()
        assert not len(differ), f"{name}{differ[0].tolist()} depends on tokens after {t}\n{case!r}"


def assert_backward_causal(case: Case, backend: Backend, t: int, device: torch.device | str = "cpu") -> None:
    """The gradient of o[.. t] with respect to every input of the tokens after t is exactly 0.

    Raises:
        AssertionError: naming the gradient and the coordinate, with the case ready to paste.
    """
    inputs = make_inputs(case, device)
    do = inputs.do.clone()
    do[:, t + 1 :] = 0
    grads = run(backend, replace(inputs, do=do)).grads
    later = dict.fromkeys(("q", "k", "v", "gates", "k_win", "v_win"), t + 1)
    later |= dict.fromkeys(("k_cmp", "v_cmp"), max(0, (t - case.config.offset) // case.config.stride + 1))
    for name, first in later.items():
        if name in grads:
            differ = (grads[name][:, first:] != 0).nonzero()
            assert not len(differ), f"d{name}{differ[0].tolist()} after {t} is not 0\n{case!r}"
