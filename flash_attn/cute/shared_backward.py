"""Backward calls that share row sums and accumulators, for weighted sums of attention outputs.

With ``shared=SharedBackward(...)`` a backward call gets row sums from the caller, instead of computing them from
``out`` and ``lse``; it adds to fp32 accumulators of the caller, and leaves them to `convert`, which rounds one to a
gradient and may add the output's old values. `backward_layout` returns the layout of a call's accumulators, `aligned`
makes the layouts of several calls compatible, and calls may share accumulators with equal `AccumLayout.layout_key`:

    cmp, swa = aligned(backward_layout(q, k_cmp, v_cmp, **of_cmp), backward_layout(q, k, v, **of_swa))
    dq, flags = torch.empty(cmp.dq.shape), ...        # cmp.dq.layout_key == swa.dq.layout_key
    (dk, dv) = zeroed(swa.dk, swa.dv, device=q.device)
    _flash_attn_bwd(q, k_cmp, v_cmp, None, do, None, **of_cmp, shared=SharedBackward(cmp, *rows_cmp, dq, first=True))
    _flash_attn_bwd(q, k, v, None, do, None, **of_swa, shared=SharedBackward(swa, *rows_swa, dq, dk, dv))
    convert(dq, cmp.dq, out_dq, scale=softmax_scale, add=True)

**Row sums.** ``dpsum`` is rowsum(o * do), ``lse_log2`` is lse * log2(e), both fp32 [B, Hq, rows], packed [Hq, rows],
where ``rows`` is `AccumLayout.rows` of dq. A packed sequence b starts at row (cu_seqlens[b] + b * start) // start *
start, with ``start`` of dq's layout. The kernel reads whole tiles: up to the next multiple of its tile, rows past a
sequence's end hold dpsum 0 and lse_log2 +inf. The probabilities are exp2(scores - lse_log2), so

- lse_log2 = +inf gives exact zeros, for padding and for a row whose gate is 0; its dpsum and do have to be finite;
- a row that sees no key needs a finite lse_log2 or +inf, not -inf: all its scores are -inf;
- lse - ln(g) in place of lse scales the probabilities by g, as g * do with the same dpsum would.

Without GQA dk and dv have no accumulators: one CTA stores each tile in the output's dtype, and the caller sums the
calls' results. In deterministic mode results repeat bit by bit if the order of the calls does.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Hashable, NamedTuple, Optional

import torch

ALIGNED = 64  # elements: buffers of one allocation start at multiples of 256 bytes


class Tile(NamedTuple):
    """Layout of an accumulator's tile, for the kernel that writes it and the conversion that reads it."""

    arch: int
    rows: int
    threads: int
    atoms: int  # warpgroups along the rows
    swapped: bool
    two_cta: bool
    multiple: int  # the head dimension is rounded up to this
    order: Optional[Hashable]  # sm_100's AccumTileOrder

    @property
    def pattern(self) -> Hashable:
        """Equal for tiles with the same memory layout.

        sm_90 stores wgmma's registers: for 64 rows, by 8 columns, then by thread, then by register. That layout depends
        neither on the number of rows nor on whether warpgroups split the columns or the rows.
        """
        groups = self.threads // 128
        whole = self.rows == 64 * self.atoms and self.atoms in (1, groups)
        if self.arch // 10 == 9 and whole and not self.swapped:
            return "rows of 64"
        return self._replace(threads=0)


