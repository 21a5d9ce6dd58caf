"""One attention call as data: what it is compiled for, its inputs, its forward and its backward.

The same case compiles in a worker (fake tensors) and runs on a GPU, so a test on a GPU asks for no
kernel that was not compiled without one.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
import torch

from nsa_tools.testing.pasteable import Pasteable

SOFTCAP = 3.0
OPTIONS = ("score_mod", "softcap", "sink", "seqused")  # and "seqused_q", for kernels that are not run


@dataclass(frozen=True, repr=False)
class Case(Pasteable):
    """Attention of B sequences, or of packed ones, under every mask that is given."""

    D: int = 64
    Dv: int | None = None  # of v and o; None for D
    T_q: int = 300
    T_k: int = 300
    B: int = 2
    Hq: int = 4
    Hkv: int = 2
    packed: tuple[tuple[int, int], ...] = ()  # (queries, keys) of each sequence, in place of B, T_q, T_k
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    compress: tuple[int, int] | None = None  # compress_factor and compress_offset, which are causal
    offsets: tuple[int, ...] | None = None  # q_offset, of each sequence
    mask_mod: str | None = None
    option: str | None = None  # one of OPTIONS: what else the call asks for
    lists: str | None = None  # "partial", "full", "both"; "no full": partial, and full_* is None
    form: str = "padded"  # of packed sequences' lists: see fa_lists
    list_heads: int = 1  # heads that have lists of their own: 1, Hkv or Hq
    block: tuple[int, int] | None = None  # queries and keys of a block; None for what the architecture's kernels take
    q_tiles: int = 1  # of such blocks, how many make one
    pack_gqa: bool | None = None
    overlap: bool | None = None
    deterministic: bool = False
    launch: str = (
        "left to right"  # of key blocks in backward with lists: "right to left", "longest first", "middle first"
    )
    plan: int = 0  # entries of a work tile, at most, on SM90; 0 for no plan
    per_group: bool = False  # a work tile is of all query heads of a key/value head
    dtype: str = "bfloat16"
    seed: int = 0

    def __str__(self) -> str:
        """The id of tests: its repr, but for many sequences their number."""
        return repr(self).replace(repr(self.packed), f"{len(self.packed)}") if len(self.packed) > 50 else repr(self)

    @property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        return self.packed or ((self.T_q, self.T_k),) * self.B

    @property
    def used(self) -> tuple[int, ...]:
        """Keys of each sequence that the call uses: with the option "seqused" fewer in every other one."""
        return tuple(max(T_k - 70 * (b % 2) * (self.option == "seqused"), 0) for b, (_, T_k) in enumerate(self.lengths))


@dataclass(frozen=True)
class Inputs:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor
    aux: list[torch.Tensor] | None
    cu_seqlens: tuple[torch.Tensor, torch.Tensor] | None
    sink: torch.Tensor | None = None


def make_inputs(case: Case) -> Inputs:
    """Unit normal tensors on the GPU, from the case's seed; fake ones under FakeTensorMode."""

    def tensor(which: int, heads: int, width: int) -> torch.Tensor:
        if case.packed:
            shape = (sum(pair[which] for pair in case.packed), heads, width)
        else:
            shape = (case.B, case.lengths[0][which], heads, width)
        return torch.randn(shape, dtype=getattr(torch, case.dtype), device="cuda")

    torch.manual_seed(case.seed)
    Dv = case.Dv or case.D
    q, k = tensor(0, case.Hq, case.D), tensor(1, case.Hkv, case.D)
    v, do = tensor(1, case.Hkv, Dv), tensor(0, case.Hq, Dv)
    aux = None
    if case.mask_mod == "keyed":
        keys = max(pair[1] for pair in case.lengths)
        aux = [torch.randint(0, 3, (keys,), dtype=torch.int32, device="cuda")]
    cu_seqlens = None
    if case.packed:
        starts = ([0, *accumulate(pair[which] for pair in case.packed)] for which in (0, 1))
        cu_seqlens = tuple(torch.tensor(of, dtype=torch.int32, device="cuda") for of in starts)
    sink = torch.randn(case.Hq, dtype=torch.bfloat16, device="cuda") if case.option == "sink" else None
    return Inputs(q, k, v, do, aux, cu_seqlens, sink)


