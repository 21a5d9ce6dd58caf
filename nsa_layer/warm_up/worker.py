"""`python -m nsa_layer.warm_up.worker FD`: the helper process, which compiles the kernels of calls, several at once.

Receives each order over the connection and forks to compile, so that what the compiler imports is imported once. Of
an order ahead of calls it sends the number of kernels and then each `Kernel`, or the error that prevents all. Of others
a line on standard error says how many kernels are compiled. It ends when it had nothing to do for a while, or when the
process that started it closes the connection or ends, and all that it forked ends with it.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import sys
import threading
import warnings
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection

from nsa_layer.call import Signature
from nsa_layer.warm_up.jobs import Kernel
from nsa_layer.warm_up.lookup import compile_kernel, kernel_files

IDLE = 300.0  # seconds without an order before it ends
PROGRESS = "NSA_COMPILE_PROGRESS"
# Kernels that compile longest come first: a step waits for the last one.
SLOW = ("bwd_dq", "nsa_block_topk", "fwd", "bwd_dkdv", "bwd", "nsa_token_topk", "nsa_gated_sum_backward")


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    warnings.simplefilter("ignore")
    os.dup2(2, 1)  # the compiler's prints are none of the program's output
    _end_with(connection.fileno())
    while connection.poll(IDLE):
        try:
            calls, jobs, ahead = connection.recv()
        except EOFError:
            return
        compile_order(calls, jobs, ahead, connection)


def compile_order(calls: Sequence[Signature], jobs: int, ahead: bool, connection: Connection) -> None:
    """Compile the kernels of calls in as many processes, forked for it, as there are jobs; ahead of the calls kernels
    are sent back, and ones in another process are waited for."""
    try:
        kernels = _kernels(calls)
    except Exception as error:
        if ahead:
            return connection.send(error)
        return _say(f"compiling one kernel after the other: {type(error).__name__}: {error}")
    missing = sum(not kernel.file.exists() for kernel in kernels)
    if ahead:
        connection.send(len(kernels))
    elif missing and os.environ.get(PROGRESS, "1") != "0" and os.environ.get("LOCAL_RANK", "0") == "0":
        _say(f"compiling {missing} of {len(kernels)} kernels, once per configuration")
    fork = multiprocessing.get_context("fork")
    with fork.Pool(max(1, min(jobs, len(kernels))), partial(_end_with, connection.fileno())) as pool:
        for kernel in pool.imap_unordered(partial(compile_kernel, wait=ahead), kernels):
            if ahead:
                connection.send(kernel)


def _kernels(calls: Sequence[Signature]) -> list[Kernel]:
    """The kernels of all calls, each once, slow ones first; imports what compiles them."""
    kernels = {name: Kernel(name, file, call) for call in calls for name, file in kernel_files(call).items()}
    if not all(kernel.file.exists() for kernel in kernels.values()):
        from flash_attn.cute.runtime.lazy_imports import import_compiler

        import_compiler()
    ranks = {name: rank for rank, name in enumerate(SLOW)}
    return sorted(kernels.values(), key=lambda kernel: ranks.get(kernel.name.split("/")[0], len(SLOW)))


def _say(text: str) -> None:
    os.write(2, f"nsa_layer: {text}\n".encode())


def _end_with(fd: int) -> None:
    """End this process when the other end of the connection is closed."""
    poll = select.poll()
    poll.register(fd, 0)  # hang-ups alone; another thread reads orders

    def wait() -> None:
        poll.poll()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    main()
