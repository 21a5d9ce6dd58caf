"""Ranks that share sequences give what one process gives, in fp64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rank_cases import (
    CLOSE,
    INDEX,
    MODES,
    OVERLAPPING,
    RANKS,
    SMALL,
    OnRanks,
    by_ranks,
    compare,
    compare_recorded,
    compare_steps,
    in_steps,
    part_of,
    step,
)

from nsa_layer import ContextParallel, NSAConfig, NSAttention, nsa, selected_attention, shard_sequence, unshard_sequence
from nsa_layer.config import BRANCHES
from nsa_layer.rope import RotaryEmbedding
from nsa_tools.testing.cases import OWN_KEYS, Case, make_inputs

CASES = {
    "batch": (Case(B=2, T=96, config=SMALL), MODES),
    "overlapping": (Case(T=80, Hq=8, Hkv=4, config=OVERLAPPING, compress_weights=True), MODES),
    "packed": (Case(lengths=(40, 0, 3, 53), config=SMALL, gate="given"), MODES),
    "packed, overlapping": (Case(lengths=(40, 1, 3, 52), config=OVERLAPPING, compress_weights=True), MODES),
    "not causal": (Case(B=2, T=80, config=OVERLAPPING, causal=False, gate="none"), MODES),
    "not causal, packed": (Case(lengths=(30, 50), config=SMALL, causal=False, own_keys=("k_win",)), MODES),
    "own keys": (Case(B=2, T=80, config=OVERLAPPING, own_keys=OWN_KEYS), MODES),
    "own keys, packed": (Case(lengths=(40, 0, 3, 53), config=SMALL, own_keys=OWN_KEYS), MODES),
    "one head": (Case(T=64, Hq=3, Hkv=1, config=SMALL), ("gather",)),
    "no window": (Case(B=2, T=80, config=OVERLAPPING.replace(window_size=0), gate="given"), MODES),
    "no window, packed": (Case(lengths=(40, 0, 3, 53), config=SMALL.replace(window_size=0)), MODES),
    "nothing forced": (Case(T=80, config=OVERLAPPING.replace(init_blocks=0, local_blocks=0)), MODES),
    "more forced": (Case(lengths=(30, 50), config=SMALL.replace(init_blocks=2, local_blocks=1)), MODES),
    "blocks seen early": (Case(lengths=(30, 50), config=OVERLAPPING.replace(compress_offset=0)), MODES),
    "index": (Case(B=2, T=96, config=INDEX, gate="none", index_dim=4), MODES),
    "index, one key, packed": (
        Case(lengths=(40, 0, 3, 53), config=INDEX, gate="none", index_dim=6, one_key=True),
        MODES,
    ),
    "index, all branches": (Case(T=80, config=INDEX.replace(branches=BRANCHES), index_dim=4, one_key=True), MODES),
    "index, window, packed": (Case(lengths=(30, 50), config=INDEX.replace(branches=BRANCHES[1:]), index_dim=4), MODES),
    "no loss": (Case(T=80, config=INDEX, gate="none", index_dim=4, index_loss=False), MODES),
    "no selected branch": (Case(lengths=(30, 50), config=SMALL.replace(branches=BRANCHES[::2])), MODES),
    "by tile": (Case(T=96, config=SMALL.replace(q_tile=16)), ("heads",)),
    "by tile, packed": (Case(lengths=(40, 0, 3, 53), config=SMALL.replace(q_tile=16)), ("heads",)),
}


@pytest.mark.parametrize("load_balance", ["zigzag", None])
@pytest.mark.parametrize(
    "name", ["batch", "packed", "own keys, packed", "not causal", "lists", "index", "index, one key, packed"]
)
def test_heads_come_one_after_the_other(name: str, load_balance: str | None, on_ranks: OnRanks) -> None:
    case = replace(CASES["batch" if name == "lists" else name][0], D=8, Dv=6, dtype=torch.float64)
    if name != "lists":
        on_ranks(2, compare_steps, replace(case, Hq=12, Hkv=6), "heads", load_balance)
    on_ranks(2, compare_steps, case, "gather", load_balance, name == "lists")
    own = tuple(name for name in case.own_keys if "cmp" not in name)
    if own:  # lists so wide that those of fewer keys are narrower
        case = replace(case, config=case.config.replace(block_counts=2048))
    on_ranks(2, compare_recorded, replace(case, own_keys=own), load_balance, name == "lists")


def cases_and_ranks() -> Iterator[Any]:
    """Every case on every kind of ranks; all but one kind for each case are sweeps."""
    for turn, name in enumerate(CASES):
        for at, kind in enumerate(RANKS):
            yield pytest.param(name, *kind, marks=[pytest.mark.sweep] if at != turn % len(RANKS) else [])


@pytest.mark.parametrize("name, size, load_balance", list(cases_and_ranks()))
def test_ranks_give_what_one_gives(name: str, size: int, load_balance: str | None, on_ranks: OnRanks) -> None:
    case, modes = CASES[name]
    case = replace(case, D=8, Dv=6, dtype=torch.float64)
    for mode in modes:
        if mode == "gather" or case.Hkv % size == 0:
            on_ranks(size, compare, case, mode, load_balance)


LISTS = Case(B=2, T=96, D=8, Dv=6, dtype=torch.float64, Hq=8, Hkv=4)


@pytest.mark.parametrize(
    "case, q_tile, heads",
    [(LISTS, 1, 4), (replace(LISTS, causal=False), 4, 8), (replace(LISTS, lengths=(40, 0, 16, 40)), 1, 8)],
    ids=["key/value heads", "tiles and query heads", "packed"],
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "size, load_balance", [(2, "zigzag"), *(pytest.param(*x, marks=pytest.mark.sweep) for x in RANKS[1:])]
)
@by_ranks(size=None)
def test_lists_of_ranks(group: Any, case: Case, q_tile: int, heads: int, mode: str, load_balance: str | None) -> None:
    inputs, dim, cp = make_inputs(case), 0 if case.lengths else 1, ContextParallel(group, mode, load_balance)
    draw, T = torch.Generator().manual_seed(1), inputs.q.shape[dim]
    shape = (*([case.B] if dim else []), T // q_tile, heads, 3)
    lists = torch.randint(-1, min(case.lengths or (T,)) // 8, shape, generator=draw, dtype=torch.int32)
    attend = partial(selected_attention, block_size=8, causal=case.causal, cu_seqlens=inputs.cu_seqlens)
    tensors = {name: getattr(inputs, name) for name in ("q", "k", "v", "do")}
    *whole, lse = step(partial(attend, return_lse=True), tensors, lists)
    attend = partial(attend, return_lse=True, cp=cp)
    *local, local_lse = step(attend, part_of(tensors, cp, dim), shard_sequence(lists, cp, dim=dim))
    torch.testing.assert_close(local, [shard_sequence(x, cp, dim=dim) for x in whole], **CLOSE)
    torch.testing.assert_close(local_lse, shard_sequence(lse, cp, dim=-1), **CLOSE)


@pytest.mark.parametrize("mode", MODES)
@by_ranks()
def test_outputs_may_be_changed_in_place(group: Any, mode: str) -> None:
    q = torch.randn(1, 16, 2, 8, requires_grad=True)
    o = nsa(q, q, q, config=SMALL, cp=ContextParallel(group, mode=mode))
    (once,) = torch.autograd.grad(o.sum(), q, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(o.mul_(2).sum(), q)[0], 2 * once)


@pytest.mark.parametrize("mode", MODES)
@by_ranks()
def test_an_index_trains_alone(group: Any, mode: str) -> None:
    """The output of a frozen model has no graph; a few heads at a time."""
    cp = ContextParallel(group, mode=mode)
    inputs = make_inputs(Case(T=96, Hq=8, Hkv=4, D=8, dtype=torch.float64, config=INDEX, gate="none", index_dim=4))

    def train(tensors: dict[str, torch.Tensor], **more: Any) -> list[torch.Tensor]:
        index = [tensors[name].detach().requires_grad_() for name in ("q_index", "k_index")]
        given = tensors | dict(zip(("q_index", "k_index"), index))
        o, loss = nsa(**given, config=INDEX, return_index_loss=True, **more)
        assert not o.requires_grad
        return [o, *torch.autograd.grad(loss, index)]

    whole, tensors = train(inputs.tensors()), part_of(inputs.tensors(), cp, 1)
    local = in_steps(train)(tensors, cp=cp)
    torch.testing.assert_close(local, [shard_sequence(x, cp) for x in whole], **CLOSE)


PAPERS = dict(compression="mlp", kv_per_branch=True, gate="input")  # compresses blocks that reach into the next rank's
LAYERS = [*((2, mode, options) for mode in MODES for options in ({}, PAPERS)), (4, "gather", PAPERS)]
LAYERS += [(size, mode, dict(config=INDEX)) for size, mode in ((2, "heads"), (4, "gather"))]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("size, mode, options", LAYERS)
@by_ranks(size=None)
def test_ranks_train_a_layer(group: Any, mode: str, packed: bool, options: dict[str, Any]) -> None:
    """`NSAttention` on each rank: outputs, gradients of x and of every parameter."""
    torch.manual_seed(0)
    sizes = dict(num_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float64, config=OVERLAPPING)
    layer = NSAttention(16, **sizes | options, rope=RotaryEmbedding(8))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(*(() if packed else (2,)), 80, 16, dtype=torch.float64)
    cu_seqlens = torch.tensor([0, 31, 80], dtype=torch.int32) if packed else None

    def train(x: torch.Tensor, do: torch.Tensor) -> tuple[list[torch.Tensor], ...]:
        x = x.detach().clone().requires_grad_()
        o = layer(x, cu_seqlens=cu_seqlens)
        losses = [] if layer.q_index is None else [layer.index_loss]
        of_results = [do, *map(torch.ones_like, losses)]
        dx, *grads = torch.autograd.grad([o, *losses], [x, *layer.parameters()], of_results)
        return [o.detach(), dx], grads, [loss.detach() for loss in losses]

    do, cp = torch.randn_like(x), ContextParallel(group, mode=mode)
    whole, *of_all = train(x, do)
    layer.set_context_parallel(cp)
    part = partial(shard_sequence, cp=cp, dim=x.dim() - 2)
    local, grads, losses = train(part(x), part(do))
    for d in grads:
        dist.all_reduce(d, group=group)
    close = dict(rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(local, [part(each) for each in whole], **close)
    torch.testing.assert_close([grads, losses], of_all, **close)


@pytest.mark.parametrize("size, load_balance", RANKS[:3])
@by_ranks(size=None)
def test_sequences_are_cut_and_joined(group: Any, load_balance: str | None) -> None:
    """Parts are those of their positions, and put together the whole; gradients go the same ways."""
    cp = ContextParallel(group, load_balance=load_balance)
    for dim, dtype in ((1, torch.float64), (0, torch.bfloat16), (-1, torch.int64)):
        x = torch.arange(16 * 16 * 3).view(16, 16, 3).movedim(1, dim).to(dtype)
        part = shard_sequence(x, cp, dim=dim)
        assert part.equal(x.index_select(dim, cp.positions(16 // cp.size, x.device)))
        whole = unshard_sequence(part.clone().requires_grad_(dtype.is_floating_point), cp, dim=dim)
        assert whole.equal(x)
    for shape, dim in (((2, 16, 3), 1), ((16,), 0)):
        weights = [torch.randn(shape, generator=torch.Generator().manual_seed(rank)) for rank in range(cp.size)]
        leaf = torch.ones_like(shard_sequence(weights[0], cp, dim=dim)).requires_grad_()
        (unshard_sequence(leaf, cp, dim=dim) * weights[cp.rank]).sum().backward()
        torch.testing.assert_close(leaf.grad, shard_sequence(sum(weights), cp, dim=dim))
    leaf = torch.ones(2, 16, 3).requires_grad_()
    shard_sequence(leaf, cp).sum().backward()
    assert leaf.grad.sum() == 2 * 16 // cp.size * 3 and shard_sequence(leaf.grad, cp).all()
    for wrong, error, match in (
        (dict(x=torch.ones(1, 15)), ValueError, "x must have a multiple of [48] tokens in dimension 1"),
        (dict(dim=3), ValueError, "dim must be a dimension of x"),
        (dict(dim=1.0), TypeError, "dim must be an int"),
        (dict(x=[1]), TypeError, "x must be a torch.Tensor"),
        (dict(cp=group), TypeError, "cp must be a ContextParallel"),
    ):
        with pytest.raises(error, match=match):
            shard_sequence(**(dict(x=torch.ones(1, 16), cp=cp, dim=1) | wrong))


@st.composite
def shared(draw: st.DrawFn) -> tuple[int, bool, tuple[Any, ...]]:
    """Ranks, True for heads one after the other, and arguments of `compare`."""
    size, balance = draw(st.sampled_from(RANKS))
    mode, by_head = draw(st.sampled_from(MODES)), draw(st.booleans())
    whole = size * (1 if balance is None else 2)
    total = whole * draw(st.integers(1, 14))
    lengths = None
    if draw(st.booleans()):
        cuts = sorted(draw(st.lists(st.integers(0, total), max_size=5)))
        lengths = tuple(end - begin for begin, end in zip([0, *cuts], [*cuts, total]))
    sizes = dict(block_size=8, q_tile=4)
    if mode == "gather" or draw(st.booleans()):
        sizes = dict(compress_size=draw(st.sampled_from((4, 8))), compress_stride=draw(st.sampled_from((2, 4))))
        sizes |= dict(block_size=draw(st.sampled_from((8, 16))), q_tile=1)
    sizes |= dict(block_counts=draw(st.integers(1, 5)), window_size=draw(st.integers(1, 20)))
    branches = [name for name in BRANCHES if name == "selected" or draw(st.booleans())]
    by_index = sizes["q_tile"] == 1 and draw(st.booleans())
    if by_index:
        sizes |= dict(rule="index", branches=branches, init_blocks=draw(st.integers(0, 1)), local_blocks=1)
    compresses, slides = (not by_index or name in branches for name in ("compressed", "window"))
    Hkv = draw(st.sampled_from((size, 2 * size) if mode == "heads" else (1, 2, 3)))
    case = Case(
        B=draw(st.integers(1, 2)),
        T=total,
        lengths=lengths,
        Hq=Hkv * draw(st.integers(1, 3)),
        Hkv=Hkv,
        D=4,
        Dv=6,
        dtype=torch.float64,
        config=NSAConfig(**sizes),
        causal=by_index or draw(st.booleans()),
        gate=draw(st.sampled_from(("weight", "given", "none"))),
        compress_weights=compresses and draw(st.booleans()),
        own_keys=tuple(
            name for name in OWN_KEYS if draw(st.booleans()) and (compresses if name[2:] == "cmp" else slides)
        ),
        index_dim=draw(st.integers(1, 4)) * by_index,
        one_key=draw(st.booleans()),
        index_loss=draw(st.booleans()),
        seed=draw(st.integers(0, 1 << 20)),
    )
    return size, by_head, (case, mode, balance, not by_index and draw(st.booleans()))


@pytest.mark.sweep
def test_drawn_calls_are_those_of_one(on_ranks: OnRanks) -> None:
    no_block = Case(T=4, Hq=2, Hkv=2, D=4, dtype=torch.float64, config=SMALL, own_keys=("v_cmp",))

    @settings(max_examples=100, deadline=None, database=None)
    @given(shared())
    @example((2, True, (no_block, "heads", "zigzag", False)))
    def draw(call: tuple[int, bool, tuple[Any, ...]]) -> None:
        size, by_head, arguments = call
        on_ranks(size, compare_steps if by_head else compare, *arguments)

    draw()