def outputs(case: Case, x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for o and lse, for backward where no kernel runs."""
    rows = (case.Hq, len(x.q)) if case.packed else (case.B, case.Hq, case.T_q)
    return torch.empty_like(x.do), x.q.new_empty(rows, dtype=torch.float32)


def forward(case: Case, x: Inputs, lists: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse, from the kernel; `lists` in place of the case's own."""
    from flash_attn.cute.interface import _flash_attn_fwd

    if case.lists is not None and lists is None:  # the plain package has no lists of ours
        from fa_lists import forward_lists

        lists = forward_lists(case)
    o, lse, *_ = _flash_attn_fwd(
        x.q, x.k, x.v, **_masks(case, x), block_sparse_tensors=lists,
        intra_wg_overlap=case.overlap, pack_gqa=case.pack_gqa, return_lse=True,
    )  # fmt: skip
    return o, lse


def backward(case: Case, x: Inputs, o: torch.Tensor, lse: torch.Tensor, lists: Any = None) -> tuple[torch.Tensor, ...]:
    """dq, dk and dv, from the kernel; `lists` in place of the case's own."""
    from fa_mask_mods import double_bwd

    from flash_attn.cute.interface import _flash_attn_bwd

    if case.lists is not None and lists is None:
        from fa_lists import backward_lists

        lists = backward_lists(case)
    return _flash_attn_bwd(
        x.q, x.k, x.v, o, x.do, lse, **_masks(case, x), block_sparse_tensors=lists,
        deterministic=case.deterministic, **({"score_mod_bwd": double_bwd} if case.option == "score_mod" else {}),
    )  # fmt: skip


def _masks(case: Case, x: Inputs) -> dict[str, Any]:
    from fa_mask_mods import MASK_MODS, double

    given: dict[str, Any] = {
        "causal": case.causal or case.compress is not None,
        "window_size_left": case.window[0],
        "window_size_right": case.window[1],
        "mask_mod": MASK_MODS[case.mask_mod][0] if case.mask_mod else None,
        "aux_tensors": x.aux,
    }
    if case.compress is not None:
        given |= dict(zip(("compress_factor", "compress_offset"), case.compress))
    if case.offsets is not None:
        given["q_offset"] = torch.tensor(case.offsets, dtype=torch.int32, device="cuda")
    if case.option == "seqused":
        given["seqused_k"] = torch.tensor(case.used, dtype=torch.int32, device="cuda")
    if case.option == "seqused_q":
        given["seqused_q"] = torch.empty(len(case.lengths), dtype=torch.int32, device="cuda")
    options = {"score_mod": ("score_mod", double), "softcap": ("softcap", SOFTCAP), "sink": ("learnable_sink", x.sink)}
    given |= dict([options[case.option]] if case.option in options else [])
    if x.cu_seqlens is not None:
        given |= {
            "cu_seqlens_q": x.cu_seqlens[0],
            "cu_seqlens_k": x.cu_seqlens[1],
            "max_seqlen_q": max(pair[0] for pair in case.packed),
            "max_seqlen_k": max(pair[1] for pair in case.packed),
        }
    return given


def attend(case: Case, x: Inputs, leaves: list[torch.Tensor], **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse of the public function, for leaves in place of q, k and v; `more` has lists, if there are any."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    given = _masks(case, x) | dict(deterministic=case.deterministic, return_lse=True) | more
    given["window_size"] = given.pop("window_size_left"), given.pop("window_size_right")
    return (flash_attn_varlen_func if case.packed else flash_attn_func)(*leaves, **given)


def in_order(cases: list[Case], *values: Any) -> list[tuple[Any, Any]]:
    """Each case with one of the values."""
    return [(case, values[i % len(values)]) for i, case in enumerate(cases)]


def swept(cases: list[Any], every: int = 3) -> list[Any]:
    """The first of each so many cases for `make test`, and the others for `make test-all`."""
    return [pytest.param(case, marks=pytest.mark.sweep if i % every else ()) for i, case in enumerate(cases)]


def compile_case(case: Case) -> None:
    """Forward and backward of a case; for a worker."""
    x = make_inputs(case)
    o, lse = forward(case, x)
    backward(case, x, o, lse)
