"""The kernels of the index' loss: its sums and gradients are those of PyTorch in fp64."""

# What runs in a worker is imported there, so nothing up here may ask for the kernels.
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from fa_compile import shared_worker
from test_select_blocks import BY_INDEX, VARIANTS, Ranges, changed, traced_layer

from nsa_layer import reference, support
from nsa_layer.call import Call, Saved
from nsa_layer.checks import starts_of_lengths
from nsa_layer.cute.memory_plan import MemoryPlan
from nsa_layer.eager import forward as eager_forward
from nsa_layer.eager import index as eager_index
from nsa_tools.testing.cases import make_inputs

Tensor = torch.Tensor


def forward_code() -> list[tuple[list[int], bool]]:
    """Stack frames of attention that writes sums of blocks, and whether its products wait for one another."""
    from fa_cubin import machine_code

    return [(code.stack, code.serialized) for code in machine_code(traced_layer, "batch", kind="fwd_sm90")]


@pytest.mark.sweep
@pytest.mark.xdist_group("sm_90")
def test_sums_of_blocks_fit_the_registers() -> None:
    assert shared_worker("sm_90").run(forward_code) == [([0], False)]


TENSORS = ("q", "k", "v", "q_index", "k_index")


def call_of(name: str, *, integers: bool = False, G: int = 4, ranges: Ranges | None = None, **changes: object) -> Call:
    """A call with the loss of a variant of `test_select_blocks`; of some queries alone with `ranges`."""
    variant = changed(VARIANTS[f"index: {name}"], D=64, G=G, **changes)
    case = replace(variant, index_loss=True, integers=integers)
    inputs, spec, positions = make_inputs(case, "cuda"), case.spec, {}
    tensors = {name: getattr(inputs, name) for name in TENSORS}
    if ranges is not None:
        sizes = tuple(end - first for first, end in ranges)
        for of in ("q", "q_index"):
            parts = [x[first:end] for x, (first, end) in zip(tensors[of].split(case.lengths), ranges)]
            tensors[of] = torch.cat(parts)
        offsets = torch.tensor([first for first, _ in ranges]).int().cuda()
        positions = dict(q_offset=offsets, cu_seqlens=starts_of_lengths(sizes, "cuda"), cu_seqlens_k=inputs.cu_seqlens)
        spec = replace(spec, lengths=sizes, lengths_k=case.lengths)
    return Call(**tensors, **dict(cu_seqlens=inputs.cu_seqlens) | positions, spec=spec)


def by_kernels(call: Call, rows: slice = slice(None)) -> tuple[Tensor, Saved, tuple[Tensor, ...]]:
    """o, what is saved, and gradients of 0.7 times the numerator of some rows, of q_index and k_index."""
    from nsa_layer.cute.backend import backward, forward

    how = dict(plan=MemoryPlan(((0, call.k.shape[-2]),), (False,) * 3))
    o, saved = forward(call, **how)
    dz = torch.zeros_like(saved.index_dz)
    dz[:, rows] = saved.index_dz[:, rows]
    of_rows = saved if rows == slice(None) else saved._replace(index_dz=dz)
    d_sums = torch.tensor([0.7, 9.0], device=o.device)
    return o, saved, backward(call, of_rows, torch.zeros_like(o), o=o, d_sums=d_sums, **how)[-2:]