@dataclass(frozen=True)
class AccumLayout:
    """Memory layout of a call's fp32 accumulator of dq, dk or dv; hashable."""

    heads: tuple[int, ...]  # (B, H), packed (H,)
    tokens: int  # of a sequence; packed: of all
    sequences: Optional[int]  # packed: their number; else None
    start: int  # rows are rounded up to a multiple of this; packed: each sequence starts at a multiple
    head_dim: int
    tile: Tile

    @cached_property
    def rows(self) -> int:
        """Rows of a head."""
        spare = 0 if self.sequences is None else self.sequences * self.start
        return -(-(self.tokens + spare) // self.start) * self.start

    @cached_property
    def width(self) -> int:
        return -(-self.head_dim // self.tile.multiple) * self.tile.multiple

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return (*self.heads, self.rows * self.width)

    @cached_property
    def layout_key(self) -> Hashable:
        """Equal for accumulators that calls may share."""
        return self.heads, self.tokens, self.sequences, self.start, self.head_dim, self.tile.pattern


@dataclass(frozen=True)
class BackwardLayout:
    """A call's accumulators; hashable."""

    dq: AccumLayout
    dk: Optional[AccumLayout]  # None without GQA
    dv: Optional[AccumLayout]
    flags: Optional[tuple[int, ...]]  # int32, if the call's first writers can store dq (`bwd_sm90.accumulators`)

    @cached_property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of dpsum and lse_log2."""
        return (*self.dq.heads, self.dq.rows)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.dq, self.dk, self.dv, self.flags))


class SharedBackward(NamedTuple):
    """Tensors that a backward call gets from its caller, and leaves to it.

    Attributes:
        dq: fp32 accumulator of ``layout.dq.shape``; added to. None: the call has its own and returns dq.
        dk, dv: likewise, of ``layout.dk.shape`` and ``layout.dv.shape``, under GQA; both or neither.
        first: dq is uninitialised, and the call overwrites it: under compressed-causal masking the first writer of a
            query tile stores, else the call clears dq and adds.
        flags: zeroed int32 of ``layout.flags``, for ``first``; None: the call allocates them.
    """

    layout: Optional[BackwardLayout]  # of `backward_layout` for this call, or of `aligned`
    dpsum: Optional[torch.Tensor]  # dpsum, lse_log2: the row sums, as the module's docstring says
    lse_log2: Optional[torch.Tensor]
    dq: Optional[torch.Tensor] = None
    dk: Optional[torch.Tensor] = None
    dv: Optional[torch.Tensor] = None
    first: bool = False
    flags: Optional[torch.Tensor] = None


LAYOUT_ONLY = SharedBackward(None, None, None)  # asks `_flash_attn_bwd` for the call's layout


def backward_layout(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> BackwardLayout:
    """The layouts of a backward call's accumulators; nothing is read, computed or launched.

    Args:
        q, k, v: like the call's in shape, stride, dtype and device; meta tensors will do.
        options: the call's other arguments.

    Raises:
        ValueError: no tokens, or options that cannot be shared.
        NotImplementedError: an architecture whose backward cannot share.
    """
    from flash_attn.cute.interface import _flash_attn_bwd

    dout = q if q.shape[-1] == v.shape[-1] else q.new_empty((*q.shape[:-1], v.shape[-1]))
    return _flash_attn_bwd(q, k, v, None, dout, None, **options, shared=LAYOUT_ONLY)


def aligned(*layouts: BackwardLayout) -> tuple[BackwardLayout, ...]:
    """The calls' layouts with rows, and starts of packed sequences, at common multiples, so that all share row sums.

    With packed sequences only sm_90's kernels support starts other than their own: other layouts are unchanged.
    """
    q, k = (math.lcm(*(each.start for each in accums if each)) for accums in zip(*((x.dq, x.dk) for x in layouts)))
    if any(x.dq.sequences is not None and x.dq.tile.arch // 10 != 9 for x in layouts):
        return layouts

    def moved(x: BackwardLayout) -> BackwardLayout:
        dk, dv = (None if each is None else replace(each, start=k) for each in (x.dk, x.dv))
        return replace(x, dq=replace(x.dq, start=q), dk=dk, dv=dv)

    return tuple(map(moved, layouts))


def zeroed(*wanted: AccumLayout | tuple[int, ...], device: torch.device) -> list[torch.Tensor]:
    """Zeroed tensors in one allocation and one launch: fp32 for a layout, int32 for a shape of flags."""
    shapes = [each.shape if isinstance(each, AccumLayout) else each for each in wanted]
    sizes = [math.prod(shape) for shape in shapes]
    capacity = [-(-size // ALIGNED) * ALIGNED for size in sizes]
    whole = torch.zeros(sum(capacity), dtype=torch.float32, device=device)
    parts = []
    for each, shape, size, part in zip(wanted, shapes, sizes, whole.split_with_sizes(capacity)):
        part = part if part.shape[0] == size else part.narrow(0, 0, size)
        parts.append((part if isinstance(each, AccumLayout) else part.view(torch.int32)).view(shape))
    return parts


def convert(
    accum: torch.Tensor,
    layout: AccumLayout,
    out: torch.Tensor,
    *,
    scale: float,
    cu_seqlens: Optional[torch.Tensor] = None,
    add: bool = False,
) -> torch.Tensor:
    """Write round(scale * accum) to ``out``, or with ``add`` round(scale * accum + out), and return it.

    Args:
        accum: fp32, of ``layout.shape``.
        layout: that of any call that added to it.
        out: [B, T, H, D], packed [total, H, D]; fp16 or bf16, contiguous in its last dimension.
        scale: softmax_scale for dq and dk, 1 for dv.
        cu_seqlens: int32 [sequences + 1], of packed sequences.

    Raises:
        ValueError: a shape does not fit.
    """
    from flash_attn.cute import interface

    _check("accum", accum, layout.shape, torch.float32)
    batch = layout.heads[:-1]
    _check("out", out, (*batch, layout.tokens, layout.heads[-1], layout.head_dim), out.dtype)
    if (cu_seqlens is None) != (layout.sequences is None):
        raise ValueError(f"cu_seqlens is {cu_seqlens}, expected one exactly where sequences are packed: {layout}")
    tile = layout.tile
    interface._bwd_postprocess_convert(
        accum, out, scale, cu_seqlens, None, tile.arch, interface.torch2cute_dtype_map[out.dtype], layout.head_dim,
        tile.rows, tile.threads, tile.atoms, tile.swapped, use_2cta_instrs=tile.two_cta,
        cluster_size=1 if layout.sequences is None else layout.start // tile.rows, hdim_multiple_of=tile.multiple,
        accum_order=tile.order, add_to=add, fake_mode=type(accum) is not torch.Tensor and interface.is_fake_mode(),
    )  # fmt: skip
    return out


# What `_flash_attn_bwd` calls.


def left_to_caller(shared: Optional[SharedBackward], **alone: Any) -> tuple[bool, bool]:
    """(whether dq, whether dk and dv) are left to the caller to convert.

    alone: arguments that a call with ``shared`` does not support, None where not given.
    """
    if shared is None:
        return False, False
    given = [name for name, value in alone.items() if value is not None]
    if given:
        raise ValueError(f"{given[0]} cannot be given together with shared")
    if (shared.dk is None) != (shared.dv is None):
        raise ValueError("shared.dk and shared.dv: expected both or neither")
    return shared.dq is not None, shared.dk is not None


def without_tokens(
    shared: SharedBackward, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[Optional[torch.Tensor], ...]:
    """The results of a call without queries or without keys."""
    if shared is LAYOUT_ONLY:
        raise ValueError(f"q has shape {tuple(q.shape)}, k {tuple(k.shape)}: without tokens there are no accumulators")
    if shared.first and shared.dq is not None:
        shared.dq.zero_()
    kept = (shared.dq, shared.dk, shared.dv)
    return tuple(torch.zeros_like(x) if accum is None else None for x, accum in zip((q, k, v), kept))


@lru_cache(maxsize=1024)
def call_layout(
    arch: int,
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...],
    *,
    sequences: tuple[Optional[int], Optional[int]],
    tile: tuple[int, int],
    threads: tuple[int, int],
    atoms: tuple[int, int],
    swapped: tuple[bool, bool],
    orders: tuple[Optional[Hashable], Optional[Hashable]],
    cluster_size: int,
    two_cta: bool,
    multiple: int,
    writes_first: bool,
) -> BackwardLayout:
    """The layout for shapes of q, k and v. Pairs are for (queries, keys); ``sequences`` is None where not packed."""

    def accum(x: tuple[int, ...], which: int) -> AccumLayout:
        how = Tile(
            arch, tile[which], threads[which], atoms[which], swapped[which], two_cta and which == 0, multiple,
            orders[which],
        )  # fmt: skip
        heads = x[-2:-1] if sequences[which] is not None else (x[0], x[2])
        start = tile[which] * (cluster_size if which else 1)
        return AccumLayout(tuple(heads), x[-3], sequences[which], start, x[-1], how)

    dq = accum(q, 0)
    dk, dv = (None, None) if q[-2] == k[-2] else (accum(k, 1), accum(v, 1))
    flags = (*dq.heads, -(-dq.tokens // tile[0]), 1) if writes_first else None
    return BackwardLayout(dq, dk, dv, flags)


def checked(
    shared: SharedBackward, layout: BackwardLayout, device: torch.device, *, without_dq: bool = False
) -> SharedBackward:
    """Check ``shared``, and allocate the tensors that it leaves to the call.

    without_dq: the call leaves dq out, and needs no accumulator for it.
    """
    given = shared.layout
    if given is not layout:
        _check_fits(given, layout)
    _check("shared.dpsum", shared.dpsum, given.row_shape, torch.float32)
    _check("shared.lse_log2", shared.lse_log2, given.row_shape, torch.float32)
    dq, dk, dv, first, flags = shared[3:]
    if without_dq:
        if dq is not None:
            raise ValueError("shared.dq cannot be given together with without_dq=True")
        first = False
    elif dq is None:
        _check_own("dq", given.dq, layout.dq)
        dq, first = torch.empty(given.dq.shape, dtype=torch.float32, device=device), True
    else:
        _check("shared.dq", dq, given.dq.shape, torch.float32)
    if dk is not None:
        if layout.dk is None:
            raise ValueError("shared.dk: without GQA dk and dv are stored, not accumulated; expected None")
        _check("shared.dk", dk, given.dk.shape, torch.float32)
        _check("shared.dv", dv, given.dv.shape, torch.float32)
    elif layout.dk is not None:
        _check_own("dk", given.dk, layout.dk)
        dk, dv = zeroed(given.dk, given.dv, device=device)
    if first and layout.flags is not None:
        if flags is None:
            flags = torch.zeros(layout.flags, dtype=torch.int32, device=device)
        _check("shared.flags", flags, layout.flags, torch.int32)
    return SharedBackward(given, shared.dpsum, shared.lse_log2, dq, dk, dv, first, flags)


def clear_first(shared: SharedBackward, seen_from: Optional[int]) -> None:
    """Clear the rows of an uninitialised dq that the call's kernel adds to without a first writer.

    seen_from: rows from this one on have a first writer, which stores; None: no row has.
    """
    if not shared.first:
        return
    if seen_from is None:
        shared.dq.zero_()
    elif seen_from:
        shared.dq.narrow(-1, 0, seen_from * shared.layout.dq.width).zero_()


def sequence_starts(shared: Optional[SharedBackward], tile: tuple[int, int]) -> Optional[tuple[int, ...]]:
    """Multiples at which packed queries and keys start, for a compile key.

    None without ``shared``, where the preprocess kernel sets them.
    """
    if shared is None:
        return None
    accums = shared.layout.dq, shared.layout.dk
    return tuple(own if x is None or x.sequences is None else x.start for x, own in zip(accums, tile))


@lru_cache(maxsize=1024)
def _check_fits(given: Optional[BackwardLayout], own: BackwardLayout) -> None:
    if not isinstance(given, BackwardLayout):
        raise ValueError(f"shared.layout is {given!r}, expected this call's backward_layout")
    for name in ("dq", "dk", "dv"):
        theirs, ours = getattr(given, name), getattr(own, name)
        moved = ours if theirs is None or ours is None else replace(ours, start=theirs.start)
        rounded = ours is None or theirs is None or theirs.start % ours.start == 0
        packed = theirs is not None and theirs.sequences is not None and theirs.tile.arch // 10 != 9
        if theirs != (ours if packed else moved) or not rounded:
            raise ValueError(f"shared.layout.{name} is {theirs}, expected {ours}, or a multiple of its start")
    if given.flags != own.flags:
        raise ValueError(f"shared.layout.flags is {given.flags}, expected {own.flags}")


def _check_own(name: str, given: AccumLayout, own: AccumLayout) -> None:
    if own.sequences is not None and given.start != own.start:
        raise ValueError(f"shared.{name} is None: expected an accumulator, as sequences start at {given.start} rows")


def _check(name: str, tensor: Optional[torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor is None or tensor.shape != shape or tensor.dtype != dtype or tensor.stride(-1) != 1:
        found = None if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}"
        raise ValueError(f"{name} is {found}, expected {dtype} {tuple(shape)}, contiguous in its last dimension")
