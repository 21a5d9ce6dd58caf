"""Upstream's own tests, run on a GPU against the patched build and compared with what stock does with them.

Nothing of upstream's tests is in this repository: the user names a checkout, whose tests/cute is copied into the
ignored folder .upstream/, with the pinned wheel's package for runs of stock. That folder can be carried to a GPU.
A run is cut into parts; each case's outcome is kept as soon as it is known, and later parts go on from there.
What stock does was recorded by the same command, in upstream_tests.json, together with the hash of the tests.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from patches.errors import QueueError
from patches.gitrepo import Git
from patches.materialise import load_pin, write_files
from patches.wheel import Pin, digest, fetch, package_files

FOLDER = ".upstream"
RECORD = "patches/upstream_tests.json"
TESTS = "tests/cute"
SAMPLED = ("test_flash_attn",)
FILES = (
    "test_flash_attn_fast",
    "test_mask_mod",
    "test_mask_mod_varlen",
    "test_score_mod",
    "test_score_mod_varlen",
    "test_block_sparsity",
    "test_flash_attn_varlen",
    "test_flash_attn_combine",
    "test_utils",
    "test_cache_utils",
    *SAMPLED,
)
# Skips on SM90 of what the fork adds there.
LIFTED = ("deterministic bwd only", r"padded Q \+ packed K")
KINDS = ("passed", "failed", "skipped")
GPU_MEMORY_OF_ONE = 8 << 30  # bytes of the largest cases
PART_VARIABLE = "UPSTREAM_TESTS"
NO_RECORD = {"tests": None, "files": {}, "cards": {}, "failed": []}


@dataclass(frozen=True)
class Part:
    """What one run of pytest is to do; the plugin reads it.

    Attributes:
        stock: the build that must be imported.
        results, left: files that get a line for each outcome, and for each case that the time did not suffice for.
        collected: a file that gets the number of cases of each file of tests, of all shards, as JSON.
        deadline: seconds since the epoch after which no case is begun.
        shard: (number from 1, count).
        again: outcomes that are not final: their cases run once more.
        unskipped: run exactly these cases, without skips whose reasons match `lifted`.
        sampled, sample, seed: files of which each test keeps at most `sample` of its cases, drawn with `seed`.
    """

    stock: bool
    results: str
    left: str
    collected: str
    deadline: float
    shard: tuple[int, int] = (1, 1)
    again: tuple[str, ...] = ()
    unskipped: tuple[str, ...] | None = None
    lifted: tuple[str, ...] = LIFTED
    sampled: tuple[str, ...] = SAMPLED
    sample: int = 100
    seed: int = 0


def test_upstream(
    root: Path,
    checkout: Path,
    *,
    stock: bool = False,
    any_commit: bool = False,
    shard: tuple[int, int] = (1, 1),
    workers: int | None = None,
    minutes: float = 60,
    only: str | None = None,
    kernels: Path | None = None,
) -> int:
    """Run a part, print every file's counts beside those of stock, and return 1 for failures that stock lacks.

    Args:
        checkout: of upstream, at the tag of the pin; or the folder .upstream that an earlier call made.
        stock: run the pinned wheel's own package. Outcomes of files that ended are recorded.
        any_commit: with `stock`, take tests of another commit than the pin's tag.
        workers: processes; as many as the memory of a GPU is enough for, unless given.
        minutes: no case is begun later than this after the start.
        only: the name of one file.
        kernels: where compiled kernels are kept between parts.

    Raises:
        QueueError: not a checkout of the pin, tests that stock was not recorded with, or pytest could not run.
    """
    folder = root / FOLDER
    source = _take(root, checkout.absolute(), folder, any_commit=stock and any_commit)
    if not _card():
        raise QueueError(
            f"no GPU here; {folder} is ready to be carried to one, and named there in place of the checkout"
        )
    files = FILES if only is None else (only,)
    record = _record(root)
    if not stock and record["tests"] != source["tests"]:
        raise QueueError(f"{RECORD} is of other tests than these; record stock's outcomes with --stock first")
    name, workers = "stock" if stock else "patched", workers or _workers()
    results, left, collected = (folder / f"{name}.{ending}" for ending in ("jsonl", "left", "collected"))
    left.unlink(missing_ok=True)
    part = Part(stock, str(results), str(left), str(collected), time.time() + 60 * minutes, shard)
    run = dict(folder=folder, kernels=kernels or folder / f"kernels-{name}")
    _pytest(part, files, workers=workers, **run)
    # So many processes share one GPU's memory: what failed runs once more with few of them.
    if set(_failed(_of_files(outcomes(results), files))) - set(record["failed"]):
        _pytest(replace(part, again=("failed",)), files, workers=max(1, workers // 8), **run)
    ended = outcomes(results)
    unfinished = len(set(left.read_text(encoding="utf-8").splitlines())) if left.is_file() else 0
    if stock:
        print(table(counts(ended), {}))
        print(f"{unfinished} cases of this part are left")
        if files := _complete(ended, json.loads(collected.read_text(encoding="utf-8"))):
            _write_record(root, source, ended, files)
        return int(bool(unfinished))
    lifted = _lifted(ended)
    unskipped = folder / "unskipped.jsonl"
    if set(lifted) - set(outcomes(unskipped)):
        files = tuple(file for file in FILES if any(case.startswith(f"{file}.py::") for case in lifted))
        _pytest(replace(part, results=str(unskipped), unskipped=lifted), files, workers=workers, **run)
    return _compare(ended, outcomes(unskipped), record, unfinished)


def outcomes(path: Path) -> dict[str, tuple[str, str]]:
    """(outcome, reason) of each case: of its last run, in which it failed if any phase of it did."""
    ended: dict[str, tuple[str, str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        name, outcome, reason = json.loads(line)
        ended[name] = outcome, reason
    return ended


def _failed(ended: dict[str, tuple[str, str]]) -> list[str]:
    return [case for case, (outcome, _) in ended.items() if outcome == "failed"]


def _of_files(ended: dict[str, tuple[str, str]], files: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    """The outcomes of cases in these files."""
    return {case: said for case, said in ended.items() if case.partition(".py::")[0] in files}


def counts(ended: dict[str, tuple[str, str]]) -> dict[str, dict[str, int]]:
    """Cases of each file by outcome."""
    found: dict[str, Counter] = {}
    for name, (outcome, _) in ended.items():
        found.setdefault(name.partition(".py::")[0], Counter())[outcome] += 1
    return {file: {kind: found[file][kind] for kind in KINDS} for file in FILES if file in found}


def _complete(ended: dict[str, tuple[str, str]], collected: dict[str, int]) -> tuple[str, ...]:
    """The files all of whose cases have an outcome; says of the others how many do."""
    have = {file: sum(of.values()) for file, of in counts(ended).items()}
    for file, cases in collected.items():
        if have.get(file, 0) < cases:
            print(f"{file}: {have.get(file, 0)} of {cases} cases, not recorded in {RECORD} before all have run")
    return tuple(file for file, cases in collected.items() if have.get(file, 0) >= cases)


def table(ours: dict[str, dict[str, int]], stock: dict[str, dict[str, int]]) -> str:
    """Markdown: passed / failed / skipped of each file, here and with stock."""
    rows = ["| file | passed | failed | skipped | stock: passed | failed | skipped |", "|:--|--:|--:|--:|--:|--:|--:|"]
    for file in FILES:
        if file in ours or file in stock:
            cells = [str(of.get(file, {}).get(kind, "")) for of in (ours, stock) for kind in KINDS]
            rows.append(f"| {file} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def tests_hash(folder: Path) -> str:
    """The hash of upstream's tests, which tells whose expected outcomes hold."""
    files = sorted((folder / TESTS).rglob("*.py"))
    return digest("".join(f"{path.name} {digest(path.read_bytes())}\n" for path in files).encode())


