"""Errors of the user's, or decisions left to the user: printed as one message, never as a traceback."""

from __future__ import annotations


class QueueError(Exception):
    """A message that names the file (and line) at fault and, where there is one, the remedy."""


def located(path: object, line: int | None, message: str) -> QueueError:
    """The error `path:line: message`, the form that editors and CI understand."""
    place = f"{path}:{line}" if line is not None else f"{path}"
    return QueueError(f"{place}: {message}")
