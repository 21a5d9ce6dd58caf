"""Which kernels the layer launches, and how to compile them without a GPU."""

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
    """One kernel of the fork that the layer asks for, or the layer's own kernels.

    Attributes:
        arch: 90 or 100.
        branch: "cmp", "slc" (with its lists), "swa", or "own" for what is around the branches.
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
    T: int = 1000
    deterministic: bool = False

    def is_distinct(self) -> bool:
        """Whether no other case asks for the same kernel, or for one as near as makes no difference to the compiler.

        Options that a branch does not read keep their defaults.
        """
        unread = {
            "cmp": ("block_size",),
            "slc": (),
            "swa": ("block_size",),
            "own": ("T", "deterministic"),
        }[self.branch]
        default = {f.name: f.default for f in fields(self)}
        if any(getattr(self, name) != default[name] for name in unread):
            return False
        if self.branch == "own" and self.backward and not self.causal:
            return False
        # The number of key/value heads matters to block lists only; elsewhere (4, 1) is (8, 2): four heads a group.
        if self.branch != "slc" and self.heads == (4, 1):
            return False
        # All pairs of these are there; three at once would only multiply the sweep.
        rare = [
            name
            for name in ("T", "dtype", "packed", "block_size", "deterministic")
            if getattr(self, name) != default[name]
        ]
        if len(rare) > 2:
            return False
        return not self.deterministic or (self.backward and self.arch == 90)

    @property
    def config(self) -> NSAConfig:
        return NSAConfig(block_size=self.block_size, deterministic=self.deterministic)


OPTIONS: dict[str, tuple] = {
    "arch": (90, 100),
    "branch": ("cmp", "slc", "swa", "own"),
    "backward": (False, True),
    "dtype": ("bfloat16", "float16"),
    "D": (64, 128),
    "heads": ((8, 2), (2, 2), (4, 1)),
    "causal": (True, False),
    "packed": (False, True),
    "block_size": (64, 256),
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
    lists = _lists(case)
    started = time.perf_counter()
    with FakeTensorMode(), torch.no_grad():
        _call(case, *lists)
    return time.perf_counter() - started


def _problem(case: KernelCase):
    from nsa_layer.problem import Problem

    lengths = (case.T - case.T // 3, case.T // 3) if case.packed else None
    return Problem(case.config, case.causal, case.D**-0.5, lengths)


def _lists(case: KernelCase) -> list:
    """What makes the selected branch's call sparse, and where backward takes two passes, the second one."""
    import torch

    from nsa_layer import branches

    if case.branch != "slc":
        return [None]
    if not case.backward:
        return [_sparsity(case, backward=False)]
    q, deterministic = torch.empty(1, case.D, dtype=getattr(torch, case.dtype)), case.deterministic
    two = branches.takes_two_passes(q, q, _problem(case))
    of_keys = _sparsity(case, backward=True, ordered=deterministic and not two)
    return [of_keys, _sparsity(case, backward=False)] if two else [of_keys]


def _sparsity(case: KernelCase, *, backward: bool, ordered: bool = False):
    """The lists of a real choice, made on the CPU; fake ones where kernels make them, which are compiled with it."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from nsa_layer import branches

    problem, heads = _problem(case), case.heads
    T, Hkv = case.T, heads[1]
    M, n = case.config.num_tiles(T), case.config.list_width(T)
    indices, starts = torch.arange(n, dtype=torch.int32).expand(1, Hkv, M, n), None
    if case.packed:
        tiles = sum(map(case.config.num_tiles, problem.lengths))
        indices = indices[0, :, :1].expand(Hkv, tiles, n)
        starts = torch.tensor([0, *problem.lengths]).cumsum(0).to(torch.int32)
    tile = (branches.backward_tile if backward else branches.forward_tile)(torch.device("cpu"), case.block_size)
    static = dict(problem=problem, tile=tile, backward=backward, ordered=ordered)
    if not branches.kernels_make_lists(case.config, tile, n, indices.device, ordered=ordered):
        return branches.selected_sparsity(indices, T, heads, cu_seqlens=starts, **static)
    with FakeTensorMode():
        fake = [None if x is None else torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in (indices, starts)]
        return branches.selected_sparsity(fake[0], T, heads, cu_seqlens=fake[1], **static)


def _call(case: KernelCase, sparsity, of_queries=None) -> None:
    import torch

    from nsa_layer import branches

    (Hq, Hkv), T, D = case.heads, case.T, case.D
    dtype, lead = getattr(torch, case.dtype), (T,) if case.packed else (1, T)
    Tk = case.config.compressed_length(T) if case.branch == "cmp" else T
    q, k, v = _fake(*lead, Hq, D, dtype=dtype), *(_fake(*lead[:-1], Tk, Hkv, D, dtype=dtype) for _ in range(2))
    problem, packing = _problem(case), _packing(case)
    if case.branch == "own":
        (_own_backward if case.backward else _own_forward)(q, k, v, problem, packing)
        return
    options = {
        "cmp": lambda: branches.compressed_options(problem, packing),
        "slc": lambda: branches.selected_options(sparsity.to_empty(q.device), packing),
        "swa": lambda: branches.window_options(problem, packing),
    }[case.branch]()
    if case.backward:
        options |= dict(deterministic=case.deterministic)
        of_dq = None if of_queries is None else branches.dq_options(of_queries.to_empty(q.device), packing)
        _attention_backward(q, k, v, options, of_dq, first=case.branch == "cmp")
    else:
        branches.forward(q, k, v, problem, options)


def _attention_backward(q, k, v, options: dict, dq_options: dict | None, *, first: bool) -> None:
    """A branch's call, adding to what its calls share, and the conversion of that; or two passes, ending such calls."""
    import torch

    from flash_attn.cute.interface import _flash_attn_bwd
    from flash_attn.cute.shared_backward import SharedBackward, backward_layout, convert
    from flash_attn.cute.two_pass_backward import backward_dq

    two = dq_options is not None
    options |= dict(without_dq=two)
    layout = backward_layout(q, k, v, **options)
    rows, dq = (_fake(*shape, dtype=torch.float32) for shape in (layout.row_shape, layout.dq.shape))
    dk, dv = (None if each is None else _fake(*each.shape, dtype=torch.float32) for each in (layout.dk, layout.dv))
    flags = None if layout.flags is None else _fake(*layout.flags, dtype=torch.int32)
    shared = SharedBackward(layout, rows, torch.empty_like(rows), None if two else dq, dk, dv, first, flags)
    _flash_attn_bwd(q, k, v, None, q, None, shared=shared, **options)
    if two:
        for add in (False, True):
            static = dict(dq=torch.empty_like(q), accum=dq, add=add, start=layout.dq.start)
            backward_dq(q, k, v, q, rows, rows, **static, **dq_options)
    kept = [] if two else [(dq, layout.dq, q, "q")]
    for accum, of, like, starts in (*kept, (dk, layout.dk, k, "k"), (dv, layout.dv, v, "k")):
        if accum is not None:
            convert(accum, of, like, scale=1.0, cu_seqlens=options.get(f"cu_seqlens_{starts}"), add=True)


