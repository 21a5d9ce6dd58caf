"""`python -m fuzz`: draw cases for a while; `soak` and `sanitize` are commands of their own."""

from __future__ import annotations

import sys
from importlib import import_module

COMMANDS = {"soak": "fuzz.soak", "sanitize": "fuzz.sanitize"}
INTERRUPTED = 130


def main(argv: list[str]) -> int:
    try:
        if argv and argv[0] in COMMANDS:
            return import_module(COMMANDS[argv[0]]).main(argv[1:])
        return import_module("fuzz.cli").main(argv)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
