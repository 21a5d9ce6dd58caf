"""Assertions about a backend: above all, its output and gradients against the fp64 reference.

A candidate may err twice as much as the straightforward implementation in the same dtype (the reference run in that
dtype), or as rounding its inputs once more would, plus a rounding term. All three run with the candidate's choice of
blocks, which is checked on its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import torch

from nsa_layer import reference
from nsa_layer.call import accumulation_dtype
from nsa_tools.testing.cases import LSES, Backend, Case, Inputs, Result, make_inputs, run
from nsa_tools.testing.row_oracle import choice_scores


def assert_close_to_reference(
    case: Case, backend: Backend, device: torch.device | str = "cpu", *, block_indices: torch.Tensor | None = None
) -> Result:
    """Compare a backend's output, LSEs, gates and every gradient with the fp64 reference, and its choice of blocks,
    unless lists are given; an error names the tensor and the worst coordinate, with the case ready to paste."""
    inputs = make_inputs(case, device)
    listed = block_indices is not None
    got = run(backend, inputs, block_indices.to(device) if listed else None)
    for name, x in got.tensors().items():
        assert not x.isnan().any(), f"{name} has NaN\n{case!r}"
        assert name in (*LSES, "index_scores") or x.isfinite().all(), f"{name} is not finite\n{case!r}"
    if listed:
        assert torch.equal(got.aux.block_indices.cpu(), block_indices), f"other lists than those given\n{case!r}"
    elif got.aux.block_indices is not None:
        assert_same_choice(inputs, got.aux.block_indices)
    with_choice = partial(run, reference.attend, block_indices=got.aux.block_indices)
    truth = with_choice(inputs.to(torch.float64))
    # Nothing finer than fp64 measures its error: it is that of fp32, scaled. The truth errs as much then, and a largest
    # error of few elements varies by a small factor; eight times is still far below what any wrong term makes.
    double = case.dtype == torch.float64
    straight = with_choice(inputs.to(torch.float32) if double else inputs)
    finer = 8 * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps if double else 1.0
    noise = _noise_of_stored_output(inputs, got.aux.block_indices)
    rounded = cache(partial(_moved_by_rounding, with_choice, inputs, truth))
    for name, exact in truth.tensors().items():
        acc = accumulation_dtype(case.dtype)
        x, dtype = got.tensors()[name], acc if name in (*LSES, "gates", "index_loss", "index_scores") else case.dtype
        assert x.shape == exact.shape, f"{name} has shape {tuple(x.shape)}, not {tuple(exact.shape)}\n{case!r}"
        assert x.dtype == dtype, f"{name} is {x.dtype}, not {dtype}\n{case!r}"
        given = x, straight.tensors()[name], exact
        _assert_close(case, name, *given, finer, noise.get(name, 0.0), lambda name=name: rounded()[name])
    return got


def assert_same_choice(inputs: Inputs, block_indices: torch.Tensor, *, exact: bool = False) -> None:
    """A choice of blocks is well formed, and the reference's own but for blocks within rounding of the n-th best.

    Scores are fp64; "within rounding" is that of the accumulation dtype of the case. exact: no other block at all.
    """
    case, config = inputs.case, inputs.case.config
    width = config.list_width(case.T if case.lengths is None else max(case.lengths))
    assert block_indices.dtype == torch.int32 and block_indices.shape[-1] == width, (
        f"block_indices must be int32 with {width} entries a list, got {block_indices.dtype} "
        f"{tuple(block_indices.shape)}\n{case!r}"
    )
    for number, call in enumerate(inputs.call(block_indices).sequences()):
        if len(call.q):
            scores, allowed = choice_scores(call)
            own = reference.select_blocks(scores, config=config, width=width)
            allowed = torch.full_like(allowed, -1) if exact else allowed  # which not even a tie is within
            assert_sequence_choice(f"{case!r}, sequence {number}", call.block_indices, own, scores, allowed)


def assert_sequence_choice(
    where: str, given: torch.Tensor, own: torch.Tensor, scores: reference.SelectionScores, allowed: torch.Tensor
) -> None:
    """Lists [M, Hs, n] are the reference's own but for blocks whose score is within `allowed` of the last one in."""
    assert given.shape == own.shape, f"block_indices have shape {tuple(given.shape)}, not {tuple(own.shape)}: {where}"
    blocks = torch.arange(scores.values.shape[-1], device=given.device)
    listed, expected = ((x[..., None] == blocks).any(-2) for x in (given, own))
    sorted_again = torch.where(listed, blocks, len(blocks)).sort(-1).values[..., : given.shape[-1]]
    again = torch.full_like(given, -1)
    again[..., : sorted_again.shape[-1]] = sorted_again.masked_fill(sorted_again == len(blocks), -1)
    assert torch.equal(again, given), f"lists are not ascending and padded with -1: {where}\n{given}"
    assert torch.equal(listed.sum(-1), expected.sum(-1)), f"lists of the wrong length: {where}\n{given}\n{own}"
    assert not (scores.forced & ~listed).any(), f"a forced block is missing: {where}\n{given}"
    differ = listed != expected
    if not differ.any():
        return
    free = expected & ~scores.forced
    worst = scores.values.masked_fill(~free, torch.inf).amin(-1, keepdim=True)
    near = differ & ((scores.values - worst).abs() <= allowed)
    far = (differ & ~near).nonzero()
    assert not len(far), (
        f"[tile, head, block] {far[0].tolist()} should {'' if expected[tuple(far[0])] else 'not '}be listed: "
        f"score {scores.values[tuple(far[0])]:.9g}, the last one in has {worst[tuple(far[0][:2])].item():.9g}: {where}"
    )


