"""The commands of `python -m nsa_layer`: a module for each, with ``main(argv) -> exit status``."""

from __future__ import annotations

import os
import select
import sys
from importlib import import_module

COMMANDS = {
    "demo": "train a small language model with sparse and with dense attention, side by side",
    "bench": "time the layer against dense attention",
    "check": "check sampled rows and gradients of a call of any length against an oracle in fp64",
    "profile": "show where the time of a call goes, component by component, and how far it is from its floor",
    "memory": "predict and measure the peak memory of a shape, and find the longest that fits",
    "inspect": "print versions, patches, supported features and the backend that a shape runs on",
    "compile": "compile the kernels for an architecture, without a GPU",
}
TOOLS_EXTRA = ("matplotlib", "rich", "safetensors", "tabulate", "tqdm")  # as in pyproject.toml
BAD_ARGUMENTS = 2
INTERRUPTED = 130
NOT_READ = 141  # what a shell shows for a program that SIGPIPE ended


def usage() -> str:
    """The list of commands."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {text}" for name, text in COMMANDS.items()]
    first, last = "usage: python -m nsa_layer COMMAND [OPTION ...]", "COMMAND --help lists options."
    return "\n".join([first, "", *lines, "", last])


def main(argv: list[str]) -> int:
    """Run a command with its arguments and return its exit status.

    2 for an unknown command and for one that needs a package of the tools extra that is not there, 130 when
    interrupted, 141 when nobody reads the output any more, as in `... | head`.
    """
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    name, *rest = argv
    if name not in COMMANDS:
        print(f"unknown command {name!r}\n\n{usage()}", file=sys.stderr)
        return BAD_ARGUMENTS
    try:
        status = import_module(f"nsa_tools.commands.{name}").main(rest)
        sys.stdout.flush()
        return status
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in TOOLS_EXTRA:
            raise
        print(f"{name} needs the tools extra: pip install 'flash-attn-4[tools]'", file=sys.stderr)
        return BAD_ARGUMENTS
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        if not _reader_is_gone(sys.stdout.fileno()):
            raise  # of another pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the rest of the buffer
        return NOT_READ


def _reader_is_gone(descriptor: int) -> bool:
    """True for a pipe whose reading end is closed."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))
