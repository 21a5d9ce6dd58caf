"""Options of the dq pass's kernel, and checks of a call's arguments before anything is compiled or launched."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any, Optional

import cutlass
import torch

from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.cute_dsl_utils import validate_output_layout
from flash_attn.cute.runtime.call_options import check_scale, check_switch

WARPGROUPS, THREADS = 2, 128  # that multiply, and threads of each
ROWS = 64  # queries of a warpgroup
TILE_M = WARPGROUPS * ROWS  # queries of a tile
STEP = 128  # keys
SHARED_MEMORY = 224 * 1024  # bytes for tiles
MOST_STAGES = 4

DTYPES = {torch.float16: cutlass.Float16, torch.bfloat16: cutlass.BFloat16}


@dataclass(frozen=True)
class Output:
    """The output of dq, and what is added to it on the way; hashable.

    Attributes:
        from_accum: it starts from what the fp32 accumulator holds, else from 0.
        to_dq: it is scaled, rounded and written to dq; else it goes to the accumulator as it is.
        onto_dq: what dq holds is added before rounding.
    """

    from_accum: bool
    to_dq: bool
    onto_dq: bool = False


@dataclass(frozen=True)
class DqSpec:
    """Options that a kernel is compiled for, lists and mask_mod apart; hashable.

    Attributes:
        group: query heads of a key/value head.
        list_group: of them, how many share a list that is indexed by key/value head; else 1.
        subtiles: tiles of TILE_M queries in a block of the lists.
        edges: whether there is a left and a right end of what a query sees; causal is a right one.
        packed, seqused: whether cu_seqlens, and seqused, are there for queries and keys.
        sums: whether dpsum and lse_log2 are computed and written, not read.
        start: rows that sequences of dpsum, lse_log2 and the accumulator start at multiples of.
        stay: as many CTAs as run at a time walk the tiles; else a CTA to a tile.
    """

    dtype: torch.dtype
    head_dim: int
    block_k: int
    group: int
    list_group: int
    subtiles: int
    edges: tuple[bool, bool]
    packed: tuple[bool, bool]
    seqused: tuple[bool, bool]
    output: Output
    sums: bool
    start: int
    stay: bool

    @property
    def stages(self) -> int:
        """Stages of k and v in shared memory, beside q and do."""
        row = 2 * self.head_dim * 2  # bytes of a token's k and v, or q and do
        return min(MOST_STAGES, (SHARED_MEMORY - TILE_M * row) // (STEP * row))

    @property
    def box(self) -> tuple[int, int]:
        """Keys and head dimensions of k or v that are loaded at a time."""
        return self.block_k, box_columns(self.head_dim)


def box_columns(head_dim: int) -> int:
    """Head dimensions that one swizzled row of shared memory holds."""
    return 64 if head_dim % 64 == 0 else 32


HEAD_DIMS = (64, 96, 128)

Tensor = torch.Tensor


def unsupported(
    arch: int, dtype: torch.dtype, head_dim: int, head_dim_v: int, lists: Optional[BlockSparseTensorsTorch]
) -> Optional[str]:
    """Why `backward_dq` cannot do a call, or None."""
    if arch // 10 != 9:
        return f"sm_{arch}: the dq pass is for sm_90"
    if dtype not in DTYPES:
        return f"q is {dtype}: the dq pass takes float16 and bfloat16"
    if head_dim != head_dim_v or head_dim not in HEAD_DIMS:
        return f"head dimensions {head_dim} and {head_dim_v}: the dq pass takes equal ones of {HEAD_DIMS}"
    if lists is None:
        return "no block lists: the dq pass walks lists"
    block_q, block_k = lists.block_size or (TILE_M, STEP)
    if block_q % TILE_M or block_k not in (STEP // 2, STEP):
        return (
            f"blocks of {block_q} queries and {block_k} keys: the dq pass takes multiples of {TILE_M} queries, and "
            f"{STEP // 2} or {STEP} keys"
        )
    return None


def supports(
    arch: int, dtype: torch.dtype, head_dim: int, head_dim_v: int, lists: Optional[BlockSparseTensorsTorch]
) -> bool:
    """True if `backward_dq` can do a call; otherwise it is for the one-pass kernel."""
    return unsupported(arch, dtype, head_dim, head_dim_v, lists) is None


def with_plain_strides(x: Optional[Tensor]) -> Optional[Tensor]:
    """The same tensor, with the strides of dimensions of one element that a contiguous tensor would have.

    They lead nowhere and may hold anything, but a compiled kernel refuses those that are not aligned.
    """
    if x is None or 1 not in x.shape:
        return x
    strides = list(x.stride())
    after = 1
    for dim in reversed(range(x.ndim)):
        if x.shape[dim] == 1:
            strides[dim] = after
        after = strides[dim] * x.shape[dim]
    return x if tuple(strides) == x.stride() else x.as_strided(x.shape, strides)


def check_types(lists: Any, tensors: dict[str, Any], optional: dict[str, Any]) -> None:
    """Check types and devices; ``optional`` ones may be None. All have to be where the first of `tensors` is.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    if lists is not None and not isinstance(lists, BlockSparseTensorsTorch):
        raise TypeError(f"lists is a {type(lists).__name__}, expected BlockSparseTensorsTorch")
    device = None
    for name, x in (tensors | {name: x for name, x in optional.items() if x is not None}).items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}, expected a tensor")
        device = x.device if device is None else device
        if x.device != device:
            raise ValueError(f"{name} is on {x.device}, expected {device}, where {next(iter(tensors))} is")


