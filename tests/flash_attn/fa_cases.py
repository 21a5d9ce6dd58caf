"""One attention call as data: what it is compiled for, its inputs, its forward and its backward.

The same case compiles in a worker (fake tensors) and runs on a GPU, so a test on a GPU asks for no
kernel that was not compiled without one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch

BLOCK_K = 128


@dataclass(frozen=True)
class Case:
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
    mask_mod: str | None = None
    lists: str | None = None  # "partial", "full", "both"; "no full": partial, and full_* is None
    form: str = "padded"  # of packed sequences' lists: see fa_packed_lists
    list_heads: int = 1  # heads that have lists of their own: 1, Hkv or Hq
    block: tuple[int, int] | None = None  # queries and keys of a block; None for what the architecture's kernels take
    q_tiles: int = 1  # of such blocks, how many make one
    pack_gqa: bool | None = None
    overlap: bool | None = None
    deterministic: bool = False
    launch: str = (
        "left to right"  # of key blocks in backward with lists: "right to left", "longest first", "middle first"
    )
    plan: int = 0  # entries of an item, at most, on SM90; 0 for no plan
    per_group: bool = False  # an item is of all query heads of a key/value head
    seed: int = 0

    def __str__(self) -> str:
        """What a test is called: as in the source, defaults left out."""
        given = ((field, getattr(self, field.name)) for field in fields(self))
        return f"Case({', '.join(f'{field.name}={value!r}' for field, value in given if value != field.default)})"

    @property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        return self.packed or ((self.T_q, self.T_k),) * self.B


@dataclass(frozen=True)
class Inputs:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor
    aux: list[torch.Tensor] | None
    cu_seqlens: tuple[torch.Tensor, torch.Tensor] | None


def make_inputs(case: Case) -> Inputs:
    """Unit normal bf16 tensors on the GPU, from the case's seed; fake ones under FakeTensorMode."""

    def tensor(which: int, heads: int, width: int) -> torch.Tensor:
        if case.packed:
            shape = (sum(pair[which] for pair in case.packed), heads, width)
        else:
            shape = (case.B, case.lengths[0][which], heads, width)
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda")

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
        cu_seqlens = tuple(_cumulated([pair[which] for pair in case.packed]) for which in (0, 1))
    return Inputs(q, k, v, do, aux, cu_seqlens)


