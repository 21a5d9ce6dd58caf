"""Tensors on a GPU that is not the current one, GPUs of several architectures, and a changed environment."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fa_compile import Worker, WorkerError, only_hosts
from torch._subclasses.fake_tensor import FakeTensorMode

from fuzz.attention import attended, compile_case, make_inputs
from fuzz.case import Attention as Case

CAPABILITIES = {0: (9, 0), 1: (10, 0), 2: (9, 0)}


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Three GPUs of two architectures, as far as host code asks for them."""
    from flash_attn.cute.runtime import own_device

    gpus = SimpleNamespace(current=0)

    @contextmanager
    def entered(device: torch.device) -> Iterator[None]:
        before, gpus.current = gpus.current, device.index
        yield
        gpus.current = before

    monkeypatch.delenv("FLASH_ATTENTION_ARCH", raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: gpus.current)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: CAPABILITIES[index])
    monkeypatch.setattr(torch.cuda, "device", entered)
    own_device.arch_of_gpu.cache_clear()
    yield gpus
    own_device.arch_of_gpu.cache_clear()


@pytest.mark.parametrize("index", CAPABILITIES)
def test_a_call_asks_the_gpu_of_its_tensors(gpus: SimpleNamespace, index: int) -> None:
    from flash_attn.cute.interface import _get_device_arch
    from flash_attn.cute.runtime.own_device import on_own_device

    @on_own_device
    def call(name: str, *, q: torch.Tensor) -> tuple[int, int]:
        return torch.cuda.current_device(), _get_device_arch()

    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(2, device=f"cuda:{index}")
    major, minor = CAPABILITIES[index]
    assert call("q", q=q) == (index, 10 * major + minor)
    assert gpus.current == 0
    assert call("no GPU's", q=torch.empty(2)) == (0, 90)


def test_attention_asks_the_gpu_of_its_tensors(gpus: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_attn.cute import interface
    from flash_attn.cute.bwd_dq import interface as bwd_dq_interface

    class Asked(Exception):
        pass

    def ask(*_: object) -> int:
        raise Asked(torch.cuda.current_device())

    monkeypatch.setattr(interface, "_get_device_arch", ask)
    with FakeTensorMode():
        x = torch.empty(1, 128, 2, 64, dtype=torch.bfloat16, device="cuda:1")
        rows = torch.empty(1, 2, 128, device="cuda:1")
        lists = interface.BlockSparseTensorsTorch(*(torch.empty(1, 1, 1, *n, dtype=torch.int32) for n in ((), (1,))))
        for call in (
            lambda: interface._flash_attn_fwd(x, x, x),
            lambda: interface._flash_attn_bwd(x, x, x, x, x, rows),
            lambda: bwd_dq_interface.backward_dq(x, x, x, x, rows, rows, lists, dq=x),
        ):
            with pytest.raises(Asked, match="1"):
                call()


def test_the_environment_is_asked_at_every_call(gpus: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_attn.cute.interface import _get_device_arch

    assert _get_device_arch() == 90
    for arch in (100, 80):
        monkeypatch.setenv("FLASH_ATTENTION_ARCH", f"sm_{arch}")
        assert _get_device_arch() == arch
    monkeypatch.delenv("FLASH_ATTENTION_ARCH")
    assert _get_device_arch() == 90


def test_kernels_of_another_architecture_are_other_files(
    gpus: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The files' names say for which architecture they are, as the keys of some kernels do not."""
    from flash_attn.cute import cache_utils

    monkeypatch.setattr(cache_utils, "CUTE_DSL_CACHE_ENABLED", True)
    monkeypatch.setattr(cache_utils, "CUTE_DSL_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FLASH_ATTENTION_NUM_SMS", "132")
    cache, files = cache_utils.get_jit_cache("some"), []
    for gpus.current in CAPABILITIES:
        files.append(cache._key_to_hash(("kernel",)))
    monkeypatch.setenv("FLASH_ATTENTION_ARCH", "sm_100")
    files.append(cache._key_to_hash(("kernel",)))
    assert files[0] == files[2] != files[1] == files[3]


def refusal_after(arch: str | None, capability: tuple[int, int] | None) -> str | None:
    """The error for a kernel that is not compiled yet, once the environment, or the GPU, says another thing."""
    from flash_attn.cute.runtime import own_device

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("FLASH_ATTENTION_ARCH")
        if arch is not None:
            patch.setenv("FLASH_ATTENTION_ARCH", arch)
        if capability is not None:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.cuda, "current_device", lambda: 0)
            patch.setattr(own_device, "arch_of_gpu", lambda index: 10 * capability[0] + capability[1])
        try:
            own_device.check_target()
        except NotImplementedError as error:
            return str(error)
    return None


REFUSED = {
    "sm_90": [("sm_100", None), ("sm_103a", (9, 0)), (None, (10, 0))],
    "sm_100": [("sm_90", None), ("90", (10, 0)), (None, (9, 0)), (None, (10, 3)), (None, (12, 0))],
}
TAKEN = {
    "sm_90": [("sm_90a", None), ("sm_80", None), ("sm_90", (10, 0)), (None, (9, 0)), (None, None)],
    "sm_100": [("sm_100", None), ("sm_103", None), ("sm_110", None), ("sm_100", (9, 0)), (None, (10, 0))],
}


def test_what_the_compiler_makes_no_code_for_is_refused(compiler: Worker) -> None:
    for given in REFUSED[compiler.arch]:
        said = compiler.trace(refusal_after, *given)
        assert said is not None and f"compiles for {compiler.arch}a" in said, given
    for given in TAKEN[compiler.arch]:
        assert compiler.trace(refusal_after, *given) is None, given


def compile_for(arch: str) -> None:
    with pytest.MonkeyPatch.context() as patch, only_hosts():
        patch.setenv("FLASH_ATTENTION_ARCH", arch)
        compile_case(Case(D=96, causal=True))


def test_a_changed_architecture_is_refused_before_anything_is_compiled(compiler_sm90: Worker) -> None:
    compiler_sm90.trace(compile_for, "sm_90")
    with pytest.raises(WorkerError, match="a kernel for sm_100 in a process that compiles for sm_90a") as refusal:
        compiler_sm90.trace(compile_for, "sm_100")
    assert refusal.value.kind == "NotImplementedError"
    compiler_sm90.trace(compile_for, "sm_90")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("stream", [False, True], ids=["own stream", "side stream"])
def test_the_other_gpu_gives_the_same(packed: bool, stream: bool) -> None:
    case = Case(packed=((300, 300), (77, 77)) if packed else (), causal=True, deterministic=True)
    torch.cuda.set_device(0)
    x = make_inputs(case)

    def results(device: int) -> list[torch.Tensor]:
        starts = x.cu_seqlens and tuple(t.to(f"cuda:{device}") for t in x.cu_seqlens)
        there = replace(x, **{n: getattr(x, n).to(f"cuda:{device}") for n in ("q", "k", "v", "do")}, cu_seqlens=starts)
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        if stream:
            # As a stream's context does it, but for the current GPU, which stays the first.
            torch.cuda.set_stream(side)
            torch.cuda.set_device(0)
        try:
            found = attended(case, there)
        finally:
            if stream:
                torch.cuda.set_stream(torch.cuda.default_stream(device))
                torch.cuda.set_device(0)
        assert torch.cuda.current_device() == 0
        torch.cuda.synchronize(device)
        return [t.cpu() for t in found.values()]

    for got, expected in zip(results(1), results(0), strict=True):
        assert torch.equal(got, expected)