def in_pytorch(call: Call, saved: Saved) -> tuple[Saved, Tensor, tuple[Tensor, ...]]:
    """What is saved in fp64, by the kernels' lists and log-sum-exps; free blocks; and gradients."""
    exact = call._replace(block_indices=saved.block_indices).map(Tensor.double, TENSORS)
    begin, found, grads = 0, [], []
    for batch, offset, _ in eager_forward.batches(exact):
        lists, end = batch.block_indices, begin + batch.q.shape[1]
        lse = saved.lse_slc.mT.double()
        of = eager_forward.saved_of_index(batch, lists, lse[None, begin:end] if call.packed else lse, offset)
        t = torch.arange(batch.q.shape[1], device=lists.device)[:, None] + offset
        free = eager_index.is_free(lists, t, call.config)
        d = torch.tensor(0.7 * call.spec.index_scale)
        grads.append(eager_index.loss_backward(d, *batch.index, of["index_dz"], of["index_tokens"].long()))
        found.append((of["index_dz"], free, of["index_sums"]))
        begin = end

    def joined(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([x[0] for x in parts]) if call.packed else torch.cat([*parts])

    dz, free, sums = zip(*found)
    exact = Saved(index_dz=joined(dz), index_sums=torch.stack(sums).sum(0))
    return exact, joined(free), tuple(map(joined, zip(*grads)))


def assert_loss(call: Call, *, exact: bool) -> None:
    """Sums and gradients; twice the same bits. exact: scores are."""
    results = by_kernels(call), by_kernels(call)
    bits = [[x for x in (o, *saved, *grads) if x is not None] for o, saved, grads in results]
    assert all(map(torch.equal, *bits))
    _, saved, grads = results[0]
    expected, free, of_exact = in_pytorch(call, saved)
    close = partial(torch.testing.assert_close, check_dtype=False)
    close(saved.index_dz, expected.index_dz, rtol=1e-4, atol=1e-6)
    close(saved.index_sums, expected.index_sums, rtol=1e-4, atol=1e-4)
    assert bool(free.any()) == bool(saved.index_sums[1] > 0)
    assert any(bool(x.any()) for x in grads) == bool((free.sum(-1) > 1).any())  # one free block has no gradient
    for x, y in zip(grads, of_exact):
        # A tie within rounding goes to another token.
        wrong = ((x - y).abs() > 0.01 * y.abs() + 2e-3 * y.abs().amax()).any(-1)
        assert wrong.sum() <= (0 if exact else 2 + 1e-3 * wrong.numel())


@pytest.mark.gpu
@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("name", BY_INDEX)
def test_loss(name: str) -> None:
    """Loss and gradients, for integers, whose scores are exact and tie often, and for real numbers."""
    size = BY_INDEX[name].get("block_size", 64)
    options = dict(G={16: 4, 32: 2}.get(size, (1, 3, 4, 16)[len(name) % 4]))
    if name == "packed, last queries":
        options["ranges"] = [(1900, 2000), (2, 5), (64, 65), (0, 700)]
    assert_loss(call_of(name, integers=True, **options), exact=True)
    assert_loss(call_of(name, **options), exact=False)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 63, 65, 129, 300])
def test_loss_of_few_tokens(T: int) -> None:
    assert_loss(call_of("unforced", integers=True, T=T, block_counts=4), exact=True)


@pytest.mark.gpu
def test_loss_of_earlier_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later tokens change no bit of gradients of scores, or rows of the loss, and have no gradient of these."""
    from nsa_layer.cute import index_loss

    call, results, launched = call_of("unforced"), [], index_loss.launch
    for T in (1000, 999, 517, 64):
        later, rows = call.map(lambda x: torch.cat([x[:, :T], 9 * x[:, T:] + 1], 1), TENSORS), []

        def noted(name: str, *args: object, rows: list = rows) -> None:
            launched(name, *args)
            rows += [args[-2]] if name == "index_loss" else []

        monkeypatch.setattr(index_loss, "launch", noted)
        o, saved, grads = by_kernels(later, slice(T))
        results.append((o, saved.block_indices, saved.index_dz, *rows[0].unbind()))
        assert all(torch.equal(x[:, :T], y[:, :T]) for x, y in zip(results[0], results[-1], strict=True))
        assert not any(x[:, T:].any() for x in grads)
        assert all(bool(x.any()) == (T > 64) for x in grads)  # one free block has no gradient


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["default", "packed, unforced"])
def test_scores_are_those_of_the_definition_and_need_no_loss(name: str) -> None:
    call = call_of(name, integers=True).with_scores(True)
    saved = by_kernels(call)[1]
    alone = call._replace(spec=replace(call.spec, index_loss=False))
    backend, plan = support.backend_module("cute"), MemoryPlan(((0, call.k.shape[-2]),), (False,) * 3)
    without = backend.forward(alone, plan=plan)[1]
    assert without.index_dz is without.index_sums is None and without.index_scores.equal(saved.index_scores)
    exact = call._replace(block_indices=saved.block_indices).map(Tensor.double, TENSORS)
    torch.testing.assert_close(saved.index_scores, reference.attend(exact)[1].index_scores.float())
    without = backend.forward(alone._replace(spec=replace(alone.spec, index_scores=False)), plan=plan)[1]
    assert without.index_scores is None


@pytest.mark.gpu
def test_loss_by_products_of_warps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As SM100 makes them."""
    from flash_attn.cute.mma import form

    monkeypatch.setattr(form, "FORCED", True)
    test_loss("default")
    test_loss("packed, unforced")
