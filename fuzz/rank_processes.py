"""Processes that are the ranks of a group, and run what a test hands to them."""

from __future__ import annotations

import faulthandler
import multiprocessing
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

import nsa_layer  # noqa: F401, once for all processes: they are forked from one that has it

Work = Callable[..., Any]
TIMEOUT = 240.0  # of work that compiles, on a machine with other work to do; waits for a peer end after half of it


@contextmanager
def ranks(
    sizes: Sequence[int], store: str, *, gpus: bool = False, preload: Sequence[str] = ()
) -> Iterator[Callable[..., list[Any]]]:
    """Processes of the default group, as many as the largest of `sizes`, and a function that has work done.

    The function takes a size, work and its arguments: each of the first ranks calls ``work(group, *args)`` with the
    group of that size, and what they return is given back, by rank. Work is a function of a module. An exception
    becomes an AssertionError with every rank's traceback.

    Args:
        store: a path for the rendezvous, where there is no file.
        gpus: each rank has one, and the groups are of NCCL; otherwise of gloo.
        preload: modules that are imported once for all ranks, if these are the process's first ones.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *preload])
    pipes, processes = [], []
    for rank in range(max(sizes)):
        here, there = context.Pipe()
        arguments = (rank, tuple(sizes), store, gpus, there)
        processes.append(context.Process(target=_serve, args=arguments, daemon=True))
        processes[-1].start()
        there.close()  # or a process that ends would leave an open end
        pipes.append(here)

    def run(size: int, work: Work, *args: Any) -> list[Any]:
        for pipe in pipes[:size]:
            pipe.send((size, work, args))
        answers = [_answer(pipe, process) for pipe, process in zip(pipes[:size], processes)]
        failed = [f"rank {rank}:\n{answer}" for rank, (done, answer) in enumerate(answers) if not done]
        assert not failed, "\n".join(failed)
        return [answer for _, answer in answers]

    try:
        yield run
    finally:
        for process in processes:
            process.kill()
            process.join()


def _answer(pipe: Connection, process: BaseProcess) -> tuple[bool, Any]:
    """True and what work returned, or False and what went wrong."""
    try:
        return pipe.recv() if pipe.poll(TIMEOUT) else (False, "no answer")
    except (EOFError, ConnectionError):
        process.join(1)
        return False, f"the process ended, exit code {process.exitcode}"


def _serve(rank: int, sizes: tuple[int, ...], store: str, gpus: bool, pipe: Connection) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    if gpus:
        torch.cuda.set_device(rank)
    options = dict(init_method=f"file://{store}", rank=rank, world_size=max(sizes))
    dist.init_process_group("nccl" if gpus else "gloo", **options, timeout=timedelta(seconds=TIMEOUT / 2))
    groups = {size: dist.new_group(range(size)) for size in sizes}
    while True:
        size, work, args = pipe.recv()
        try:
            pipe.send((True, work(groups[size], *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