def check_options(
    softmax_scale: Any,
    window_size: Any,
    mask_mod: Any,
    aux_tensors: Any,
    *,
    max_seqlen_q: Any,
    start: Any,
    **switches: Any,
) -> None:
    """Check the arguments that are no tensors.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    check_scale(softmax_scale)
    pair = isinstance(window_size, (tuple, list)) and len(window_size) == 2
    if not pair or any(side is not None and not isinstance(side, Integral) for side in window_size):
        raise TypeError(f"window_size is {window_size!r}, expected two numbers of keys, or None for no limit")
    if mask_mod is not None and not callable(mask_mod):
        raise TypeError(f"mask_mod is {mask_mod!r}, expected a function or None")
    if aux_tensors is not None and not (
        isinstance(aux_tensors, (tuple, list)) and all(isinstance(x, Tensor) for x in aux_tensors)
    ):
        raise TypeError("aux_tensors is no list of tensors")
    if max_seqlen_q is not None and (not isinstance(max_seqlen_q, Integral) or max_seqlen_q < 0):
        raise ValueError(f"max_seqlen_q is {max_seqlen_q!r}, expected a number of queries or None")
    if not isinstance(start, Integral):
        raise TypeError(f"start is {start!r}, expected a multiple of {ROWS}")
    for name, value in switches.items():
        check_switch(name, value)


def check_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    packed: tuple[bool, bool],
    lengths: tuple[Optional[Tensor], ...],
    batch: int,
) -> None:
    for name, x, is_packed in (("q", q, packed[0]), ("k", k, packed[1])):
        if x.ndim != 4 - is_packed:
            expected = "[total, H, D]" if is_packed else "[B, T, H, D]"
            raise ValueError(f"{name} has shape {tuple(x.shape)}, expected {expected}")
    for name, x, like in (("dout", dout, q), ("v", v, k), ("k", k, q)):
        if x.dtype != q.dtype or (name != "k" and x.shape != like.shape):
            raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}, expected {q.dtype} {tuple(like.shape)}")
    if k.shape[-1] != q.shape[-1] or q.shape[-2] % k.shape[-2]:
        raise ValueError(f"q has shape {tuple(q.shape)}, k {tuple(k.shape)}: heads or head dimensions do not fit")
    if not packed[1] and k.shape[0] != batch:
        raise ValueError(f"k has shape {tuple(k.shape)}, expected {batch} sequences")
    sizes = (batch + 1, batch + 1, batch, batch)
    for name, x, size in zip(("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"), lengths, sizes):
        if x is not None and (x.dtype != torch.int32 or x.shape != (size,) or x.stride(0) != 1):
            raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}, expected contiguous torch.int32 {(size,)}")


def checked_output(q: Tensor, dq: Optional[Tensor], add: bool, accum: Optional[Tensor], first: bool) -> Output:
    if dq is None and accum is None:
        raise ValueError("dq and accum are None, expected one of them or both")
    if add and dq is None:
        raise ValueError("add is for dq, which is None")
    if first and (accum is None or dq is not None):
        raise ValueError("first is for accum alone, which it leaves the call's own part in")
    if dq is not None:
        if dq.shape != q.shape or dq.dtype != q.dtype:
            raise ValueError(f"dq is {dq.dtype} {tuple(dq.shape)}, expected {q.dtype} {tuple(q.shape)}")
        try:
            validate_output_layout(dq, "dq", 16)
        except AssertionError as error:
            raise ValueError(f"dq has strides {dq.stride()}: {error}") from None
    if accum is not None:
        _check_accum(q, accum)
    return Output(from_accum=accum is not None and not first, to_dq=dq is not None, onto_dq=add)


def _check_accum(q: Tensor, accum: Tensor) -> None:
    lead = (*q.shape[:-3], q.shape[-2])
    if accum.dtype != torch.float32 or accum.shape[:-1] != lead or accum.shape[-1] % (ROWS * q.shape[-1]):
        raise ValueError(
            f"accum is {accum.dtype} {tuple(accum.shape)}, expected torch.float32 {lead} with whole tiles of "
            f"{ROWS} rows of {q.shape[-1]}"
        )
    if accum.stride(-1) != 1 or any(s % 4 for s in accum.stride()[:-1]) or accum.storage_offset() % 4:
        raise ValueError(f"accum has strides {accum.stride()}, expected rows of heads that are aligned to 16 bytes")


def check_rows(
    q: Tensor, dpsum: Tensor, lse_log2: Tensor, accum: Optional[Tensor], start: int, sequences: Optional[int]
) -> None:
    """sequences: how many are packed; None where q is not."""
    if start <= 0 or start % ROWS:
        raise ValueError(f"start is {start}, expected a multiple of {ROWS}")
    lead, rows = (*q.shape[:-3], q.shape[-2]), q.shape[-3]
    if sequences is not None:
        rows = -(-(rows + sequences * start) // start) * start
    for name, x in (("dpsum", dpsum), ("lse_log2", lse_log2)):
        good = x.dtype == torch.float32 and x.shape[:-1] == lead and x.shape[-1] >= rows
        if not good or x.shape != dpsum.shape or x.stride(-1) != 1:
            found = f"{x.dtype} {tuple(x.shape)}"
            raise ValueError(f"{name} is {found}, expected torch.float32 {lead} with {rows} rows, contiguous in them")
    rows = -(-rows // ROWS) * ROWS
    if accum is not None and accum.shape[-1] < rows * q.shape[-1]:
        raise ValueError(f"accum has shape {tuple(accum.shape)}, too few for {rows} rows of {q.shape[-1]}")


def check_sums(q: Tensor, out: Optional[Tensor], lse: Optional[Tensor], start: int) -> None:
    """Check the tensors that row sums are computed from."""
    if (out is None) != (lse is None):
        raise ValueError("expected both out and lse, or neither")
    if out is None:
        return
    if out.shape != q.shape or out.dtype != q.dtype:
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}, expected {q.dtype} {tuple(q.shape)}")
    shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    if lse.shape != shape or lse.dtype != torch.float32 or lse.stride(-1) != 1:
        raise ValueError(f"lse is {lse.dtype} {tuple(lse.shape)}, expected torch.float32 {shape}, contiguous in rows")
    if TILE_M % start:
        raise ValueError(f"start is {start}, expected {ROWS} or {TILE_M} with out")
