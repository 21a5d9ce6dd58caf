"""Ranks that share sequences, on GPUs: the kernels and NCCL against the fp64 reference, and compiled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_cases import MODES, OnRanks, by_ranks, in_steps, part_of, step

from fuzz.rank_processes import ranks
from nsa_layer import ContextParallel, NSAConfig, nsa, selected_attention, shard_sequence, unshard_sequence
from nsa_layer.call import Aux, Call
from nsa_layer.checks import starts_of_lengths
from nsa_tools.testing.assertions import assert_close_to_reference
from nsa_tools.testing.cases import LSES, Case, make_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.sweep, pytest.mark.xdist_group("two GPUs")]

Tensor = torch.Tensor
OF_TOKENS = ("q", "k", "v", "gates", "q_index", "k_index")
SIZES = dict(Hq=8, Hkv=2, D=64, dtype=torch.bfloat16)
CONFIG = NSAConfig(block_counts=5, window_size=100)
OVERLAPPING = CONFIG.replace(compress_size=32, compress_stride=16)
INDEX = CONFIG.replace(rule="index", branches=("selected",), init_blocks=0)
PACKED = (300, 0, 1, 699)
CASES = {
    "batch": Case(**SIZES, B=2, T=1000, config=CONFIG, compress_weights=True),
    "no groups of query heads": Case(**SIZES | dict(Hq=2), B=2, T=1000, config=CONFIG),
    "packed": Case(**SIZES, lengths=PACKED, config=CONFIG, gate="given"),
    "overlapping": Case(**SIZES | dict(D=128, Hq=4), T=1000, config=OVERLAPPING, gate="none"),
    "overlapping, packed": Case(**SIZES, lengths=PACKED, config=OVERLAPPING, compress_weights=True),
    "padded": Case(**SIZES | dict(D=80), Dv=48, lengths=PACKED, config=CONFIG),
    "the paper's head dimensions": Case(**SIZES | dict(D=192), Dv=128, B=2, T=1000, config=CONFIG),
    "not causal": Case(**SIZES, T=1000, config=CONFIG, causal=False),
    "index": Case(**SIZES, B=2, T=1000, config=INDEX, gate="none", index_dim=32),
    "index, window, packed, one key": Case(
        **SIZES, lengths=PACKED, config=INDEX.replace(branches=("selected", "window")), index_dim=16, one_key=True
    ),
}


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnRanks]:
    """Two ranks with a GPU each, or one rank where a test asks for one; as many as there are GPUs, two at most."""
    count = min(2, torch.cuda.device_count())

    def run(size: int, *work: Any) -> list[Any]:
        if size > count:
            pytest.skip("needs two GPUs")
        return on_ranks(size, *work)

    with ranks((1, 2)[:count], str(tmp_path_factory.mktemp("ranks") / "store"), gpus=True) as on_ranks:
        yield run


class _Mean(torch.autograd.Function):
    """A tensor that ranks have in common: its gradient is the mean of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cp: ContextParallel) -> Tensor:
        ctx.cp = cp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        mean = d.float()
        dist.all_reduce(mean, group=ctx.cp.group)
        return (mean / ctx.cp.size).to(d.dtype), None


def whole_call(cp: ContextParallel, given: Call) -> Any:
    """`nsa` of the ranks' parts, as a call of the whole; each rank's gradient of the whole output is all of it."""
    dim = 1 if given.cu_seqlens is None else 0
    named = {name: x for name, x in given._asdict().items() if isinstance(x, Tensor) and name != "cu_seqlens"}
    parts = {name: _Mean.apply(x, cp) for name, x in named.items()}
    parts = {name: shard_sequence(x, cp, dim=dim) if name in OF_TOKENS else x for name, x in parts.items()}
    static = dict(config=given.config, causal=given.spec.causal, cu_seqlens=given.cu_seqlens)
    with_loss = given.q_index is not None
    o, aux, *losses = nsa(**parts, **static, backend="cute", cp=cp, return_aux=True, return_index_loss=with_loss)

    def whole(x: Tensor, dim: int = dim) -> Tensor:
        return unshard_sequence(x.contiguous(), cp, dim=dim)

    lses = (None if (x := getattr(aux, name)) is None else whole(x, -1) for name in LSES)
    # Each rank's gradient of the loss is its part.
    sums = [torch.stack((cp.size * x - (cp.size - 1) * x.detach(), torch.ones_like(x))) for x in losses]
    scores = None if aux.index_scores is None else whole(aux.index_scores)
    return whole(o), Aux(whole(aux.block_indices), whole(aux.gates), *lses, scores), *sums


@pytest.mark.parametrize("name, load_balance", [*((name, "zigzag") for name in CASES), ("batch", None)])
@pytest.mark.parametrize("mode", MODES)
@by_ranks(fixture="on_gpus")
def test_ranks_give_what_the_reference_gives(group: Any, mode: str, name: str, load_balance: str | None) -> None:
    cp, compare = ContextParallel(group, mode=mode, load_balance=load_balance), assert_close_to_reference
    if load_balance is not None:
        compare = in_steps(compare)
    compare(CASES[name], partial(whole_call, cp), f"cuda:{cp.rank}")


def drawn(case: Case, cp: ContextParallel, seed: int = 0) -> dict[str, Tensor]:
    """A rank's part of q, k, v, do and an index."""
    tensors = make_inputs(case, f"cuda:{cp.rank}").tensors("do")
    names = ("q", "k", "v", "do", *(name for name in ("q_index", "k_index") if name in tensors))
    return part_of({name: tensors[name].roll(seed) for name in names}, cp, 0 if case.lengths else 1)


def call_of(case: Case, cp: ContextParallel, **more: Any) -> Any:
    """`nsa` of ranks, with the loss of an index."""
    return partial(nsa, config=case.config, causal=case.causal, cp=cp, return_index_loss=case.index_dim > 0, **more)


