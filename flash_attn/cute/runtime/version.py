"""The version of this copy of the package, whatever other copies are installed."""

from importlib.metadata import distributions
from pathlib import Path

UNKNOWN = "0+unknown"


def _version_of_this_copy() -> str:
    try:
        from flash_attn.cute import build_info
    except ImportError:
        return _version_of_owner(Path(__file__).parents[1] / "__init__.py")
    return build_info.VERSION


def _version_of_owner(file: Path) -> str:
    """Version of the installed flash-attn-4 that `file` belongs to.

    Without the build's marker, a distribution of the right name may still describe another copy
    (a source tree in front of an installed wheel), so it has to own the very file.
    """
    for found in distributions(name="flash-attn-4"):
        owned = Path(found.locate_file("flash_attn/cute/__init__.py"))
        if owned.exists() and owned.samefile(file):
            return found.version
    return UNKNOWN


__version__ = _version_of_this_copy()
