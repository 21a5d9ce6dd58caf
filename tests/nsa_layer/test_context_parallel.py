"""Ranks that share sequences give what one process gives: processes on gloo, in fp64."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from stub_kernels import stubbed_layer
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx

from fuzz.rank_processes import ranks
from nsa_layer import (
    ContextParallel,
    NSAConfig,
    NSAttention,
    nsa,
    selected_attention,
    shard_sequence,
    unshard_sequence,
)
from nsa_layer.call_spec import CallSpec, CallTensors
from nsa_layer.config import WIDE_LIST
from nsa_layer.context_parallel import gather, graph, heads, overlapped, stretches
from nsa_layer.context_parallel.agreement import agree
from nsa_layer.context_parallel.collectives import OPS, Collectives
from nsa_layer.context_parallel.parts import NOTHING, Part
from nsa_layer.context_parallel.rows import Rows, of_blocks
from nsa_layer.context_parallel.spec import chunks_of
from nsa_layer.context_parallel.stretches import Stretch, Window, stretches_of_ranks
from nsa_layer.context_parallel.whole import BLOCKS, TILES, TOKENS, check_whole
from nsa_layer.cute.branch_options import window_options
from nsa_layer.cute.memory_plan import MemoryPolicy, predict
from nsa_layer.cute.packing import Packing
from nsa_layer.inputs import Arguments
from nsa_layer.rope import RotaryEmbedding
from nsa_tools.testing.cases import LSES, Case, make_inputs, run

Ranks = Callable[..., list[Any]]
NO_TENSORS = CallTensors(*[None] * 3)
WEIGHTS = ("gate_weight", "compress_k_weight", "compress_v_weight")
SMALL = NSAConfig(block_size=8, block_counts=4, q_tile=1, window_size=8)
OVERLAPPING = SMALL.replace(compress_size=8, compress_stride=4, block_size=16, block_counts=5)
OWN_KEYS = ("k_cmp", "v_cmp", "k_win", "v_win")
BOTH = ("heads", "gather")

CASES = {
    "batch": (Case(B=2, T=96, config=SMALL), BOTH),
    "overlapping": (Case(T=80, Hq=8, Hkv=4, config=OVERLAPPING, compress_weights=True), BOTH),
    "packed": (Case(lengths=(40, 0, 3, 53), config=SMALL, gate="given"), BOTH),
    "packed, overlapping": (Case(lengths=(40, 1, 3, 52), config=OVERLAPPING, compress_weights=True), BOTH),
    "not causal": (Case(B=2, T=80, config=OVERLAPPING, causal=False, gate="none"), BOTH),
    "not causal, packed": (Case(lengths=(30, 50), config=SMALL, causal=False, own_keys=("k_win",)), BOTH),
    "own keys": (Case(B=2, T=80, config=OVERLAPPING, own_keys=OWN_KEYS), BOTH),
    "own keys, packed": (Case(lengths=(40, 0, 3, 53), config=SMALL, own_keys=OWN_KEYS), BOTH),
    "one head": (Case(T=64, Hq=3, Hkv=1, config=SMALL), ("gather",)),
    "no window": (Case(B=2, T=80, config=OVERLAPPING.replace(window_size=0), gate="given"), BOTH),
    "no window, packed": (Case(lengths=(40, 0, 3, 53), config=SMALL.replace(window_size=0)), BOTH),
    "nothing forced": (Case(T=80, config=OVERLAPPING.replace(init_blocks=0, local_blocks=0)), BOTH),
    "more forced": (Case(lengths=(30, 50), config=SMALL.replace(init_blocks=2, local_blocks=1)), BOTH),
    "by tile": (Case(T=96, config=SMALL.replace(q_tile=16)), ("heads",)),
    "by tile, packed": (Case(lengths=(40, 0, 3, 53), config=SMALL.replace(q_tile=16)), ("heads",)),
}


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ranks((2, 4), str(tmp_path_factory.mktemp("ranks") / "store")) as run:
        yield run


def held(x: torch.Tensor, rows: Any, cp: ContextParallel, dim: int) -> torch.Tensor:
    """This rank's rows of a whole tensor."""
    chunks = x.split(rows.counts, dim)
    return torch.cat([chunks[chunk] for chunk in cp.chunks], dim)