def _own_forward(q, k, v, problem, packing) -> None:
    import torch

    from nsa_layer.choice import choose
    from nsa_layer.kernels.gate import gated_sum
    from nsa_layer.kernels.pool import pool

    starts = _starts(packing) | ({} if packing is None else dict(total_blocks=packing.total_blocks))
    static = dict(block_size=problem.config.block_size, stride=problem.config.stride, **starts)
    (k_mean,), _ = pool(k, v, k_dtypes=(torch.float32,), v_dtype=torch.float32, **static)
    (k_mean, _), _ = pool(k, v, k_dtypes=(torch.float32, k.dtype), v_dtype=v.dtype, **static)
    choose(q, k_mean, problem=problem, packing=packing)
    for gating in _gating(q):
        gated_sum(q, q, q, q, **gating)


def _own_backward(q, k, v, problem, packing) -> None:
    import torch

    from nsa_layer.kernels.gate_backward import gated_sum_backward
    from nsa_layer.kernels.pool import unpool

    config, starts = problem.config, _starts(packing)
    blocks = packing.total_blocks if packing else config.compressed_length(q.shape[-3])
    for dtype in (k.dtype, torch.float32):
        d_mean = _fake(*k.shape[:-3], blocks, *k.shape[-2:], dtype=dtype)
        unpool(d_mean, d_mean, block_size=config.block_size, stride=config.stride, like_k=k, like_v=v, **starts)
    lse = _fake(*q.shape[:-3], q.shape[-2], q.shape[-3], dtype=torch.float32)
    for gating in _gating(q):
        g = _fake(*q.shape[:-1], 3, dtype=torch.float32) if any(x is not None for x in gating.values()) else None
        cu_seqlens = None if packing is None else packing.cu_seqlens
        gated_sum_backward(q, q, q, q, lse, lse, lse, g=g, q=q, tile_m=64, cu_seqlens=cu_seqlens, **gating)


def _gating(q) -> list[dict]:
    """The three ways of weighing the branches."""
    weight, gates = _fake(q.shape[-2], 3, q.shape[-1], dtype=q.dtype), _fake(*q.shape[:-1], 3, dtype=q.dtype)
    ways = ((weight, None), (None, gates), (None, None))
    return [dict(gate_weight=weight, gates=gates) for weight, gates in ways]


def _packing(case: KernelCase):
    import torch

    from nsa_layer.packing import Packing

    if not case.packed:
        return None
    lengths, config = _problem(case).lengths, case.config
    starts = (_fake(len(lengths) + 1, dtype=torch.int32) for _ in range(3))
    totals = (sum(map(counted, lengths)) for counted in (config.compressed_length, config.num_tiles))
    return Packing(*starts, *totals, max(lengths), max(map(config.compressed_length, lengths)))


def _starts(packing) -> dict:
    return {} if packing is None else dict(cu_seqlens=packing.cu_seqlens, cu_blocks=packing.cu_blocks)


def _fake(*shape: int, dtype):
    import torch

    return torch.empty(shape, dtype=dtype, device="cuda")


def grouped_by_arch(cases: list[KernelCase]) -> Iterator[tuple[int, list[KernelCase]]]:
    """The cases of each architecture: a process can compile for one only."""
    for arch in ENVIRONMENT:
        of_arch = [case for case in cases if case.arch == arch]
        if of_arch:
            yield arch, of_arch
