"""Ctrl-C and SIGTERM as a request to end after the current step."""

from __future__ import annotations

import signal
import sys
import threading


class StopRequest:
    """While entered, SIGINT and SIGTERM set ``signal`` instead of ending the program; a second one ends it at once.

    Outside the main thread, where Python allows no signal handlers, it does nothing.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._previous = {n: signal.signal(n, self._handle) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: object) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
        print("\nstopping after this step; once more to stop at once", file=sys.stderr)
