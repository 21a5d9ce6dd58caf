"""Without compress_factor the kernels are upstream's: the same machine code, instruction for instruction.

Two things that patches change on purpose are told apart from the rest. Every kernel's way from a launched CTA to its
tile (SingleTileScheduler, so that any batch has a grid) is upstream's here, put back before anything is compiled. The
kernels that OUR_OWN names differ for the reason that it gives; all others have to be equal.
"""

# What runs in a worker is imported there with upstream's package, so nothing here may ask for ours.
import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from fa_compile import Worker, shared_worker, swept
from fa_cubin import cubins, programs

from fuzz.attention import compile_case
from fuzz.case import Attention as Case

PACKED = Case(packed=((100, 130), (600, 200)), causal=True, Hkv=4)
WINDOW = Case(window=(64, 0))
CASES = swept([Case(window=(4096, 0)), Case(D=96, window=(4096, 0)), Case(D=128, causal=True), PACKED, WINDOW], 5)
BOUNDED = "loads end where a packed sequence does"
OUR_OWN = {
    ("sm_90", PACKED): {"FlashAttentionForwardSm90": BOUNDED, "FlashAttentionBackwardSm90": BOUNDED},
    ("sm_100", PACKED): {"FlashAttentionForwardSm100": BOUNDED, "FlashAttentionBackwardSm100": BOUNDED},
    ("sm_90", WINDOW): {"FlashAttentionForwardSm90": "tiles of a short window overlap"},
}


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


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(arch, marks=[pytest.mark.xdist_group(arch), *marks])
        for arch, marks in (("sm_90", ()), ("sm_100", [pytest.mark.sweep]))
    ],
)
def workers(request: pytest.FixtureRequest, stock: Path) -> Iterator[tuple[Worker, Worker]]:
    """One with upstream's package, and the one with ours of all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(stock), os.environ.get("PYTHONPATH", "")]))
        upstream = Worker(request.param, pooled=False)
    yield upstream, shared_worker(request.param)
    upstream.close()


def machine_code(case: Case, stock: str) -> tuple[str, dict[str, str]]:
    """The package whose kernels were compiled, and a hash of each one's instructions by its name; in a worker."""
    import flash_attn.cute

    with upstream_grids(Path(stock)):
        code = cubins(partial(compile_case, case))
    hashes = {
        re.search(r"(Flash[A-Za-z]+(Sm\d+)?)_object", name).group(1): hashlib.sha256(program).hexdigest()
        for cubin in code
        for name, program in programs(cubin)
    }
    return str(flash_attn.cute.__file__), hashes


@contextmanager
def upstream_grids(stock: Path) -> Iterator[None]:
    """Upstream's SingleTileScheduler in place of this process's."""
    from flash_attn.cute.tile_scheduler import SingleTileScheduler

    spec = importlib.util.spec_from_file_location("upstream_scheduler", stock / "flash_attn/cute/tile_scheduler.py")
    upstream = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, upstream)
        spec.loader.exec_module(upstream)
        for name, value in vars(upstream.SingleTileScheduler).items():
            if name not in ("__dict__", "__weakref__"):
                patch.setattr(SingleTileScheduler, name, value, raising=False)
        yield


@pytest.mark.parametrize("case", CASES, ids=str)
def test_default_is_upstreams_machine_code(workers: tuple[Worker, Worker], stock: Path, case: Case) -> None:
    (upstream, theirs), (own, ours) = (worker.run(machine_code, case, str(stock)) for worker in workers)
    assert upstream.startswith(str(stock)) and not own.startswith(str(stock))
    # A forward and a backward, and what goes before and after the latter.
    assert len(theirs) >= 4 and ours.keys() == theirs.keys()
    others, arch = {name for name in theirs if theirs[name] != ours[name]}, workers[1].arch
    assert others == OUR_OWN.get((arch, case), {}).keys(), f"{case!r} on {arch}"