def _noise_of_stored_output(inputs: Inputs, block_indices: torch.Tensor) -> dict[str, float]:
    """The error of gradients from rounding each branch's output to the dtype of the case before backward uses it.

    ds = p * (dp - delta), and a kernel computes delta = sum(do_i * o_i) from the o_i that it stored, which errs by
    about 0.3 eps * norm(do_i * o_i) however small dp - delta is: where a row sees one key the true ds is 0, and the
    straight implementation's too, so that nothing else measures this. p * e is the gradient of e * LSE, hence the
    backward below, for independent errors e of three times that size.
    """
    case, exact = inputs.case, inputs.to(torch.float64)
    wanted = {name: getattr(exact, name) for name in ("q", "k", "compress_k_weight", "k_cmp", "k_win")}
    wanted = {name: x.detach().requires_grad_() for name, x in wanted.items() if x is not None}
    exact = replace(exact, **wanted)
    branches, *_ = reference.attend_branches(exact.call(block_indices))
    g = reference.gate_values(exact.q, exact.gate_weight, exact.gates).detach()
    generator = torch.Generator().manual_seed(case.seed)
    moved = torch.zeros((), dtype=torch.float64, device=exact.q.device)
    for i, (o_i, lse) in enumerate(branches.values()):
        size = (exact.do * g[..., i, None] * o_i.detach()).norm(dim=-1).mT
        sign = torch.randint(0, 2, size.shape, generator=generator).to(size) * 2 - 1
        moved = moved + (lse.masked_fill(lse == -torch.inf, 0) * size * sign).sum()
    grads = torch.autograd.grad(moved, list(wanted.values()), allow_unused=True, materialize_grads=True)
    eps = torch.finfo(case.dtype).eps
    return {f"d{name}": eps * float(grad.abs().max()) for name, grad in zip(wanted, grads, strict=True) if grad.numel()}


def _moved_by_rounding(run: Callable[[Inputs], Result], inputs: Inputs, truth: Result) -> dict[str, float]:
    """The change of each exact result when all inputs are rounded once more, the larger of two draws.

    The straight implementation's error is one draw of its roundings. Where a tensor holds few numbers that may be a
    tenth of what another order of the same sums makes, so it alone is no measure: of 40 draws of a gradient [3, 3, 3]
    one was off by 1.4 times the limit. Half precision rounds what is stored, by eps / 2; in fp32 each of some four
    steps rounds, which adds up to eps. fp64 is measured like fp32.
    """
    case, exact = inputs.case, inputs.to(torch.float64)
    half = case.dtype in (torch.float16, torch.bfloat16)
    size = torch.finfo(case.dtype).eps / 2 if half else torch.finfo(torch.float32).eps
    given = exact.tensors("do")
    moved = dict.fromkeys(truth.tensors(), 0.0)
    for seed in (case.seed, case.seed + 1):
        generator = torch.Generator().manual_seed(seed)
        signs = {name: torch.randint(0, 2, x.shape, generator=generator).to(x) * 2 - 1 for name, x in given.items()}
        other = run(replace(exact, **{name: x * (1 + size * signs[name]) for name, x in given.items()}))
        for name, x in truth.tensors().items():
            if x.numel():
                apart = (other.tensors()[name] - x).masked_fill(x == -torch.inf, 0).abs()
                moved[name] = max(moved[name], float(apart.max()))
    return moved


def rounding_error(stored: torch.dtype, inputs: torch.dtype, largest: float, *, lse: bool = False) -> float:
    """The error that a tensor in the dtype `stored` may have beside twice the straight implementation's.

    Rounding to the dtype errs by eps / 2 of a value; a gradient is the sum of up to four rounded parts (three branches,
    the gate), and 2 eps of the largest value is that. Sums over tokens are taken in any order in the accumulation
    dtype: 4 eps of that. An LSE is the logarithm of a sum that errs by a part of itself: by eps however near 0 it is.
    """
    eps, acc_eps = torch.finfo(stored).eps, torch.finfo(accumulation_dtype(inputs)).eps
    return (2 * eps + 4 * acc_eps) * largest + lse * eps


def _assert_close(
    case: Case,
    name: str,
    got: torch.Tensor,
    straight: torch.Tensor,
    exact: torch.Tensor,
    finer: float,
    noise: float,
    rounded: Callable[[], float],
) -> None:
    """``rounded`` is asked where twice the straight implementation's error is not enough."""
    if exact.numel() == 0:
        return
    empty = exact == -torch.inf
    assert torch.equal(got == -torch.inf, empty), f"{name}: -inf in the wrong rows\n{case!r}"
    stored = got.dtype
    got, straight, exact = (x.double().masked_fill(empty, 0) for x in (got, straight, exact))
    error, straight_error = (got - exact).abs(), float((straight - exact).abs().max()) * finer
    rounding = rounding_error(stored, case.dtype, float(exact.abs().max()), lse=name in LSES) + noise
    limit = 2 * straight_error + rounding
    worst = int(error.argmax())
    if float(error.flatten()[worst]) <= limit:
        return
    straight_error = max(straight_error, rounded() * finer)
    limit = 2 * straight_error + rounding
    at = [int(i) for i in torch.unravel_index(torch.tensor(worst), error.shape)]
    assert float(error.flatten()[worst]) <= limit, (
        f"{name}{at}: got {got.flatten()[worst]:.9g}, exact {exact.flatten()[worst]:.9g}, "
        f"straight {straight.flatten()[worst]:.9g}; error {error.flatten()[worst]:.3g} > {limit:.3g} = "
        f"2 * {straight_error:.3g} + {rounding:.3g}\n{case!r}"
    )