@pytest.mark.parametrize("T", [1000, 1 << 16])  # the longer one exchanges beside attention
@pytest.mark.parametrize("name", ["batch", "index"])
@pytest.mark.parametrize("mode", MODES)
@by_ranks(fixture="on_gpus")
def test_the_same_bits_twice(group: Any, mode: str, name: str, T: int) -> None:
    cp, case = ContextParallel(group, mode=mode), replace(CASES[name], B=1, T=T, compress_weights=False)
    case = replace(case, config=case.config.replace(deterministic=True))
    tensors, attend = drawn(case, cp), call_of(case, cp)
    first = step(attend, tensors)
    for _ in range(3):
        assert all(x.equal(y) for x, y in zip(step(attend, tensors), first))


@pytest.mark.parametrize("name", ["batch", "index"])
@pytest.mark.parametrize("mode", MODES)
@by_ranks(fixture="on_gpus")
def test_a_call_is_captured_in_a_graph(group: Any, mode: str, name: str) -> None:
    cp, case = ContextParallel(group, mode=mode), CASES[name]
    case = replace(case, config=case.config.replace(deterministic=True), compress_weights=False)
    tensors, attend = drawn(case, cp), call_of(case, cp)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(attend, tensors)
    torch.cuda.current_stream().wait_stream(side)
    dist.barrier(group)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        static = step(attend, tensors)
    fresh = drawn(case, cp, seed=1)
    for name, x in tensors.items():
        x.copy_(fresh[name])
    graph.replay()
    assert all(x.equal(y) for x, y in zip(static, step(attend, fresh)))


@pytest.mark.parametrize("mode", MODES)
@by_ranks(fixture="on_gpus")
def test_calls_in_a_row_hold_the_memory_of_one(group: Any, mode: str) -> None:
    """Also those that a GPU has not begun."""
    cp, case = ContextParallel(group, mode=mode), replace(CASES["index"], B=1, T=1 << 14)
    tensors, attend = drawn(case, cp), call_of(case, cp)
    for _ in range(2):
        step(attend, tensors)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda._sleep(1 << 30)
    for _ in range(4):
        step(attend, tensors)
    stats = torch.cuda.memory_stats()
    assert stats["active_bytes.all.peak"] < 1.05 * stats["allocated_bytes.all.peak"]


ALONE = [(1, "gather", name) for name in ("packed", "not causal", "lists")]


TOGETHER = [(2, mode, name) for mode in MODES for name in ("batch", "index")]


@pytest.mark.parametrize("size, mode, name", [*TOGETHER, *ALONE])
@by_ranks(size=None, fixture="on_gpus")
def test_a_call_compiles_whole(group: Any, mode: str, name: str) -> None:
    """Inductor gives memory of what is sent to others as soon as nothing waits for it."""
    cp, case = ContextParallel(group, mode=mode), CASES["batch" if name == "lists" else name]
    tensors, starts, lists = drawn(case, cp), None, ()
    if case.lengths:
        starts = starts_of_lengths(case.lengths, "cuda")
    attend = call_of(case, cp, cu_seqlens=starts)
    if name == "lists":
        lists = [torch.zeros_like(tensors["k"][..., :1]).int()]
        attend = partial(selected_attention, block_size=64, cu_seqlens=starts, cp=cp)
    expected, got = step(attend, tensors, *lists), step(torch.compile(attend, fullgraph=True), tensors, *lists)
    torch.testing.assert_close(got, expected, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("mode", MODES)
@by_ranks(fixture="on_gpus")
def test_ranks_attend_to_lists(group: Any, mode: str, by_head: bool) -> None:
    """Against the eager backend's call of the whole; by head gathering ranks write dq of some heads in place."""
    cp, case = ContextParallel(group, mode=mode), Case(**SIZES, T=1000, config=CONFIG)
    inputs = make_inputs(case, f"cuda:{cp.rank}")
    lists = torch.randint(-1, 15, (1, 1000, 2, 5), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    lists, attend = lists.to(inputs.q.device), partial(selected_attention, block_size=64)
    expected = step(partial(attend, backend="eager"), inputs.tensors("do"), lists)
    of_rank = in_steps(step) if by_head else step
    got = of_rank(partial(attend, cp=cp), drawn(case, cp), shard_sequence(lists, cp).contiguous())
    for x, y in zip(got, expected, strict=True):
        error = (x - shard_sequence(y, cp)).float().abs().max()
        assert error <= 2**-6 * y.float().abs().max(), error


@pytest.mark.parametrize("mode", MODES)
@by_ranks(fixture="on_gpus")
def test_every_rank_says_what_is_wrong_with_numbers(group: Any, mode: str) -> None:
    """One rank's starts are wrong, or not the others', in a call made before: every rank says so, and goes on."""
    cp, case = ContextParallel(group, mode=mode), Case(**SIZES, lengths=PACKED, config=CONFIG)
    q, k, v, _ = drawn(case, cp).values()
    starts = starts_of_lengths(PACKED, q.device)
    lists = torch.zeros(*k.shape[:2], 1, dtype=torch.int32, device=q.device)
    for attend in (partial(nsa, config=CONFIG), partial(selected_attention, block_size=64)):
        attend = partial(attend, q, k, v, block_indices=lists, cu_seqlens=starts, cp=cp, validate=True)
        for place, number, said in (
            (-1, 99, "must end at the 1000 tokens of"),
            (2, 1, "disagree on the tokens of sequence 1 in cu_seqlens"),
        ):
            attend()
            starts[place] += number * cp.rank
            with pytest.raises(ValueError, match=said):
                attend()
            starts[place] -= number * cp.rank
        attend()