def pinned_tag(pin: Pin) -> str:
    """Upstream's tag of a version: 4.0.0b36 is fa4-v4.0.0.beta36."""
    return "fa4-v" + re.sub(r"b(\d+)$", r".beta\1", pin.version)


def _take(root: Path, checkout: Path, folder: Path, *, any_commit: bool) -> dict[str, str | None]:
    """Copy a checkout's tests into `folder`, with stock's package beside them; say which tests they are."""
    kept = folder / "source.json"
    if checkout == folder:
        if not kept.is_file() or json.loads(kept.read_text())["tests"] != tests_hash(folder):
            raise QueueError(f"{folder} holds no tests, or others than it was made with; name a checkout of upstream")
        return json.loads(kept.read_text())
    if not (checkout / TESTS).is_dir():
        raise QueueError(f"{checkout} is no checkout of upstream: it has no folder {TESTS}")
    pin, git = load_pin(root), Git(checkout)
    is_pinned = pinned_tag(pin) in git.text("tag", "--points-at", "HEAD").split()
    source = {"tests": tests_hash(checkout), "commit": git.resolve("HEAD"), "pinned": is_pinned}
    if not is_pinned and source["tests"] != _record(root)["tests"] and not any_commit:
        raise QueueError(
            f"{checkout} is not at the tag {pinned_tag(pin)} of the pinned {pin.base}: HEAD is {source['commit']}, and "
            f"its {TESTS} is not that of {RECORD}\nRemedy: git checkout {pinned_tag(pin)}"
        )
    shutil.rmtree(folder / TESTS, ignore_errors=True)
    shutil.copytree(checkout / TESTS, folder / TESTS, ignore=shutil.ignore_patterns("__pycache__"))
    write_files(folder / "stock", package_files(fetch(pin)))
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    kept.write_text(json.dumps(source), encoding="utf-8")
    return source


