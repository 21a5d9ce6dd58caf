"""Without compress_factor the kernels are upstream's: the same machine code, instruction for instruction.

But for one, named here: forward in a short sliding window, whose tiles overlap on SM90.
"""

# What runs in a worker is imported there with upstream's package, so nothing here may ask for ours.
from __future__ import annotations

import hashlib
import os
import struct
from collections import Counter
from pathlib import Path

import pytest
from fa_cases import Case, compile_case
from fa_compile import Worker

CASES = [
    Case(D=128, causal=True),
    Case(packed=((100, 130), (600, 200)), causal=True, Hkv=4),
    Case(window=(64, 0)),
    Case(D=96, window=(4096, 0)),
]
# How many of a case's kernels are other ones on purpose.
OUR_OWN = {("sm_90", Case(window=(64, 0))): 1}


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as upstream publishes it."""
    from patches.materialise import load_pin, repository
    from patches.wheel import fetch, package_files

    folder = tmp_path_factory.mktemp("stock")
    for name, content in package_files(fetch(load_pin(repository()))).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def machine_code(case: Case, dumps: str) -> tuple[str, list[str]]:
    """Whose kernels were compiled, and a hash of each one's instructions; in a worker that dumps what it compiles."""
    import flash_attn.cute

    compile_case(case)
    hashes = []
    for path in sorted(Path(dumps).rglob("*.cubin")):
        cubin = path.read_bytes()
        path.unlink()  # the next case's may have the same name
        (table,) = struct.unpack_from("<Q", cubin, 40)
        size, count = struct.unpack_from("<HH", cubin, 58)
        sections = [struct.unpack_from("<IIQQQQ", cubin, table + size * i) for i in range(count)]
        executable = 4
        hashes += [
            hashlib.sha256(cubin[start : start + length]).hexdigest()
            for _, _, flags, _, start, length in sections
            if flags & executable
        ]
    return str(flash_attn.cute.__file__), sorted(hashes)


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_default_is_upstreams_machine_code(arch: str, stock: Path, tmp_path: Path) -> None:
    code: dict[str, list[list[str]]] = {}
    for whose in ("stock", "ours"):
        dumps = tmp_path / whose
        dumps.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CUTE_DSL_KEEP", "cubin")
            patch.setenv("CUTE_DSL_DUMP_DIR", str(dumps))
            if whose == "stock":
                patch.setenv("PYTHONPATH", str(stock), prepend=os.pathsep)
            worker = Worker(arch)
            try:
                answers = [worker.run(machine_code, case, str(dumps)) for case in CASES]
            finally:
                worker.close()
        assert all(where.startswith(str(stock)) == (whose == "stock") for where, _ in answers)
        code[whose] = [hashes for _, hashes in answers]
    for case, stock_code, our_code in zip(CASES, code["stock"], code["ours"]):
        # A forward and a backward, and what goes before and after the latter.
        assert len(stock_code) >= 4
        assert len(our_code) == len(stock_code), f"{case} on {arch}"
        others = Counter(stock_code) - Counter(our_code)
        assert others.total() == OUR_OWN.get((arch, case), 0), f"{case} on {arch}"