def outputs(case: Case, x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for o and lse, for backward where no kernel runs."""
    rows = (case.Hq, len(x.q)) if case.packed else (case.B, case.Hq, case.T_q)
    return torch.empty_like(x.do), x.q.new_empty(rows, dtype=torch.float32)


def forward(case: Case, x: Inputs, lists: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse, from the kernel; `lists` in place of the case's own."""
    from flash_attn.cute.interface import _flash_attn_fwd

    o, lse, *_ = _flash_attn_fwd(
        x.q, x.k, x.v, **_masks(case, x), block_sparse_tensors=lists or forward_lists(case),
        intra_wg_overlap=case.overlap, pack_gqa=case.pack_gqa, return_lse=True,
    )  # fmt: skip
    return o, lse


def backward(case: Case, x: Inputs, o: torch.Tensor, lse: torch.Tensor, lists: Any = None) -> tuple[torch.Tensor, ...]:
    """dq, dk and dv, from the kernel; `lists` in place of the case's own."""
    from flash_attn.cute.interface import _flash_attn_bwd

    return _flash_attn_bwd(
        x.q, x.k, x.v, o, x.do, lse, **_masks(case, x), block_sparse_tensors=lists or backward_lists(case),
        deterministic=case.deterministic,
    )  # fmt: skip


def block_lists(case: Case) -> dict[str, list[list[list[list[int]]]]]:
    """The key blocks of each query block, [batch][head][query block], as "partial" and "full" lists.

    Never sorted: the block that the keys end in comes first, so a kernel, which walks a list from
    its end, meets it last. Some other blocks are left out. With form "shared" the longest sequence's
    lists serve all, so that shorter ones have blocks listed that they do not hold.
    """
    block_q, block_k = block(case)
    lists: dict[str, list[list[list[list[int]]]]] = {"partial": [], "full": []}
    for batch, (T_q, T_k) in enumerate(case.lengths):
        if case.form == "shared":
            batch, T_q, T_k = 0, max(case.lengths)[0], max(pair[1] for pair in case.lengths)
        n, heads = -(-T_k // block_k), []
        for head in range(case.list_heads):
            rows = [_in_no_order(n, batch + 2 * head + row) for row in range(-(-T_q // block_q))]
            heads.append([_split(case, blocks, batch + row) for row, blocks in enumerate(rows)])
        for which, kind in enumerate(("partial", "full")):
            lists[kind].append([[row[which] for row in rows] for rows in heads])
    return lists


def _in_no_order(n: int, turn: int) -> list[int]:
    if n == 0:
        return []
    others = [block for block in range(n - 1) if (block + turn) % 4 != 3]
    turned = others[turn % max(len(others), 1) :] + others[: turn % max(len(others), 1)]
    return [n - 1, *turned]


def _split(case: Case, blocks: list[int], turn: int) -> tuple[list[int], list[int]]:
    if case.lists != "both":
        return ([], blocks) if case.lists == "full" else (blocks, [])
    return blocks[turn % 2 :: 2], blocks[1 - turn % 2 :: 2]


def forward_lists(case: Case) -> Any:
    """Key blocks of each query block; None where the case has no lists."""
    if case.lists is None:
        return None
    if case.packed:
        from fa_packed_lists import packed_forward_lists

        return packed_forward_lists(case)
    return _tensors(case, block_lists(case), -(-case.T_k // block(case)[1]))


def backward_lists(case: Case) -> Any:
    """The transpose: query blocks of each key block, with what the case's way of launching needs.

    Computed on the CPU in earnest: fake tensors have no lists in them.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    if case.lists is None:
        return None
    if case.packed:
        from fa_packed_lists import packed_backward_lists

        if not case.plan:
            return packed_backward_lists(case)
        with unset_fake_temporarily():
            lists = _planned(case, packed_backward_lists(case, device="cpu"), case.launch, most=None)
        return type(lists)(*(_to_gpu(field) for field in lists))
    with unset_fake_temporarily():
        lists = _backward_lists(case)
    return type(lists)(*(_to_gpu(field) for field in lists))


def _to_gpu(field: Any) -> Any:
    from torch._guards import active_fake_mode

    if not isinstance(field, torch.Tensor):
        return field
    if active_fake_mode() is not None:
        return torch.empty_strided(field.shape, field.stride(), dtype=field.dtype, device="cuda")
    own = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in field.stride())
    return field[own].cuda().expand(field.shape)


def _backward_lists(case: Case) -> Any:
    from flash_attn.cute.lists.write_order import compute_dq_write_order

    block_q, block_k = block(case)
    forwards, n, m = block_lists(case), -(-case.T_k // block_k), -(-case.T_q // block_q)
    backwards = {
        kind: [[transposed(rows, n) for rows in heads] for heads in batches] for kind, batches in forwards.items()
    }
    tensors = _tensors(case, backwards, m, "cpu")
    schedule: Any = case.launch
    if schedule == "middle first":
        schedule = _int32(sorted(range(n), key=lambda block: abs(block - n // 2)), "cpu")
    if case.plan:
        return _planned(case, tensors, schedule, most=m * n)
    if not case.deterministic:
        return tensors
    spt = schedule == "right to left"
    mask, full = compute_dq_write_order(*_tensors(case, forwards, n, "cpu")[:4], *tensors[:4], spt=spt)
    return tensors._replace(dq_write_order=mask, dq_write_order_full=full, spt=spt)


def _planned(case: Case, lists: Any, schedule: Any, most: int | None) -> Any:
    from flash_attn.cute.lists.backward_plan import plan_backward

    m = max(-(-T_q // block(case)[0]) for T_q, _ in case.lengths)
    before = {}
    if case.form == "stacked":
        from fa_packed_lists import query_blocks_before

        before["cu_total_m_blocks"] = query_blocks_before(case)
    return plan_backward(
        lists, num_heads=case.Hq, num_heads_kv=case.Hkv, num_q_blocks=m, listed=most,
        deterministic=case.deterministic, schedule=schedule, per_group=case.per_group, longest=case.plan,
        **before,
    )  # fmt: skip


def transposed(rows: list[list[int]], blocks: int) -> list[list[int]]:
    return [[m for m, row in enumerate(rows) if block in row] for block in range(blocks)]


def block(case: Case) -> tuple[int, int]:
    from flash_attn.cute.interface import _get_device_arch

    queries, keys = case.block or (256 if _get_device_arch() // 10 == 10 else 128, BLOCK_K)
    return queries * case.q_tiles, keys


def _tensors(case: Case, lists: dict[str, list[list[list[list[int]]]]], width: int, device: str = "cuda") -> Any:
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    def pair(batches: list[list[list[list[int]]]]) -> tuple[torch.Tensor, torch.Tensor]:
        counts = [[[len(row) for row in rows] for rows in heads] for heads in batches]
        # What stands behind a list's count is never read: a block that does not exist says so.
        indices = [[[row + [1 << 20] * (width - len(row)) for row in rows] for rows in heads] for heads in batches]
        return _int32(counts, device), _int32(indices, device)

    full = (None, None) if case.lists == "no full" else pair(lists["full"])
    return BlockSparseTensorsTorch(*pair(lists["partial"]), *full, block_size=block(case))


def _masks(case: Case, x: Inputs) -> dict[str, Any]:
    from fa_mask_mods import MASK_MODS

    given: dict[str, Any] = {
        "causal": case.causal,
        "window_size_left": case.window[0],
        "window_size_right": case.window[1],
        "mask_mod": MASK_MODS[case.mask_mod][0] if case.mask_mod else None,
        "aux_tensors": x.aux,
    }
    if x.cu_seqlens is not None:
        given |= {
            "cu_seqlens_q": x.cu_seqlens[0],
            "cu_seqlens_k": x.cu_seqlens[1],
            "max_seqlen_q": max(pair[0] for pair in case.packed),
            "max_seqlen_k": max(pair[1] for pair in case.packed),
        }
    return given


def _int32(values: Any, device: str = "cuda") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _cumulated(lengths: list[int]) -> torch.Tensor:
    return _int32([sum(lengths[:i]) for i in range(len(lengths) + 1)])


def in_turn(cases: list[Case], *values: Any) -> list[tuple[Any, Any]]:
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
