"""Calls that two ranks share, processes on gloo: they agree on what they were given, or both say what differs."""

from __future__ import annotations

import atexit
import itertools
import tempfile
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from fuzz import mutations, strategies
from fuzz.case import CALLS, Ranks
from fuzz.prop import holds
from fuzz.rank_processes import ranks
from nsa_layer import ContextParallel, NSAConfig, nsa, selected_attention, unshard_sequence
from nsa_layer.checks import starts_of_lengths

# For which a rank waits for the other one, on a machine with other work to do; and with a fault, for which it may.
SECONDS, WITH_FAULT = 8.0, 2.5
CONFIG = NSAConfig(block_size=4, block_counts=3, window_size=4)
INDEX = CONFIG.replace(rule="index", branches=("selected",), init_blocks=0, local_blocks=1)


class Special(torch.Tensor):
    """A class of its own, whose tensors are exchanged by other means."""


@holds("ranks.agree or say so", strategies.ranks, pr=20)
def agree_or_say_so(case: Ranks) -> None:
    """Both ranks refuse what differs between them, and nothing else."""
    said = _run(call, case, mutations.PLANTED)
    if not case.differs:
        assert said == [None, None], f"two equal calls are refused: {said}"
        return
    assert all(each is not None for each in said), f"ranks take what differs between them: {said}"
    assert all(each.startswith(("ranks disagree on ", "rank 1: ", case.differs)) for each in said), said


def call(group: Any, case: Ranks, planted: list[str]) -> str | None:
    """A rank's call: None, or what its ValueError or TypeError says."""
    group = _impatient(group.size())
    seconds = WITH_FAULT if planted else SECONDS
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
    with mutations.planted(planted[-1], load=False) if planted else nullcontext():
        cp = ContextParallel(group, mode=case.mode, load_balance=case.load_balance)
        try:
            _call(cp, case)
        except (TypeError, ValueError) as error:
            return str(error)
    return None


@lru_cache(maxsize=1)
def _impatient(size: int) -> Any:
    """A group whose ranks need not wait long for one another, after calls for which modules are imported; the same at
    every call of a process."""
    group = dist.new_group(range(size))
    for name, mode in itertools.product(CALLS, ("heads", "gather")):
        _call(ContextParallel(group, mode), Ranks(call=name))
    return group


def _call(cp: ContextParallel, case: Ranks) -> None:
    other = case.differs if cp.rank else ""
    lengths = case.others if other == "cu_seqlens" else case.lengths
    packed, local = lengths is not None, case.tokens + 2 * (other == "tokens")
    lead = (local,) if packed else (1, local)
    q, k = torch.randn(*lead, 4, 4), torch.randn(*lead, 2, 4)
    if other == "class":
        q = q.as_subclass(Special)
    if case.call == "unshard_sequence":
        unshard_sequence(q, cp, dim=0 if packed else 1)
        return
    starts = starts_of_lengths(lengths) if packed else None
    given = dict(q=q, k=k, v=k, cu_seqlens=starts, cp=cp)
    if case.validate:
        given["validate"] = True
    if other == "option":
        given["validate"] = "yes"
    if case.call == "index":
        _, loss = nsa(**given, config=INDEX, q_index=k, k_index=k[..., :1, :], return_index_loss=True)
        losses: list[Any] = [None] * cp.size
        dist.all_gather_object(losses, loss.item(), group=cp.group)
        assert losses[0] == losses[1], f"the index' loss of one call is {losses} on its ranks"
        return
    if case.call == "nsa":
        nsa(**given, config=CONFIG)
        return
    every = 2 if other == "tiles" else 1
    lists = torch.zeros(*lead[:-1], local // every, 2, 1, dtype=torch.int32)
    selected_attention(**given, block_indices=lists, block_size=4)


_held = ExitStack()
atexit.register(_held.close)


def _run(*work: Any) -> list[Any]:
    """What both ranks return; after a failure others start."""
    if not hasattr(_held, "run"):
        folder = _held.enter_context(tempfile.TemporaryDirectory())
        _held.run = _held.enter_context(ranks((2,), f"{folder}/store", preload=(__name__,)))
    try:
        return _held.run(2, *work)
    except AssertionError:
        del _held.run
        _held.close()
        raise
