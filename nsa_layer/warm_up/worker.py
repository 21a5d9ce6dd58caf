"""`python -m nsa_layer.warm_up.worker`: compiles the kernels of calls, several at once; started by `api`.

Reads an `Order` from its standard input and forks: what the compiler imports is imported once. Writes, where outcomes
are asked for, their number and then each `Outcome`, or the error that prevents all. It ends, with everything that it
forked, when whoever started it closes the input or ends.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from functools import partial
from typing import BinaryIO

from nsa_layer.warm_up.lookup import Order, Outcome, Wanted, attempt, kernel_files

PATIENCE = 2.0  # seconds before a line says what is waited for
# Those that take longest come first: a step waits for the last one.
SLOW = ("bwd_dq", "nsa_block_topk", "fwd", "bwd_dkdv", "bwd", "nsa_token_topk", "nsa_gated_sum_backward")


def main() -> None:
    order: Order = pickle.load(sys.stdin.buffer)
    compile_all(order, os.dup(0), os.fdopen(os.dup(1), "wb"))


def compile_all(order: Order, source: int, out: BinaryIO) -> None:
    """Compile the kernels of an order, in processes that are forked for it.

    Args:
        source: a pipe's end for reading; this process and the others end when the other end is closed.
        out: for the outcomes.
    """
    begin = time.monotonic()
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.dup2(2, 1)  # what the compiler prints must not go where outcomes do
    try:
        kernels = _kernels(order)
    except Exception as error:
        return _tell(out, error)
    _tell(out, len(kernels))
    fork = multiprocessing.get_context("fork")
    with fork.Pool(max(1, min(order.jobs, len(kernels))), partial(_end_with, source)) as pool:
        _end_with(source)
        line = threading.Timer(max(0.0, begin + PATIENCE - time.monotonic()), _say, (kernels,))
        line.daemon = True
        if order.progress:
            line.start()
        for outcome in pool.imap_unordered(partial(attempt, wait=order.wait), kernels):
            _tell(out, outcome)
        line.cancel()


def _kernels(order: Order) -> list[Wanted]:
    """The kernels of all calls, each once; imports what compiles them."""
    found: dict[str, Wanted] = {}
    for call in order.calls:
        for name, file in kernel_files(call).items():
            found.setdefault(name, Wanted(name, file, call))
    if not all(kernel.file.exists() for kernel in found.values()):
        from flash_attn.cute.runtime.lazy_imports import import_compiler

        import_compiler()
    ranks = {name: rank for rank, name in enumerate(SLOW)}
    return sorted(found.values(), key=lambda kernel: ranks.get(kernel.name.split("/")[0], len(SLOW)))


def _say(kernels: list[Wanted]) -> None:
    missing = sum(not kernel.file.exists() for kernel in kernels)
    if missing:
        text = f"nsa_layer: compiling {missing} of {len(kernels)} kernels, once per configuration\n"
        os.write(2, text.encode())


def _tell(out: BinaryIO, said: int | Outcome | Exception) -> None:
    pickle.dump(said, out)
    out.flush()


def _end_with(source: int) -> None:
    """End this process when the other end of a pipe is closed."""

    def wait() -> None:
        os.read(source, 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    main()
