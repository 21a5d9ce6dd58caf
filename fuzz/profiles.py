"""How long and how deep: `pr` for continuous integration, `ci` for a machine without a GPU, `nightly` for all of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Profile:
    """One way to run.

    Attributes:
        minutes: unless said otherwise. passes: over all properties, at most; None: until the time is over.
        slice: seconds that a worker stays with a property, and examples it draws there at most.
        random: cases differ from run to run, and failing ones are kept in a database.
        needs: what properties may need, besides nothing.
        patience: seconds that one example may take before it counts as a hang.
    """

    minutes: float
    passes: int | None
    slice: float
    random: bool
    needs: tuple[str, ...]
    patience: float


PROFILES = {
    "pr": Profile(minutes=1, passes=1, slice=10, random=False, needs=("gpu",), patience=60),
    "ci": Profile(minutes=3, passes=None, slice=3, random=True, needs=("gpu",), patience=120),
    "nightly": Profile(minutes=10, passes=None, slice=5, random=True, needs=("gpu", "sm_90", "sm_100"), patience=180),
}
