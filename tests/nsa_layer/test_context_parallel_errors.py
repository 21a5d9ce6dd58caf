"""Ranks whose arguments are wrong or differ, and ranks that do not come: all say so, and go on."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_cases import MODES, OVERLAPPING, SMALL, OnRanks, by_ranks
from torch.distributed.device_mesh import init_device_mesh

from fuzz.rank_processes import ranks
from nsa_layer import ContextParallel, NSAttention, nsa, selected_attention, unshard_sequence
from nsa_layer.checks import starts_of_lengths
from nsa_layer.context_parallel.checks import check_same_on_all_ranks
from nsa_layer.rope import RotaryEmbedding


@pytest.mark.parametrize(
    "wrong, error, match",
    [
        ({1: dict(cp=dict(load_balance=None))}, ValueError, "ranks disagree on cp.load_balance"),
        ({-1: dict(T=15)}, ValueError, "even number of tokens"),
        ({-1: dict(heads=1, cp=dict(mode="heads"))}, ValueError, "mode='heads' needs ranks that divide the 1"),
        ({-1: dict(cu_seqlens=torch.tensor([0, 32], dtype=torch.int32))}, ValueError, "q must have shape"),
        ({-1: dict(cp="ranks")}, TypeError, "cp must be a ContextParallel"),
        ({-1: dict(config=SMALL.replace(q_tile=4), cp=dict(mode="gather"))}, NotImplementedError, "q_tile=4"),
        ({-1: dict(backend="reference", cp=dict(mode="gather"))}, NotImplementedError, "backend='reference'"),
        ({1: dict(k_cmp=torch.rand(1, 3, 2, 8)), 0: dict(k_cmp=torch.rand(1, 2, 2, 8))}, ValueError, "k_cmp must"),
    ],
)
@by_ranks()
def test_every_rank_says_what_is_wrong_with_one(group: Any, wrong: dict, error: type[Exception], match: str) -> None:
    given = dict(T=16, heads=2, config=SMALL, cp={}) | wrong.get(group.rank(), wrong.get(-1, {}))
    if isinstance(given["cp"], dict):
        given["cp"] = ContextParallel(group, **given["cp"])
    T, heads = given.pop("T"), given.pop("heads")
    k, v = torch.randn(2, 1, T, heads, 8)
    with pytest.raises(error, match=match):
        nsa(torch.randn(1, T, 4, 8), k, v, **given)


@pytest.mark.parametrize("mode", MODES)
@by_ranks()
def test_lists_of_ranks_are_padded_with_any_numbers(group: Any, mode: str) -> None:
    """A list of the last rank names a block that its sequence has not, as padding; in int64 on all ranks."""
    cp = ContextParallel(group, mode=mode, load_balance=None)
    for lengths, most in ((None, 3), ((20, 12), 1)):
        lead = (2, 16) if lengths is None else (16,)
        q, k = torch.randn(*lead, 4, 8), torch.randn(*lead, 2, 8)
        starts = None if lengths is None else starts_of_lengths(lengths)
        lists = torch.zeros(*lead, 2, 1, dtype=torch.int64)
        for call in (partial(nsa, config=SMALL), partial(selected_attention, block_size=8)):
            found = []
            for number in (-1, most + 1, 99_999_999, 2**40):
                lists[..., -1, 1, 0] = number if group.rank() else 0
                found.append(call(q, k, k, block_indices=lists, cu_seqlens=starts, cp=cp))
            assert all(o.equal(found[0]) for o in found)


STARTS = torch.tensor([0, 5, 20, 32], dtype=torch.int32)
OTHER_STARTS = torch.tensor([0, 5, 16, 32], dtype=torch.int32)
SEQUENCES = "the tokens of sequence 1 in cu_seqlens: rank 0 has (5, 20), rank 1 has (5, 16)"


class Special(torch.Tensor):
    """A class of its own, for which calls are operators."""


@pytest.mark.parametrize("mode", MODES)
@by_ranks()
def test_ranks_that_disagree_say_so(group: Any, mode: str) -> None:
    """What one rank gives differs from what the other one does: both say so at once, and go on."""
    from torch.utils.flop_counter import FlopCounterMode  # which imports Triton

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
        (dict(q=q[:8], k=k[:8], v=k[:8]), "q: rank 0 has torch.float32 (16, 4, 8)"),
        (dict(q=q.double(), k=k.double(), v=k.double()), "q"),
        (dict(q=q.as_subclass(Special)), "being in a mode of PyTorch's dispatcher"),
        (dict(v=nested), "v"),
        (dict(gates=torch.rand(16, 4, 2)), "gates: rank 0 has None"),
        (dict(k_win=k), "k_win"),
        (dict(k_cmp=torch.randn(2, 2, 8)), "k_cmp"),
        (dict(block_indices=lists), "block_indices"),
        (dict(max_seqlen=32), "max_seqlen"),
        (dict(max_seqlen=3), "max_seqlen"),
        (dict(config=SMALL.replace(block_counts=3)), "config"),
        (dict(config="small"), "config"),
        (dict(causal=False), "causal"),
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
    with FlopCounterMode(display=False) if group.rank() else nullcontext():
        with pytest.raises(ValueError, match="ranks disagree on being in a mode of PyTorch's dispatcher"):
            nsa(**common, config=SMALL, cp=cp)


@by_ranks()
def test_ranks_that_disagree_in_a_layer_say_so(group: Any) -> None:
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


class OnGpu(torch.Tensor):
    is_cuda = True


@by_ranks()
def test_known_calls_are_compared_to_validate_them(group: Any) -> None:
    """Every rank says what is wrong with one rank's numbers on a GPU, where they are validated."""
    cp, x = ContextParallel(group), torch.zeros(2).as_subclass(OnGpu)

    def wrong() -> None:
        if group.rank():
            raise ValueError("no such block")

    for validate in (False, True):
        check_same_on_all_ranks(cp, [], x=x, validate=validate)
    check_same_on_all_ranks(cp, [wrong], x=x, validate=False)
    with pytest.raises(ValueError, match="no such block"):
        check_same_on_all_ranks(cp, [wrong], x=x, validate=True)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("is_available", "is_current_stream_capturing"):
            patch.setattr(torch.cuda, name, lambda: True)
        check_same_on_all_ranks(cp, [wrong], x=x, validate=True)
        with pytest.raises(RuntimeError, match="CUDA graph capture: run a call"):
            check_same_on_all_ranks(cp, [wrong], x=x[:1], validate=True)