def _pytest(part: Part, files: tuple[str, ...], *, folder: Path, workers: int, kernels: Path) -> None:
    """Run pytest in a process of its own on `files`, with the plugin and the build that `part` asks for."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = outer | {
        PART_VARIABLE: json.dumps(asdict(part)),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(kernels),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    first = [str(folder / "stock")] if part.stock else []
    before = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment["PYTHONPATH"] = os.pathsep.join([*first, *before, str(Path(__file__).parent.parent)])
    command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "patches.upstream_plugin"]
    command += ["-p", "no:cacheprovider", "-c", str(folder / "pytest.ini"), "--rootdir", str(folder / TESTS)]
    command += ["-n", str(workers), *(f"{file}.py" for file in files)]
    code = subprocess.run(command, cwd=folder / TESTS, env=environment).returncode
    if code not in (0, 1, 5):  # passed, failed, nothing to do
        raise QueueError(f"pytest ended with code {code}")


def _lifted(ended: dict[str, tuple[str, str]]) -> tuple[str, ...]:
    """Cases skipped for lack of what the fork adds."""
    return tuple(
        name
        for name, (outcome, reason) in ended.items()
        if outcome == "skipped" and any(re.search(pattern, reason) for pattern in LIFTED)
    )


def _compare(ended: dict, unskipped: dict, record: dict, unfinished: int) -> int:
    print(table(counts(ended), record["files"]))
    if unskipped:
        print("\nSkipped by upstream on this GPU, run here:\n\n" + table(counts(unskipped), {}))
    new = [name for name in _failed(ended) if name not in set(record["failed"])] + _failed(unskipped)
    for name in new:
        print(f"FAILED {name}: {(ended | unskipped)[name][1]}")
    print(f"{len(new)} failures that stock does not have; {unfinished} cases of this part are left")
    return int(bool(new or unfinished))


def _card() -> str | None:
    import torch  # no other command of the queue needs it

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _workers() -> int:
    import torch

    return max(1, min(os.cpu_count() or 1, torch.cuda.get_device_properties(0).total_memory // GPU_MEMORY_OF_ONE))


def _record(root: Path) -> dict:
    path = root / RECORD
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else NO_RECORD


def _write_record(root: Path, source: dict, ended: dict, files: tuple[str, ...]) -> None:
    """Put the outcomes of `files` into the record; those of other tests than `source` are dropped."""
    before = _record(root)
    before = before if before["tests"] == source["tests"] else NO_RECORD
    ended = _of_files(ended, files)
    failed = {case for case in before["failed"] if case.partition(".py::")[0] not in files}.union(_failed(ended))
    found = counts(ended)
    record = source | {
        "files": before["files"] | found,
        "cards": before["cards"] | dict.fromkeys(found, _card()),
        "failed": sorted(failed),
    }
    (root / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
