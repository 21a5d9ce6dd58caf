"""Names whose modules are imported when the names are first used.

A call whose kernels are in the cache on disk takes milliseconds, but what kernels are written in takes seconds to
import: quack alone brings torch._dynamo and triton. So nothing is imported to compile until something is compiled.
"""

from importlib import import_module
from typing import Any

from flash_attn.cute.own_device import check_target


def import_compiler() -> None:
    """Import what every kernel is compiled with; cheap after the first time.

    quack teaches the DSL's tensors and its preprocessor more Python: without it the same source could mean something
    else, or nothing.

    Raises:
        NotImplementedError: it makes no code for the current GPU.
    """
    import_module("quack")
    check_target()


class Deferred:
    """Stands for a class or a function until it is called or an attribute of it is asked for.

    Args:
        module: full name of the module, which is imported then, and the compiler before it.
        name: the object's name there.
    """

    def __init__(self, module: str, name: str) -> None:
        self._module = module
        self._name = name

    def load(self) -> Any:
        """The object itself."""
        import_compiler()
        return getattr(import_module(self._module), self._name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.load()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copy, inspect and the like try on anything
            raise AttributeError(f"{self!r} has no attribute {name!r}")
        return getattr(self.load(), name)

    def __repr__(self) -> str:
        return f"<{self._module}.{self._name}, not imported>"