def compare(group: Any, case: Case, mode: str, load_balance: str | None, listed: bool = False) -> None:
    """On each rank: its part of everything is that of one process."""
    cp = ContextParallel(group, mode=mode, load_balance=load_balance)
    inputs = make_inputs(case)
    lists = run("eager", inputs).aux.block_indices if listed else None
    more = dict(block_indices=lists) if listed else {}
    expected = run("eager", inputs, **more)
    dim, packed = (0, True) if case.lengths else (1, False)
    kinds = {name: BLOCKS if "cmp" in name else TOKENS for name in inputs.tensors() if name not in WEIGHTS}
    total = inputs.q.shape[dim]
    stand_in = inputs.q.narrow(dim, 0, total // cp.size)
    tensors = CallTensors(*[stand_in] * 3, cu_seqlens=inputs.cu_seqlens)
    rows = check_whole(Arguments(tensors, case.config, None, None, case.causal), cp)[1]
    chunk = rows[TOKENS].counts[0]
    rows[BLOCKS] = of_blocks(cp, case.lengths or (total,), chunk, case.config.span, case.config.stride)
    given = inputs.tensors()
    local = {name: held(x, rows[kinds[name]], cp, dim) if name in kinds else x for name, x in given.items()}
    leaves = {name: x.detach().clone().requires_grad_() for name, x in local.items()}
    if listed:
        more = dict(block_indices=held(lists, rows[TILES], cp, dim))
    static = dict(config=case.config, causal=case.causal, cu_seqlens=inputs.cu_seqlens, return_aux=True)
    o, aux = nsa(**leaves, **static, **more, cp=cp)
    grads = torch.autograd.grad(o, list(leaves.values()), held(inputs.do, rows[TOKENS], cp, dim))
    close = dict(rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(o, held(expected.o, rows[TOKENS], cp, dim), **close)
    chosen = held(expected.aux.block_indices, rows[TILES], cp, dim)
    here, room = aux.block_indices.split([chosen.shape[-1], aux.block_indices.shape[-1] - chosen.shape[-1]], -1)
    assert torch.equal(here, chosen) and room.eq(-1).all()
    torch.testing.assert_close(aux.gates, held(expected.aux.gates, rows[TOKENS], cp, dim), **close)
    for name in LSES:
        whole = getattr(expected.aux, name)
        torch.testing.assert_close(getattr(aux, name), held(whole, rows[TOKENS], cp, -1), **close)
    for (name, whole), d in zip(expected.grads.items(), grads):
        if name in WEIGHTS:
            dist.all_reduce(d, group=group)
        else:
            whole = held(whole, rows[kinds[name]], cp, dim)
        torch.testing.assert_close(d, whole, **close, msg=lambda said: f"d{name}: {said}")


RANKS = [(2, "zigzag"), (4, "zigzag"), (4, None), (2, None)]


def compare_steps(group: Any, case: Case, mode: str, load_balance: str | None, listed: bool = False) -> None:
    """As long calls on a GPU: some heads at a time, exchanges of the next ones launched before attention; or after it,
    as in the longest ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads, "heads_of_steps", lambda x, rows, cp, n: [1, n // cp.size - 1][: n // cp.size])
        for name in ("LONG", "STEP"):
            patch.setattr(overlapped, name, 1)
        if load_balance is None:
            patch.setattr(overlapped, "LONGEST", 1)
        compare(group, case, mode, load_balance, listed)


def compare_recorded(group: Any, case: Case, load_balance: str | None, listed: bool) -> None:
    """By the operators of graphs, which know no lengths of packed sequences."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (gather, graph, overlapped):
            patch.setattr(module, "is_recorded", lambda *_: True)
        patch.setattr(overlapped, "LONG", 1)
        compare(group, case, "gather", load_balance, listed)


@pytest.mark.parametrize("load_balance", ["zigzag", None])
@pytest.mark.parametrize("name", ["batch", "packed", "own keys, packed", "not causal", "lists"])
def test_heads_come_one_after_the_other(name: str, load_balance: str | None, on_ranks: Ranks) -> None:
    case = replace(CASES["batch" if name == "lists" else name][0], D=8, Dv=6, dtype=torch.float64)
    if name != "lists":
        on_ranks(2, compare_steps, replace(case, Hq=12, Hkv=6), "heads", load_balance)
    on_ranks(2, compare_steps, case, "gather", load_balance, name == "lists")
    own = tuple(name for name in case.own_keys if "cmp" not in name)
    if own:  # lists so wide that those of fewer keys are narrower
        case = replace(case, config=case.config.replace(block_counts=2 * WIDE_LIST))
    on_ranks(2, compare_recorded, replace(case, own_keys=own), load_balance, name == "lists")


def all_of_them() -> Iterator[Any]:
    """Every case on every kind of ranks; all but one kind for each case are sweeps."""
    for turn, name in enumerate(CASES):
        for at, kind in enumerate(RANKS):
            yield pytest.param(name, *kind, marks=[pytest.mark.sweep] if at != turn % len(RANKS) else [])


@pytest.mark.parametrize("name, size, load_balance", list(all_of_them()))
def test_ranks_give_what_one_gives(name: str, size: int, load_balance: str | None, on_ranks: Ranks) -> None:
    case, modes = CASES[name]
    case = replace(case, D=8, Dv=6, dtype=torch.float64)
    for mode in modes:
        if mode == "gather" or case.Hkv % size == 0:
            on_ranks(size, compare, case, mode, load_balance)


def attend_to_lists(group: Any, case: Case, mode: str, load_balance: str | None, q_tile: int, heads: int) -> None:
    """`selected_attention` on each rank, with lists of `heads` heads."""
    cp = ContextParallel(group, mode=mode, load_balance=load_balance)
    inputs, dim = make_inputs(case), 0 if case.lengths else 1
    T = inputs.q.shape[dim]
    draw = torch.Generator().manual_seed(1)
    shape = (*([case.B] if dim else []), -(-T // q_tile), heads, 3)
    lists = torch.randint(-1, min(case.lengths or (T,)) // 8, shape, generator=draw, dtype=torch.int32)
    tokens = Rows.of_tokens(cp, T // cp.size)
    of_lists = Rows(tuple(count // q_tile for count in tokens.counts), cp.size, load_balance)
    static = dict(block_size=8, causal=case.causal, cu_seqlens=inputs.cu_seqlens, return_lse=True)

    def step(q: Any, k: Any, v: Any, lists: Any, do: Any, **more: Any) -> tuple[torch.Tensor, ...]:
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        o, lse = selected_attention(*leaves, lists, **static, **more)
        return o.detach(), *torch.autograd.grad(o, leaves, do), lse

    tensors = (inputs.q, inputs.k, inputs.v, lists, inputs.do)
    rows = (tokens, tokens, tokens, of_lists, tokens)
    *whole, lse = step(*tensors)
    *got, lse_here = step(*(held(x, each, cp, dim) for x, each in zip(tensors, rows)), cp=cp)
    close = dict(rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got, [held(x, tokens, cp, dim) for x in whole], **close)
    torch.testing.assert_close(lse_here, held(lse, tokens, cp, -1), **close)


@pytest.mark.parametrize(
    "size, load_balance", [(2, "zigzag"), *(pytest.param(*x, marks=pytest.mark.sweep) for x in RANKS[1:])]
)
def test_ranks_attend_to_lists(size: int, load_balance: str | None, on_ranks: Ranks) -> None:
    case = Case(B=2, T=96, D=8, Dv=6, dtype=torch.float64, Hq=8, Hkv=4)
    packed = replace(case, lengths=(40, 0, 16, 40))
    for mode in ("heads", "gather"):
        on_ranks(size, attend_to_lists, case, mode, load_balance, 1, 4)
        on_ranks(size, attend_to_lists, replace(case, causal=False), mode, load_balance, 4, 8)
        on_ranks(size, attend_to_lists, packed, mode, load_balance, 1, 8)


def train_a_layer(group: Any, mode: str, packed: bool, **options: Any) -> None:
    """`NSAttention` on each rank: outputs, gradients of x and of every parameter."""
    torch.manual_seed(0)
    sizes = dict(num_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float64, config=OVERLAPPING)
    layer = NSAttention(16, **sizes, **options, rope=RotaryEmbedding(8))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(*(() if packed else (2,)), 80, 16, dtype=torch.float64)
    cu_seqlens = torch.tensor([0, 31, 80], dtype=torch.int32) if packed else None
    do, dim = torch.randn_like(x), x.dim() - 2

    def step(x: torch.Tensor, do: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        x = x.detach().clone().requires_grad_()
        o = layer(x, cu_seqlens=cu_seqlens)
        dx, *grads = torch.autograd.grad(o, [x, *layer.parameters()], do)
        return o.detach(), dx, grads

    whole, dx, of_parameters = step(x, do)
    cp = ContextParallel(group, mode=mode)
    layer.set_context_parallel(cp)
    tokens = Rows.of_tokens(cp, 80 // cp.size)
    o, dx_here, grads = step(held(x, tokens, cp, dim), held(do, tokens, cp, dim))
    for d in grads:
        dist.all_reduce(d, group=group)
    close = dict(rtol=1e-10, atol=1e-11)
    torch.testing.assert_close([o, dx_here], [held(each, tokens, cp, dim) for each in (whole, dx)], **close)
    torch.testing.assert_close(grads, of_parameters, **close)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mode", BOTH)
def test_ranks_train_a_layer(mode: str, packed: bool, on_ranks: Ranks) -> None:
    on_ranks(2, train_a_layer, mode, packed)
    # The paper's module makes compressed keys of its own, of blocks that reach into the next rank's tokens.
    for size in (2, 4)[: 1 + (mode == "gather")]:
        work = partial(train_a_layer, compression="mlp", kv_per_branch=True, gate="input")
        on_ranks(size, work, mode, packed)


def cut_and_join(group: Any, load_balance: str | None) -> None:
    """Parts are those of their places, and put together the whole; gradients go the same ways."""
    cp = ContextParallel(group, load_balance=load_balance)
    for dim, dtype in ((1, torch.float64), (0, torch.bfloat16), (-1, torch.int64)):
        x = torch.arange(16 * 16 * 3).view(16, 16, 3).movedim(1, dim).to(dtype)
        part = shard_sequence(x, cp, dim=dim)
        assert part.equal(x.index_select(dim, cp.places(16 // cp.size, x.device)))
        whole = unshard_sequence(part.clone().requires_grad_(dtype.is_floating_point), cp, dim=dim)
        assert whole.equal(x)
    leaf = torch.ones(2, 16 // cp.size, 3).requires_grad_()
    weights = [torch.randn(2, 16, 3, generator=torch.Generator().manual_seed(rank)) for rank in range(cp.size)]
    (unshard_sequence(leaf, cp) * weights[cp.rank]).sum().backward()
    torch.testing.assert_close(leaf.grad, shard_sequence(sum(weights), cp))
    leaf = torch.ones(2, 16, 3).requires_grad_()
    shard_sequence(leaf, cp).sum().backward()
    assert leaf.grad.sum() == 2 * 16 // cp.size * 3 and shard_sequence(leaf.grad, cp).all()
    for wrong, error, match in (
        (dict(x=torch.ones(1, 15)), ValueError, "x must have a multiple of (twice )?[24] ranks"),
        (dict(dim=3), ValueError, "dim must be a dimension of x"),
        (dict(dim=1.0), TypeError, "dim must be an int"),
        (dict(x=[1]), TypeError, "x must be a torch.Tensor"),
        (dict(cp=group), TypeError, "cp must be a ContextParallel"),
    ):
        with pytest.raises(error, match=match):
            shard_sequence(**(dict(x=torch.ones(1, 16), cp=cp, dim=1) | wrong))


@pytest.mark.parametrize("size, load_balance", RANKS[:3])
def test_sequences_are_cut_and_joined(size: int, load_balance: str | None, on_ranks: Ranks) -> None:
    on_ranks(size, cut_and_join, load_balance)


def refuse(group: Any, wrong: dict[int, dict[str, Any]], error: type[Exception], match: str) -> None:
    """Every rank raises what is wrong with one."""
    cp, rank = ContextParallel(group), group.rank()
    given = dict(T=16, heads=2, config=SMALL, cp=cp) | wrong.get(rank, wrong.get(-1, {}))
    if isinstance(given["cp"], dict):
        given["cp"] = ContextParallel(group, **given["cp"])
    T, heads = given.pop("T"), given.pop("heads")
    q = torch.randn(1, T, 4, 8)
    k, v = torch.randn(2, 1, T, heads, 8)
    with pytest.raises(error, match=match):
        nsa(q, k, v, **given)


@pytest.mark.parametrize(
    "wrong, error, match",
    [
        ({1: dict(T=24)}, ValueError, r"ranks disagree on q: rank 0 has torch.float32 \(1, 16, 4, 8\)"),
        ({0: dict(causal=False)}, ValueError, "ranks disagree on causal"),
        ({1: dict(cp=dict(load_balance=None))}, ValueError, "ranks disagree on cp.load_balance"),
        ({1: dict(gates=torch.rand(1, 16, 4, 2))}, ValueError, "ranks disagree on gates: rank 0 has None"),
        ({1: dict(config="small")}, ValueError, "ranks disagree on config"),
        ({-1: dict(T=15)}, ValueError, "even number of tokens"),
        ({-1: dict(heads=1, cp=dict(mode="heads"))}, ValueError, "mode='heads' needs ranks that divide the 1"),
        ({-1: dict(cu_seqlens=torch.tensor([0, 32], dtype=torch.int32))}, ValueError, "q must be packed"),
        ({-1: dict(cp="ranks")}, TypeError, "cp must be a ContextParallel"),
        ({-1: dict(config=SMALL.replace(q_tile=4), cp=dict(mode="gather"))}, NotImplementedError, "q_tile=4"),
        ({1: dict(k_cmp=torch.rand(1, 3, 2, 8)), 0: dict(k_cmp=torch.rand(1, 2, 2, 8))}, ValueError, "k_cmp must"),
    ],
)
def test_every_rank_says_what_is_wrong(wrong: dict, error: type[Exception], match: str, on_ranks: Ranks) -> None:
    on_ranks(2, refuse, wrong, error, match)


def count_on_one_rank(group: Any) -> None:
    """In a mode, in which a rank exchanges by other means than the other one."""
    from torch.utils.flop_counter import FlopCounterMode  # which imports Triton

    cp, q = ContextParallel(group), torch.randn(1, 16, 2, 8)
    with FlopCounterMode(display=False) if group.rank() else nullcontext():
        with pytest.raises(ValueError, match="ranks disagree on being in a mode of PyTorch's dispatcher"):
            nsa(q, q, q, config=SMALL, cp=cp)


def test_ranks_are_in_the_same_modes(on_ranks: Ranks) -> None:
    on_ranks(2, count_on_one_rank)


def pad_with_numbers(group: Any, mode: str) -> None:
    """A list of the last rank names a block that its sequence has not, as padding; in int64 on all ranks."""
    cp = ContextParallel(group, mode=mode, load_balance=None)
    for lengths, most in ((None, 3), ((20, 12), 1)):
        lead = (2, 16) if lengths is None else (16,)
        q, k = torch.randn(*lead, 4, 8), torch.randn(*lead, 2, 8)
        starts = None if lengths is None else torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        lists = torch.zeros(*lead, 2, 1, dtype=torch.int64)
        calls = partial(nsa, config=SMALL), partial(selected_attention, block_size=8)
        for call in calls:
            found = []
            for number in (-1, most + 1, 99_999_999, 2**40):
                lists[..., -1, 1, 0] = number if group.rank() else 0
                found.append(call(q, k, k, block_indices=lists, cu_seqlens=starts, cp=cp))
            assert all(o.equal(found[0]) for o in found)


@pytest.mark.parametrize("mode", BOTH)
def test_lists_of_ranks_are_padded_with_any_numbers(mode: str, on_ranks: Ranks) -> None:
    on_ranks(2, pad_with_numbers, mode)


STARTS = torch.tensor([0, 5, 20, 32], dtype=torch.int32)
OTHER_STARTS = torch.tensor([0, 5, 16, 32], dtype=torch.int32)
SEQUENCES = "the tokens of sequence 1 in cu_seqlens: rank 0 has (5, 20), rank 1 has (5, 16)"


class Special(torch.Tensor):
    """A class of its own, whose tensors are exchanged by collectives."""


def disagree(group: Any, mode: str) -> None:
    """What one rank gives differs from what the other one does: both say so at once, and go on."""
    cp = ContextParallel(group, mode=mode)
    q, k, lists = torch.randn(16, 4, 8), torch.randn(16, 2, 8), torch.zeros(16, 2, 1, dtype=torch.int32)
    common, batch = dict(q=q, k=k, v=k, cu_seqlens=STARTS), dict(q=q[None], k=k[None], v=k[None], cu_seqlens=None)
    nested = torch.nested.nested_tensor([k])
    sequences = dict(cu_seqlens=OTHER_STARTS), SEQUENCES
    by_tile = batch | dict(block_indices=lists[None, ::2])
    of_layer = [
        sequences,
        (dict(cu_seqlens=STARTS[[0, 1, 3]]), "cu_seqlens: rank 0 has torch.int32 (4,)"),
        (batch, "q"),
        (dict(q=q[:8], k=k[:8], v=k[:8]), "q"),
        (dict(q=q.double(), k=k.double(), v=k.double()), "q"),
        (dict(q=q.as_subclass(Special)), "being in a mode of PyTorch's dispatcher"),
        (dict(v=nested), "v"),
        (dict(k_win=k), "k_win"),
        (dict(k_cmp=torch.randn(2, 2, 8)), "k_cmp"),
        (dict(block_indices=lists), "block_indices"),
        (dict(max_seqlen=32), "max_seqlen"),
        (dict(max_seqlen=3), "max_seqlen"),
        (dict(config=SMALL.replace(block_counts=3)), "config"),
        (dict(softmax_scale=0.25), "softmax_scale"),
        (dict(memory="little"), "memory"),
        (dict(validate=1), "validate"),
        (dict(return_aux=True), "return_aux"),
        (dict(backend="reference"), "backend"),
    ]
    of_lists = [
        sequences,
        (dict(block_indices=lists.expand(-1, -1, 3)), "block_indices"),
        (by_tile, "block_indices", by_tile | dict(block_indices=lists[None])),
        (dict(block_size=16), "block_size"),
        (dict(block_size=0), "block_size"),
        (dict(causal=False), "causal"),
        (dict(causal=None), "causal"),
        (dict(deterministic=True), "deterministic"),
    ]
    for function, cases, more in (
        (nsa, of_layer, dict(config=SMALL)),
        (selected_attention, of_lists, dict(block_size=8, block_indices=lists)),
    ):
        for of_last, said, *of_first in cases:
            of_rank = of_last if group.rank() else next(iter(of_first), {})
            with pytest.raises(ValueError, match=f"^ranks disagree on {re.escape(said)}"):
                function(**common | more | of_rank, cp=cp)
        function(**common, **more, cp=cp)
    for of_last, said in ((q[:8], "x"), (q.double(), "x"), (None, "x"), (q.transpose(0, 1)[:, :3], "x")):
        with pytest.raises(ValueError, match=f"^ranks disagree on {said}"):
            unshard_sequence(of_last if group.rank() else q, cp, dim=0)
    assert len(unshard_sequence(q, cp, dim=0)) == 32


@pytest.mark.parametrize("mode", BOTH)
def test_ranks_that_disagree_say_so(mode: str, on_ranks: Ranks) -> None:
    on_ranks(2, disagree, mode)


def disagree_in_a_layer(group: Any) -> None:
    layer = NSAttention(16, num_heads=4, num_kv_heads=2, config=OVERLAPPING, compression="mlp", rope=RotaryEmbedding(4))
    layer.set_context_parallel(group)
    x, rank = torch.randn(16, 16), group.rank()
    for of_last, error, said in (
        (dict(cu_seqlens=OTHER_STARTS), ValueError, re.escape(SEQUENCES)),
        (dict(positions=torch.zeros(3).long()), ValueError, "positions must have shape"),
        (dict(cache="none"), ValueError, "ranks disagree on cache"),
        (dict(max_seqlen=40), ValueError, "ranks disagree on max_seqlen"),
    ):
        with pytest.raises(error, match=said):
            layer(x, **dict(cu_seqlens=STARTS) | (of_last if rank else {}))
    layer(x, cu_seqlens=STARTS)


def test_ranks_that_disagree_in_a_layer_say_so(on_ranks: Ranks) -> None:
    on_ranks(2, disagree_in_a_layer)


class OnGpu(torch.Tensor):
    is_cuda = True


def compare_known_calls(group: Any) -> None:
    """Every rank says what is wrong with one rank's numbers on a GPU, where they are validated."""
    cp, x = ContextParallel(group), torch.zeros(2).as_subclass(OnGpu)

    def wrong() -> None:
        if group.rank():
            raise ValueError("no such block")

    for validate in (False, True):
        agree(cp, [], x=x, validate=validate)
    agree(cp, [wrong], x=x, validate=False)
    with pytest.raises(ValueError, match="no such block"):
        agree(cp, [wrong], x=x, validate=True)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("is_available", "is_current_stream_capturing"):
            patch.setattr(torch.cuda, name, lambda: True)
        agree(cp, [wrong], x=x, validate=True)
        with pytest.raises(RuntimeError, match="captured in a CUDA graph before"):
            agree(cp, [wrong], x=x[:1], validate=True)


def test_known_calls_are_compared_to_validate_them(on_ranks: Ranks) -> None:
    on_ranks(2, compare_known_calls)


def test_groups_that_do_not_exist_are_refused() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        ContextParallel(None)
    with pytest.raises(ValueError, match="mode must be one of"):
        ContextParallel(None, mode="ring")
    with pytest.raises(ValueError, match="load_balance must be"):
        ContextParallel(None, load_balance="stripes")


def refuse_groups(group: Any) -> None:
    """Rank 0 alone in a group, a mesh of two dimensions and one of its own, and what is no group."""
    alone, mesh = dist.new_group([0]), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    for wrong, error, match in (
        (mesh, ValueError, "a DeviceMesh of one dimension, got 2"),
        ("ranks", TypeError, "a ProcessGroup or a DeviceMesh, got str"),
        *([(alone, ValueError, "this rank as a member")] if group.rank() else []),
    ):
        with pytest.raises(error, match=match):
            ContextParallel(wrong)
    cp = ContextParallel(mesh["cp"])
    assert (cp.size, cp.rank) == (2, group.rank() % 2)


def test_groups_that_do_not_fit_are_refused(on_ranks: Ranks) -> None:
    on_ranks(4, refuse_groups)


@pytest.mark.parametrize("tile", [None, 16])
@pytest.mark.parametrize("reach", [0, 3, 30])
@pytest.mark.parametrize("lengths", [None, (40, 0, 3, 53)])
@pytest.mark.parametrize("causal", [True, False])
def test_windows_of_a_rank_see_what_those_of_one_see(
    causal: bool, lengths: tuple[int, ...] | None, reach: int, tile: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window's keys as the kernels' options give them: each query's first and last, as tokens of the whole.

    Args:
        tile: of gathered keys that the window reads, from a whole tile on; None: its own keys.
    """
    call, T = CallSpec(SMALL.replace(window_size=reach + 1), causal, 1.0, lengths), 96
    monkeypatch.setattr(stretches, "TILE", tile)

    def of_stretch(stretch: Stretch) -> Window:
        return stretch.window(reach, causal=causal) if tile is None else stretch.window_of_keys(call)

    ends = list(accumulate(lengths or (T,)))
    for (size, load_balance), rank in ((kind, rank) for kind in RANKS for rank in range(kind[0])):
        chunks = chunks_of(rank, size, load_balance)
        cp = SimpleNamespace(chunks=chunks, size=size, load_balance=load_balance)
        for stretch, chunk in zip(stretches_of_ranks(cp, T // size, lengths, cut=causal)[rank], chunks, strict=True):
            window, here = of_stretch(stretch), stretch.spec(call)
            count, begin = stretch.queries.stop - stretch.queries.start, chunk * T // size // len(chunks)
            first = stretch.keys.start + window.keys.start
            assert (first, window.keys.stop - window.keys.start) == (
                begin - window.before,
                window.before + count + window.after,
            )
            packing, positions = Packing.of(here, torch.device("cpu")), tuple(each[-1] for each in stretch.lengths)
            here = replace(here, window=window.lengths)
            assert Part(NO_TENSORS, here, positions, "cute", (True,) * 3).window == window.keys
            given = window_options(here, packing, torch.tensor(positions, dtype=torch.int32))
            starts = given.get("cu_seqlens_q", torch.tensor([0, count])).tolist()
            of_keys = given.get("cu_seqlens_k", torch.tensor([0, window.keys.stop - window.keys.start])).tolist()
            for s, offset in enumerate(given["q_offset"].tolist()):
                for i in range(starts[s], starts[s + 1]):
                    token, at = begin + i, offset + i - starts[s]
                    end = next(end for end in ends if end > token)
                    start = max([0, *(each for each in ends if each <= token)])
                    last = min(of_keys[s + 1] - of_keys[s] - 1, at + given["window_size_right"])
                    seen = [first + of_keys[s] + x for x in (max(0, at - given["window_size_left"]), last)]
                    assert seen == [max(start, token - reach), min(end - 1, token if causal else token + reach)]


def test_windows_add_to_the_gradients_of_the_keys_that_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the kernels they read rows of the keys, of which no copy is made, and there is no gradient beside."""
    from nsa_layer.cute import head_groups
    from nsa_layer.cute.backward import WeightGradients

    with stubbed_layer():
        called: list[tuple[Any, ...]] = []

        def backward(tensors: CallTensors, *given: Any, window_adds: bool, spec: CallSpec) -> WeightGradients:
            called.append((tensors, *given[3:], window_adds))
            return WeightGradients(*[None] * 6)

        monkeypatch.setattr(head_groups, "backward", backward)
        q, k = torch.zeros(1, 64, 4, 64, dtype=torch.bfloat16), torch.zeros(1, 300, 2, 64, dtype=torch.bfloat16)
        spec = CallSpec(SMALL, True, 1.0, window=((192, 128),))
        part = Part(CallTensors(q, k, k), spec, (236,), "cute", (True,) * 3)
        dq, dk, dv, *_, dk_win, dv_win = part.gradients(q, NOTHING, torch.empty_like(q))
        ((given, _, *grads, adds),) = called
    assert (dk_win, dv_win) == (None, None) and adds
    for x, rows in ((k, given.k_win), (k, given.v_win), (dk, grads[2]), (dv, grads[3])):
        assert rows.shape == (1, 192, 2, 64) and rows.data_ptr() == x[:, 108:].data_ptr()


def test_auto_takes_heads_where_ranks_divide_them(on_ranks: Ranks) -> None:
    on_ranks(2, take_heads)


def take_heads(group: Any) -> None:
    """And where they do not gather more for it; the mode that is not taken is not there."""
    cp = ContextParallel(group)
    assert (cp.mode_of(3), cp.mode_of(8), cp.mode_of(8, gather=True)) == ("gather", "heads", "gather")
    q, k = torch.randn(1, 16, 8, 8), torch.randn(1, 16, 2, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads, "attend", None)
        nsa(q[:, :, :3], q[:, :, :3], q[:, :, :3], config=SMALL, cp=cp)
        with pytest.raises(TypeError, match="not callable"):
            nsa(q, k, k, config=SMALL, cp=cp)
        patch.setattr(gather, "LONG", 32)
        nsa(q, k, k, config=SMALL, cp=cp)
        seed = SMALL.replace(rule="seed", compress_offset=0, init_blocks=0, local_blocks=0)
        for more in (dict(config=SMALL, backend="reference"), dict(config=SMALL.replace(q_tile=8)), dict(config=seed)):
            with pytest.raises(TypeError, match="not callable"):
                nsa(q, k, k, cp=cp, **more)
    dist.barrier(group)


@pytest.mark.parametrize(
    "T, Hq, Hkv, ranks, better",
    [
        (gather.LONG, 32, 8, 2, True),
        (gather.LONG - 64, 32, 8, 2, False),  # short
        (gather.LONG, 32, 8, 4, False),  # k and v take more than a fourth of all
        (gather.LONG, 64, 4, 4, True),
        (gather.LONG, 16, 16, 2, False),
    ],
)
def test_long_calls_gather_what_is_less(T: int, Hq: int, Hkv: int, ranks: int, better: bool) -> None:
    q, k = (torch.empty(1, T // ranks, H, 128, device="meta") for H in (Hq, Hkv))
    assert gather.is_better(SimpleNamespace(size=ranks), CallTensors(q, k, k), NSAConfig()) == better


@pytest.mark.parametrize("list_heads", [8, 32])
def test_memory_is_planned_for_lists_of_the_heads_of_a_rank(list_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []
    monkeypatch.setattr(heads, "plan_memory", lambda sizes, *_: planned.append(sizes) or SimpleNamespace(kept=[True]))
    q, k, v, lists = (torch.empty(1, 64, count, 4, device="meta") for count in (32, 8, 8, list_heads))
    given = Arguments(CallTensors(q, k, v, block_indices=lists), SMALL, None, None, True)
    heads._policy(given, Rows((32,) * 4, 2, "zigzag"), SimpleNamespace(size=2), MemoryPolicy())
    (sizes,) = planned
    assert (sizes.tokens, sizes.Hq, sizes.Hkv, sizes.rows, sizes.list_width) == (128, 16, 4, 32 // list_heads, 4)
    assert predict(sizes, 1, (True,) * 3)["forward"] > 0


PASSED_ON = [getattr(torch.ops.aten, name).default for name in ("view", "alias", "squeeze", "unsqueeze", "clone")]


def assert_waits_for_collectives(graph: torch.fx.Graph) -> None:
    """Not for views: Inductor writes to what is sent as soon as nothing reads it up to a wait for the collective."""
    waits = graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.wait_tensor.default)
    sent = [str(node.args[0].target) for node in waits]
    assert sent and all(target.startswith("_c10d_functional.") for target in sent), sent


def writes_in_a_row(graph: torch.fx.Graph) -> int:
    """To parts of one tensor. With each of them Inductor's expressions double."""
    writes = (torch.ops.aten.slice_scatter.default, torch.ops.aten.select_scatter.default)
    found: dict[torch.fx.Node, int] = {}
    for node in graph.nodes:
        before = max((found[each] for each in node.all_input_nodes), default=0)
        found[node] = before + 1 if node.target in writes else before if node.target in PASSED_ON else 0
    return max(found.values())


def exchange_in_graphs(group: Any, counts: tuple[int, ...]) -> None:
    cp, rows = ContextParallel(group), Rows(counts, 2, "zigzag")
    exchange = Collectives(cp)

    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        whole = exchange.whole(exchange.send_to_all(x, rows), rows)
        exchange.whole(exchange.send_to_heads(x[:, :, None].expand(-1, -1, 2, -1), rows), rows)
        exchange.by_rank(exchange.send_to_tokens(whole, rows), rows)
        return exchange.sums(exchange.send_sums([(slice(0, sum(counts)), whole)], rows, ()), rows)

    x = torch.randn(2, sum(rows.of_rank(cp.rank)), 3)
    traced = make_fx(there_and_back)(x)
    assert_waits_for_collectives(traced.graph)
    assert OPS.all_gather_into_tensor.default not in [node.target for node in traced.graph.nodes], "see send_to_all"
    assert torch.equal(traced(x), 2 * x)


@pytest.mark.parametrize("counts", [(2, 2, 2, 2), (2, 3, 1, 2)])
def test_graphs_wait_for_collectives(counts: tuple[int, ...], on_ranks: Ranks) -> None:
    on_ranks(2, exchange_in_graphs, counts)


def compile_a_call(group: Any, mode: str, alone: bool, packed: bool) -> None:
    """One graph, by heads for two lengths, with the exchanges in it, those of the next heads before attention."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd  # not by every rank: it takes long
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    cp, graphs, calls = ContextParallel(group, mode=mode), [], []

    def note(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        assert_waits_for_collectives(graph.graph)
        assert writes_in_a_row(graph.graph) <= 4
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph.forward)

    function = selected_attention if alone else nsa

    def trace(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        calls.append([str(node.args) for node in graph.graph.nodes if "gathered" in str(node.target)])
        return aot_autograd(**how)(graph, inputs)

    how = dict(fw_compiler=note, bw_compiler=note, partition_fn=min_cut_rematerialization_partition)
    compiled = torch.compile(function, fullgraph=True, backend=trace, dynamic=True)
    for T in (32, 48)[: 1 if mode == "gather" else 2]:
        lengths = (T - 20, 0, 20) if packed else None
        inputs = make_inputs(Case(T=T, lengths=lengths, Hq=4, Hkv=2, D=8, config=SMALL, gate="given"))
        tokens, dim = Rows.of_tokens(cp, T // 2), 0 if packed else 1
        parts = [held(getattr(inputs, name), tokens, cp, dim) for name in ("q", "k", "v", "do", "gates")]
        lists = torch.zeros(*parts[0].shape[:-2], 2, 1, dtype=torch.int32)
        given = dict(block_indices=lists, block_size=8) if alone else dict(config=SMALL, gates=parts[4])
        if not alone:
            given |= dict(k_win=parts[2], return_aux=True)

        def step(attend: Any) -> list[torch.Tensor]:
            leaves = [x.detach().clone().requires_grad_() for x in parts[:3]]
            o = attend(*leaves, **given, cu_seqlens=inputs.cu_seqlens, cp=cp)
            o, aux = (o, None) if alone else o
            found = [o.detach(), *torch.autograd.grad(o, leaves, parts[3])]
            if alone:
                return found
            width = SMALL.list_width(max(lengths or (T,)))  # without the room that a graph has
            return [*found, aux.block_indices[..., :width], aux.gates, *(getattr(aux, name) for name in LSES)]

        torch.testing.assert_close(step(compiled), step(function))
    assert len(graphs) == 2
    if mode == "gather":
        of_ranks: list[Any] = [None] * cp.size  # which PyTorch's cache has by what is said there
        dist.all_gather_object(of_ranks, calls, group=group)
        assert [len(each) for each in calls] == [1] and of_ranks[0] != of_ranks[1]
        first = graphs[0].index(getattr(torch.ops.nsa_layer, "selected" if alone else "stretch").default)
        gathers = [n for n, x in enumerate(graphs[0]) if x is OPS.all_to_all_single.default]  # on a CPU
        assert len(gathers) >= 4 and gathers[-1] < first


@pytest.mark.sweep
@pytest.mark.parametrize("mode", BOTH)
@pytest.mark.parametrize("alone, packed", [(False, False), (False, True), (True, False), (True, True)])
def test_a_call_compiles(mode: str, alone: bool, packed: bool, on_ranks: Ranks) -> None:
    on_ranks(2, partial(in_steps, compile_a_call), mode, alone, packed)


def name_the_numbers_of_graphs(group: Any) -> None:
    cp, numbers = ContextParallel(group), dict.fromkeys(("LONG", "STEP", "LONGEST"), overlapped) | dict(TILE=stretches)
    found = {graph.names_of(cp)}
    for name, module in numbers.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, 3)
            found.add(graph.names_of(cp))
    assert len(found) == 5


def test_graphs_of_other_steps_are_others_in_the_cache(on_ranks: Ranks) -> None:
    on_ranks(2, name_the_numbers_of_graphs)


def in_steps(work: Callable[..., None], group: Any, *given: Any) -> None:
    """Heads come a few at a time, however short calls are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlapped, "LONG", 1)
        work(group, *given)


# A rank's time is up, or that of its peer, which then closes the connection.
LEFT_ALONE = "[Tt]ime|[Cc]onnection (closed|reset) by peer"


def come_alone(group: Any) -> None:
    soon, q = dist.new_group(range(2)), torch.randn(1, 16, 2, 8)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.5), soon)  # making a group may take longer under load
    if not soon.rank():
        with pytest.raises(RuntimeError, match=LEFT_ALONE):
            nsa(q, q, q, config=SMALL, cp=ContextParallel(soon))
    dist.barrier(group)


def test_a_rank_alone_does_not_wait_for_ever(tmp_path: Path) -> None:
    """In processes of its own: connections are broken then."""
    with ranks((2,), str(tmp_path / "store")) as run_ranks:
        run_ranks(2, come_alone)


def end_suddenly(group: Any) -> None:
    os._exit(3 * group.rank())


def test_a_rank_that_ends_is_said_to(tmp_path: Path) -> None:
    with ranks((2,), str(tmp_path / "store")) as run_ranks, pytest.raises(AssertionError, match="exit code 3"):
        run_ranks(2, end_suddenly)


def part_late(group: Any, mode: str) -> None:
    """Ranks come with different shapes, of which some or all were compared before: they say so, and go on."""
    cp = ContextParallel(group, mode=mode)

    def call(T: int) -> None:
        q = torch.randn(1, T, 2, 8)
        nsa(q, q, q, config=SMALL, cp=cp)

    call(16)
    for T in (32, 24):
        with pytest.raises(ValueError, match="ranks disagree on q"):
            call(T if group.rank() else 16)
        call(24)


@pytest.mark.parametrize("mode", BOTH)
def test_ranks_that_part_later_say_so(mode: str, on_ranks: Ranks) -> None:
    on_ranks(2, part_late, mode)


@st.composite
def shared(draw: st.DrawFn) -> tuple[int, bool, tuple[Any, ...]]:
    """Ranks, True for heads one after the other, and arguments of `compare`."""
    size, balance = draw(st.sampled_from(RANKS))
    mode, by_head = draw(st.sampled_from(BOTH)), draw(st.booleans())
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
        causal=draw(st.booleans()),
        gate=draw(st.sampled_from(("weight", "given", "none"))),
        compress_weights=draw(st.booleans()),
        own_keys=tuple(name for name in OWN_KEYS if draw(st.booleans())),
        seed=draw(st.integers(0, 1 << 20)),
    )
    return size, by_head, (case, mode, balance, draw(st.booleans()))


@pytest.mark.sweep
def test_drawn_calls_are_those_of_one(on_ranks: Ranks) -> None:
    no_block = Case(T=4, Hq=2, Hkv=2, D=4, dtype=torch.float64, config=SMALL, own_keys=("v_cmp",))

    @settings(max_examples=100, deadline=None, database=None)
    @given(shared())
    @example((2, True, (no_block, "heads", "zigzag", False)))
    def draw(call: tuple[int, bool, tuple[Any, ...]]) -> None:
        size, by_head, arguments = call
        on_ranks(size, compare_steps if by_head else compare, *arguments)

    draw()
