"""A process that checks properties: jobs come in as lines of JSON, outcomes go out as lines of JSON.

Before each example its case is written to a file, so that whoever watches can say which one hung or killed the process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any


class Diary:
    """The case that is being checked, and since when: a file that is overwritten in place."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)

    def note(self, prop: str, case: object) -> None:
        entry = json.dumps({"since": time.monotonic(), "property": prop, "case": repr(case)}).encode() + b"\n"
        os.pwrite(self._file, entry, 0)
        os.ftruncate(self._file, len(entry))

    def clear(self) -> None:
        os.ftruncate(self._file, 0)


def read_diary(path: Path) -> dict[str, Any] | None:
    """What the worker is at, or None where it is at nothing."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def main() -> int:
    setup = json.loads(sys.stdin.readline())
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever prints goes elsewhere
    from fuzz.mutations import planted
    from fuzz.prop import properties
    from fuzz.run import Budget, quiet_threads, run_property

    known, diary = properties(), Diary(Path(setup["diary"]))
    with ExitStack() as stack:
        stack.enter_context(quiet_threads())
        if setup["mutation"]:
            stack.enter_context(planted(setup["mutation"]))
        print(json.dumps({"ready": os.getpid()}), file=out, flush=True)
        for line in sys.stdin:
            job = json.loads(line)
            prop = known[job["property"]]
            outcome = run_property(
                prop, Budget(**job["budget"]), kind=job["kind"], before=lambda case: diary.note(prop.name, case)
            )
            diary.clear()
            print(json.dumps(outcome.plain()), file=out, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
