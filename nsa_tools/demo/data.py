"""Text on disk as training and held-out bytes, cut into sequences."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from nsa_tools.demo.demo_config import DemoError

# Installed packages are not the standard library; its tests hold generated tables and deliberately broken source.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
HELD_OUT_EVERY = 10


@dataclass(frozen=True)
class Text:
    """Bytes to train on and bytes held out, uint8 [n] each.

    Attributes:
        files: how many files they come from.
        sha256: of both parts, to tell whether a continued run still sees the same text.
    """

    train: torch.Tensor
    held_out: torch.Tensor
    files: int
    sha256: str


def standard_library() -> list[Path]:
    """The running interpreter's own modules, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = [path for path in root.rglob("*.py") if not SKIPPED & set(path.relative_to(root).parts)]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def load_text(paths: Sequence[str | Path], *, seqlen: int) -> Text:
    """Read files (of none, the standard library) and hold out every tenth; of fewer than ten, the last tenth of each.

    Raises:
        DemoError: a file cannot be read, or a part is shorter than a sequence and the byte after it.
    """
    files = [Path(path) for path in paths] or standard_library()
    if not files:
        raise DemoError("this interpreter has no standard library source on disk: name text files with --text")
    contents = [_read(path) for path in files]
    if len(contents) < HELD_OUT_EVERY:
        cuts = [len(content) - len(content) // HELD_OUT_EVERY for content in contents]
    else:
        cuts = [len(content) * ((i + 1) % HELD_OUT_EVERY > 0) for i, content in enumerate(contents)]
    train = b"".join(content[:cut] for content, cut in zip(contents, cuts))
    held_out = b"".join(content[cut:] for content, cut in zip(contents, cuts))
    for name, part in (("training", train), ("held-out", held_out)):
        if len(part) <= seqlen:
            raise DemoError(
                f"the {name} text must be longer than seqlen={seqlen} bytes, got {len(part)} "
                f"(of {sum(map(len, contents))} bytes in {len(files)} files, a tenth is held out)"
            )
    digest = hashlib.sha256(len(train).to_bytes(8, "little") + train + held_out).hexdigest()
    return Text(_as_tensor(train), _as_tensor(held_out), len(files), digest)


def training_batch(text: Text, *, seed: int, step: int, batch: int, seqlen: int) -> torch.Tensor:
    """The sequences of one step, int64 [batch, seqlen + 1]; they depend on seed and step only."""
    # Hashed, since PyTorch's CPU generator keeps only the low 32 bits of its seed.
    mixed = hashlib.sha256(f"{seed} {step}".encode()).digest()[:4]
    generator = torch.Generator().manual_seed(int.from_bytes(mixed, "little"))
    starts = torch.randint(len(text.train) - seqlen, (batch,), generator=generator)
    return torch.stack([text.train[start : start + seqlen + 1] for start in starts]).long()


def held_out_windows(text: Text, *, windows: int, seqlen: int) -> torch.Tensor:
    """Evenly spaced held-out sequences, int64 [windows, seqlen + 1]."""
    starts = torch.linspace(0, len(text.held_out) - seqlen - 1, windows, dtype=torch.float64).long()
    return torch.stack([text.held_out[start : start + seqlen + 1] for start in starts]).long()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DemoError(f"text file {path} cannot be read: {error.strerror}") from error


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
