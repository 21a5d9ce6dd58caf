"""Build flash-attn-4: upstream's pinned wheel, our patches, modules and packages, as one plain distribution."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel
from setuptools.command.egg_info import egg_info

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from patches.digest import overlay_files  # noqa: E402
from patches.errors import QueueError  # noqa: E402
from patches.materialise import installed_files, load_pin, own_package_files, write_files  # noqa: E402
from patches.tree import DEFAULT, make_tree  # noqa: E402
from patches.wheel import fetch, licence_files  # noqa: E402

# Upstream's licence and authors, written here by the build because they are part of what it installs.
LICENCES = "upstream-licenses"
OWN = [*overlay_files(ROOT), *own_package_files(ROOT)]


class BuildPackage(build_py):
    """Writes the files of a wheel; nothing that an earlier build left behind gets into it."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        write_files(Path(self.build_lib), _or_exit(installed_files, ROOT))

    def get_source_files(self) -> list[str]:
        return OWN

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [str(path) for path in Path(self.build_lib).rglob("*") if path.is_file()]


class EditableTree(editable_wheel):
    """Makes the tree that a `.pth` file then puts on Python's path, with our own modules linked into it."""

    def run(self) -> None:
        _or_exit(_refuse_hidden_namespace)
        _or_exit(make_tree, ROOT, ROOT / DEFAULT)
        super().run()


class Metadata(egg_info):
    """Adds upstream's licence and authors to the distribution's own."""

    def finalize_options(self) -> None:
        # The folder that the packages are in, the default, is not there before the first build.
        self.egg_base = self.egg_base or "."
        super().finalize_options()

    def run(self) -> None:
        folder = ROOT / LICENCES
        folder.mkdir(exist_ok=True)
        upstream = _or_exit(lambda: licence_files(fetch(load_pin(ROOT))))
        for name, data in upstream.items():
            (folder / name).write_bytes(data)
        self.distribution.metadata.license_files = ["LICENSE", *(f"{LICENCES}/{name}" for name in upstream)]
        super().run()


def _or_exit(call, *args):
    """The result of a step of the build; an error that the user has to know is printed without a traceback."""
    try:
        return call(*args)
    except QueueError as error:
        sys.exit(f"error: {error}")


def _refuse_hidden_namespace() -> None:
    """FlashAttention-2's flash_attn/__init__.py makes Python look for flash_attn.cute beside it and nowhere else."""
    # -E: the build's own isolation goes by PYTHONPATH, and what counts is where the installed package will run.
    code = "import sys; print('\\n'.join(path for path in sys.path if path))"
    paths = subprocess.run([sys.executable, "-E", "-c", code], capture_output=True, text=True, cwd=os.path.sep).stdout
    for path in paths.splitlines():
        if (Path(path) / "flash_attn" / "__init__.py").is_file():
            raise QueueError(
                f"{path} holds a flash_attn package of its own (FlashAttention-2), beside which an editable install of"
                " flash_attn.cute is not found.\nRemedy: install the wheel (`pip install .`), or uninstall flash-attn."
            )


setup(
    version=_or_exit(load_pin, ROOT).local_version,
    # Their files come from the commands above.
    packages=sorted({name.rpartition("/")[0].replace("/", ".") for name in OWN if name.endswith(".py")}),
    package_dir={"": DEFAULT},
    cmdclass={"build_py": BuildPackage, "editable_wheel": EditableTree, "egg_info": Metadata},
)
