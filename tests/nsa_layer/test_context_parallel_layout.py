"""Which keys a rank's queries read, which mode a call takes, and what memory it plans for."""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_cases import RANKS, SMALL, by_ranks
from stub_kernels import stubbed_layer

from nsa_layer import ContextParallel, NSAConfig, nsa
from nsa_layer.call import Call, CallSpec, Saved
from nsa_layer.checks import starts_of_lengths
from nsa_layer.context_parallel import attend, gather, gather_loop, heads
from nsa_layer.context_parallel.layout import ShardLayout, query_shards
from nsa_layer.context_parallel.spec import rank_chunks
from nsa_layer.cute.branch_options import window_options
from nsa_layer.cute.memory_plan import MemoryPlan, MemoryPolicy, predict
from nsa_layer.cute.varlen import Varlen
from nsa_layer.operators.layer import static_arguments


@pytest.mark.parametrize("tile", [1, 16])
@pytest.mark.parametrize("reach", [0, 3, 30])
@pytest.mark.parametrize("lengths", [None, (40, 0, 3, 53)])
@pytest.mark.parametrize("causal", [True, False])
def test_windows_of_ranks_see_these_keys(causal: bool, lengths: tuple[int, ...] | None, reach: int, tile: int) -> None:
    """The window's keys as the kernels' options give them: each query's first and last, as tokens of the whole.

    Args:
        tile: of gathered keys that the window reads, from a whole tile on; 1: its own keys.
    """
    call, T = CallSpec(SMALL.replace(window_size=reach + 1), causal, 1.0, lengths), 96
    ends = list(accumulate(lengths or (T,)))
    for (size, load_balance), rank in ((kind, rank) for kind in RANKS for rank in range(kind[0])):
        chunks = rank_chunks(size, load_balance)[rank]
        counts = dict(size=size, num_chunks=size * len(chunks))
        cp = SimpleNamespace(chunks=chunks, **counts, load_balance=load_balance)
        shards = query_shards(ShardLayout.of_tokens(cp, T // size), lengths or (T,), cut=causal)[rank]
        for shard, chunk in zip(shards, chunks, strict=True):
            rows, window = shard.window(call, tile=tile)
            count, begin = shard.queries.stop - shard.queries.start, chunk * T // size // len(chunks)
            first = shard.keys.start + rows.start
            q, k = (torch.empty(*(() if lengths else (1,)), n, 1, 1) for n in (count, rows.stop - rows.start))
            keys, at = zip(*window)
            of_window = dict(k_win=k, v_win=k, win_offset=torch.tensor(at), cu_seqlens_win=starts_of_lengths(keys))
            here = Call(q, k, k, spec=shard.spec(call), **of_window)
            given = window_options(here, Varlen.of(here))
            starts = given.get("cu_seqlens_q", torch.tensor([0, count])).tolist()
            of_keys = given.get("cu_seqlens_k", torch.tensor([0, rows.stop - rows.start])).tolist()
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
    from nsa_layer.cute import backward as page

    with stubbed_layer():
        called: list[tuple[Any, ...]] = []

        def backward(call: Call, *given: Any, window_adds: bool) -> tuple[None, ...]:
            called.append((call, *given[3:], window_adds))
            return (None,) * 6

        monkeypatch.setattr(page, "backward_group", backward)
        q, k = (torch.zeros(1, T, heads, 64, dtype=torch.bfloat16) for T, heads in ((150, 4), (300, 2)))
        cp = SimpleNamespace(chunks=(1,), num_chunks=2, size=2, rank=1, load_balance=None)
        spec, own = CallSpec(SMALL, True, 1.0), Call(q, k[:, :150], k[:, :150])
        monkeypatch.setattr(gather_loop, "ranks_of", lambda: cp)
        loop = gather_loop.GatherLoop(own.tensors, (*static_arguments(spec).values(), (True,) * 3, True))
        steps: list[Any] = []
        monkeypatch.setattr(loop, "_exchanged", lambda *given: steps.extend(given[0]) or [(0, dict(k=[k], v=[k]))])
        loop.gradients(q, None, *Saved())
        ((given, _, *grads, adds),), (of_keys,) = called, steps
        (dk,), (dv,) = of_keys["k"], of_keys["v"]
    assert adds and of_keys.keys() == {"k", "v"}
    for x, rows in ((k, given.k_win), (k, given.v_win), (dk, grads[2]), (dv, grads[3])):
        assert rows.shape == (1, 278, 2, 64) and rows.data_ptr() == x[:, 22:].data_ptr()


def test_gradients_of_queries_are_written_in_place() -> None:
    """Those of some heads, by the selected branch alone too: gathering ranks copy none."""
    from nsa_layer.cute import backward as page

    q, k, heads = torch.zeros(1, 150, 4, 64, dtype=torch.bfloat16), torch.zeros(1, 150, 1, 64).bfloat16(), slice(2, 4)
    lists, dq = torch.zeros(1, 150, 1, 2, dtype=torch.int32), torch.zeros_like(q)[:, :, heads]
    spec = CallSpec(NSAConfig(branches=("selected",), window_size=0), True, 1.0, listed=True)
    call, saved = Call(q[:, :, heads], k, k, block_indices=lists, spec=spec), Saved(lse_slc=torch.zeros(1, 2, 150))
    with stubbed_layer():
        plan = MemoryPlan(((0, 1),), (False,) * 3)
        assert page.backward(call, saved, q[:, :, heads], plan=plan, o=q[:, :, heads], dq=dq)[0] is dq


@by_ranks()
def test_auto_takes_heads_where_ranks_divide_them(group: Any) -> None:
    """And where they do not gather more for it; the mode that is not taken is not there."""
    cp = ContextParallel(group)
    q, k = torch.randn(1, 16, 8, 8), torch.randn(1, 16, 2, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads, "attend_heads", None)
        nsa(q[:, :, :3], q[:, :, :3], q[:, :, :3], config=SMALL, cp=cp)
        with pytest.raises(TypeError, match="not callable"):
            nsa(q, k, k, config=SMALL, cp=cp)
        patch.setattr(attend, "LONG", 32)
        nsa(q, k, k, config=SMALL, cp=cp)
        seed = SMALL.replace(rule="seed", compress_offset=0, init_blocks=0, local_blocks=0)
        for more in (dict(config=SMALL, backend="reference"), dict(config=SMALL.replace(q_tile=8)), dict(config=seed)):
            with pytest.raises(TypeError, match="not callable"):
                nsa(q, k, k, cp=cp, **more)
    dist.barrier(group)


@pytest.mark.parametrize(
    "T, Hq, Hkv, ranks, better",
    [
        (attend.LONG, 32, 8, 2, True),
        (attend.LONG - 64, 32, 8, 2, False),  # short
        (attend.LONG, 32, 8, 4, False),  # k and v take more than a fourth of all
        (attend.LONG, 64, 4, 4, True),
        (attend.LONG, 16, 16, 2, False),
    ],
)
def test_long_calls_gather_what_is_less(T: int, Hq: int, Hkv: int, ranks: int, better: bool) -> None:
    q, k = (torch.empty(1, T // ranks, H, 128, device="meta") for H in (Hq, Hkv))
    cp = SimpleNamespace(size=ranks)
    assert attend.auto_gathers(cp, Call(q, k, k), NSAConfig(), None) == better
    assert not attend.auto_gathers(cp, Call(q, k, k), None, None)  # `selected_attention`


@pytest.mark.parametrize("list_heads", [8, 32])
def test_memory_is_planned_for_lists_of_the_heads_of_a_rank(list_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []
    monkeypatch.setattr(gather, "plan_memory", lambda sizes, *_: planned.append(sizes) or SimpleNamespace(kept=[True]))
    q, k, v, lists = (torch.empty(1, 64, count, 4, device="meta") for count in (32, 8, 8, list_heads))
    call = Call(q, k, v, block_indices=lists, spec=CallSpec(SMALL, True, 1.0))
    gather.kept_of_shard(call, 128, MemoryPolicy(), queries=128, ranks=2)
    (sizes,) = planned
    assert (sizes.tokens, sizes.Hq, sizes.Hkv, sizes.rows, sizes.list_width) == (128, 16, 4, 32 // list_heads, 4)
    assert predict(sizes, 1, (True,) * 3)["forward"] > 0
