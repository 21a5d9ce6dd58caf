"""Which kernels the layer can ask the fork for, and how to compile one without a GPU."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields

from nsa_layer.config import NSAConfig

ENVIRONMENT = {
    90: {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"},
    100: {"FLASH_ATTENTION_ARCH": "sm_100", "CUTE_DSL_ARCH": "sm_100a", "FLASH_ATTENTION_NUM_SMS": "148"},
}


@dataclass(frozen=True)
class KernelCase:
    """One kernel that the layer can ask for.

    Attributes:
        arch: 90 or 100.
        branch: "cmp", "slc" or "swa".
        backward: the direction.
        heads: (Hq, Hkv).
        packed: input packed with cu_seqlens.
        T: tokens; short ones take other code paths than long ones.
        deterministic: backward gives the same bits twice.
    """

    arch: int = 90
    branch: str = "cmp"
    backward: bool = False
    dtype: str = "bfloat16"
    D: int = 128
    heads: tuple[int, int] = (8, 2)
    causal: bool = True
    packed: bool = False
    block_size: int = 64
    per_head: bool = False
    T: int = 1000
    deterministic: bool = False

    def is_distinct(self) -> bool:
        """Whether no other case asks for the same kernel, or for one as near as makes no difference to the compiler.

        Options that a branch does not read keep their defaults.
        """
        unread = {
            "cmp": ("per_head", "block_size"),
            "slc": (),
            "swa": ("block_size", "per_head"),
        }[self.branch]
        default = {f.name: f.default for f in fields(self)}
        if any(getattr(self, name) != default[name] for name in unread):
            return False
        # The number of key/value heads matters to block lists only; elsewhere (4, 1) is (8, 2): four heads a group.
        if self.branch != "slc" and self.heads == (4, 1):
            return False
        # All pairs of these are there; three at once would only multiply the sweep.
        rare = [
            name
            for name in ("T", "dtype", "packed", "block_size", "per_head", "deterministic")
            if getattr(self, name) != default[name]
        ]
        if len(rare) > 2:
            return False
        if self.deterministic and not (self.backward and self.arch == 90):
            return False
        return not (self.per_head and self.heads[0] == self.heads[1])

    @property
    def config(self) -> NSAConfig:
        return NSAConfig(block_size=self.block_size, per_head=self.per_head, deterministic=self.deterministic)


OPTIONS: dict[str, tuple] = {
    "arch": (90, 100),
    "branch": ("cmp", "slc", "swa"),
    "backward": (False, True),
    "dtype": ("bfloat16", "float16"),
    "D": (64, 128),
    "heads": ((8, 2), (2, 2), (4, 1)),
    "causal": (True, False),
    "packed": (False, True),
    "block_size": (64, 256),
    "per_head": (False, True),
    "T": (1000, 100),
    "deterministic": (False, True),
}


def all_cases() -> list[KernelCase]:
    """Every combination of the options that is `is_distinct`."""
    cases = (KernelCase(**dict(zip(OPTIONS, values))) for values in itertools.product(*OPTIONS.values()))
    return [case for case in cases if case.is_distinct()]


def covering_cases() -> list[KernelCase]:
    """A small fixed set in which every two options that go together meet: greedy, over `all_cases` in their order."""
    cases = all_cases()
    missing = set().union(*map(_pairs, cases))
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(_pairs(case) & missing))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def _pairs(case: KernelCase) -> frozenset:
    """Pairs of options; architecture, branch and direction are one of them, since they decide which kernel is built."""
    options = asdict(case)
    kernel = tuple(options.pop(name) for name in ("arch", "branch", "backward"))
    return frozenset(itertools.combinations([("kernel", kernel), *options.items()], 2))


def compile_case(case: KernelCase) -> float:
    """Compile one case and return the seconds it took.

    Needs the architecture's `ENVIRONMENT` set before the fork is imported; the tensors are fake.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    for name, value in ENVIRONMENT[case.arch].items():
        if os.environ.get(name) != value:
            raise RuntimeError(
                f"{name} must be {value!r} to compile for sm_{case.arch}, it is {os.environ.get(name)!r}"
            )
    sparsity = _sparsity(case)
    started = time.perf_counter()
    with FakeTensorMode(), torch.no_grad():
        _call(case, sparsity)
    return time.perf_counter() - started


def _problem(case: KernelCase):
    from nsa_layer.problem import Problem

    lengths = (case.T - case.T // 3, case.T // 3) if case.packed else None
    return Problem(case.config, case.causal, case.D**-0.5, lengths)


def _sparsity(case: KernelCase):
    """The lists of a real choice, made on the CPU."""
    import torch

    from nsa_layer import branches

    if case.branch != "slc":
        return None
    problem, heads = _problem(case), case.heads
    T, Hs = case.T, heads[0] if case.per_head else heads[1]
    M, n = case.config.num_tiles(T), case.config.list_width(T)
    indices, starts = torch.arange(n, dtype=torch.int32).expand(1, Hs, M, n), None
    if case.packed:
        tiles = sum(map(case.config.num_tiles, problem.lengths))
        indices = indices[0, :, :1].expand(Hs, tiles, n)
        starts = torch.tensor([0, *problem.lengths]).cumsum(0).to(torch.int32)
    tile = (branches.backward_tile if case.backward else branches.forward_tile)(torch.device("cpu"), case.block_size)
    static = dict(problem=problem, tile=tile, backward=case.backward, cu_seqlens=starts)
    return branches.selected_sparsity(indices, T, heads, **static)


def _call(case: KernelCase, sparsity) -> None:
    import torch

    from nsa_layer import branches

    def fake(*shape: int, dtype: torch.dtype = getattr(torch, case.dtype)) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    (Hq, Hkv), T, D = case.heads, case.T, case.D
    lead = (T,) if case.packed else (1, T)
    Tk = case.config.compressed_length(T) if case.branch == "cmp" else T
    q, k, v = fake(*lead, Hq, D), fake(*lead[:-1], Tk, Hkv, D), fake(*lead[:-1], Tk, Hkv, D)
    options: dict = dict(problem=_problem(case))
    starts = fake(3, dtype=torch.int32) if case.packed else None
    if case.branch == "swa":
        options["cu_seqlens"] = starts
    elif case.branch == "slc":
        options |= dict(sparsity=sparsity.to_empty(torch.device("cuda")), cu_seqlens=starts)
    else:
        longest = dict(max_seqlen_q=T, max_seqlen_k=Tk)
        options["packing"] = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, **longest) if case.packed else {}
    call = {"cmp": "compressed", "slc": "selected", "swa": "window"}[case.branch]
    if not case.backward:
        getattr(branches, f"{call}_forward")(q, k, v, **options)
        return
    lse = fake(Hq, T, dtype=torch.float32) if case.packed else fake(1, Hq, T, dtype=torch.float32)
    getattr(branches, f"{call}_backward")(q, k, v, torch.empty_like(q), lse, torch.empty_like(q), **options)


def grouped_by_arch(cases: list[KernelCase]) -> Iterator[tuple[int, list[KernelCase]]]:
    """The cases of each architecture: a process can compile for one only."""
    for arch in ENVIRONMENT:
        of_arch = [case for case in cases if case.arch == arch]
        if of_arch:
            yield arch, of_arch
