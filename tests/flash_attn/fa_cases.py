"""One attention call as data: what it is compiled for, its inputs, its forward and its backward.

The same case compiles in a worker (fake tensors) and runs on a GPU, so a test on a GPU asks for no
kernel that was not compiled without one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

BLOCK_K = 128


@dataclass(frozen=True)
class Case:
    """Attention of B sequences, or of packed ones, under every mask that is given."""

    D: int = 64
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
    overlap: bool | None = None
    deterministic: bool = False
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

    def tensor(which: int, heads: int) -> torch.Tensor:
        if case.packed:
            shape = (sum(pair[which] for pair in case.packed), heads, case.D)
        else:
            shape = (case.B, case.lengths[0][which], heads, case.D)
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda")

    torch.manual_seed(case.seed)
    q, k, v, do = tensor(0, case.Hq), tensor(1, case.Hkv), tensor(1, case.Hkv), tensor(0, case.Hq)
    aux = None
    if case.mask_mod == "keyed":
        keys = max(pair[1] for pair in case.lengths)
        aux = [torch.randint(0, 3, (keys,), dtype=torch.int32, device="cuda")]
    cu_seqlens = None
    if case.packed:
        cu_seqlens = tuple(_cumulated([pair[which] for pair in case.packed]) for which in (0, 1))
    return Inputs(q, k, v, do, aux, cu_seqlens)


def forward(case: Case, x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse, from the kernel."""
    from flash_attn.cute.interface import _flash_attn_fwd

    o, lse, *_ = _flash_attn_fwd(
        x.q, x.k, x.v, **_masks(case, x), block_sparse_tensors=forward_lists(case),
        intra_wg_overlap=case.overlap, return_lse=True,
    )  # fmt: skip
    return o, lse


def backward(case: Case, x: Inputs, o: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """dq, dk and dv, from the kernel."""
    from flash_attn.cute.interface import _flash_attn_bwd

    return _flash_attn_bwd(
        x.q, x.k, x.v, o, x.do, lse, **_masks(case, x), block_sparse_tensors=backward_lists(case),
        deterministic=case.deterministic,
    )  # fmt: skip


def block_lists(case: Case) -> dict[str, list[list[list[int]]]]:
    """The key blocks of each query block, [batch][query block], as "partial" and "full" lists.

    Never sorted: the block that the keys end in comes first, so a kernel, which walks a list from
    its end, meets it last. Some other blocks are left out.
    """
    n = -(-case.T_k // BLOCK_K)
    lists: dict[str, list[list[list[int]]]] = {"partial": [], "full": []}
    for batch in range(case.B):
        rows = [_in_no_order(n, batch + row) for row in range(-(-case.T_q // block_q()))]
        split = [_split(case, blocks, batch + row) for row, blocks in enumerate(rows)]
        lists["partial"].append([partial for partial, _ in split])
        lists["full"].append([full for _, full in split])
    return lists


def _in_no_order(n: int, turn: int) -> list[int]:
    others = [block for block in range(n - 1) if (block + turn) % 4 != 3]
    turned = others[turn % max(len(others), 1) :] + others[: turn % max(len(others), 1)]
    return [n - 1, *turned]


def _split(case: Case, blocks: list[int], turn: int) -> tuple[list[int], list[int]]:
    if case.lists != "both":
        return ([], blocks) if case.lists == "full" else (blocks, [])
    return blocks[turn % 2 :: 2], blocks[1 - turn % 2 :: 2]


def forward_lists(case: Case) -> Any:
    """Key blocks of each query block, one list for all heads; None where the case has no lists."""
    if case.lists is None:
        return None
    return _tensors(case, block_lists(case), -(-case.T_k // BLOCK_K))


def backward_lists(case: Case) -> Any:
    """The transpose: query blocks of each key block."""
    if case.lists is None:
        return None
    lists, n = block_lists(case), -(-case.T_k // BLOCK_K)
    transposed = {
        kind: [[[m for m, row in enumerate(rows) if block in row] for block in range(n)] for rows in batches]
        for kind, batches in lists.items()
    }
    return _tensors(case, transposed, -(-case.T_q // block_q()))


def block_q() -> int:
    from flash_attn.cute.interface import _get_device_arch

    return 256 if _get_device_arch() // 10 == 10 else 128


def _tensors(case: Case, lists: dict[str, list[list[list[int]]]], width: int) -> Any:
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    def pair(batches: list[list[list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
        counts = [[[len(row) for row in rows]] for rows in batches]
        # What stands behind a list's count is never read: a block that does not exist says so.
        indices = [[[row + [1 << 20] * (width - len(row)) for row in rows]] for rows in batches]
        return _int32(counts), _int32(indices)

    full = (None, None) if case.lists == "no full" else pair(lists["full"])
    return BlockSparseTensorsTorch(*pair(lists["partial"]), *full, block_size=(block_q(), BLOCK_K))


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


def _int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def _cumulated(lengths: list[int]) -> torch.Tensor:
    return _int32([sum(lengths[:i]) for i in range(len(lengths) + 1)])


def compile_case(case: Case) -> None:
    """Forward and backward of a case; for a worker."""
    x = make_inputs(case)
    o, lse = forward(case, x)
    backward(case, x, o, lse)