def test_groups_that_do_not_exist_are_refused() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        ContextParallel(None)
    with pytest.raises(ValueError, match="mode must be one of"):
        ContextParallel(None, mode="ring")
    with pytest.raises(ValueError, match="load_balance must be"):
        ContextParallel(None, load_balance="stripes")


@by_ranks(4)
def test_groups_that_do_not_fit_are_refused(group: Any) -> None:
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


@pytest.fixture
def own_ranks(tmp_path: Path) -> Iterator[OnRanks]:
    """Processes of the test's own, whose connections may break."""
    with ranks((2,), str(tmp_path / "store")) as run:
        yield run


# A rank's time is up, or that of its peer, which then closes the connection.
LEFT_ALONE = "[Tt]ime|[Cc]onnection (closed|reset) by peer"


@by_ranks(fixture="own_ranks")
def test_a_rank_alone_does_not_wait_for_ever(group: Any) -> None:
    soon, q = dist.new_group(range(2)), torch.randn(1, 16, 2, 8)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.5), soon)  # making a group may take longer under load
    if not soon.rank():
        with pytest.raises(RuntimeError, match=LEFT_ALONE):
            nsa(q, q, q, config=SMALL, cp=ContextParallel(soon))
    dist.barrier(group)


def end_suddenly(group: Any) -> None:
    os._exit(3 * group.rank())


def test_a_rank_that_ends_is_said_to(own_ranks: OnRanks) -> None:
    with pytest.raises(AssertionError, match="exit code 3"):
        own_ranks(2, end_suddenly)


@pytest.mark.parametrize("mode", MODES)
@by_ranks()
def test_ranks_that_part_later_say_so(group: Any, mode: str) -> None:
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
