"""The version of this copy of the package, whatever other copies are installed."""

from importlib.metadata import distributions
from pathlib import Path

UNKNOWN = "0+unknown"


def _version_of_this_copy() -> str:
    """The version of build_info, else of the installed flash-attn-4 that owns this file: another installed copy may be
    hidden by a source tree."""
    try:
        from flash_attn.cute import build_info

        return build_info.VERSION
    except ImportError:
        file = Path(__file__).parents[1] / "__init__.py"
    for found in distributions(name="flash-attn-4"):
        owned = Path(found.locate_file("flash_attn/cute/__init__.py"))
        if owned.exists() and owned.samefile(file):
            return found.version
    return UNKNOWN


__version__ = _version_of_this_copy()
