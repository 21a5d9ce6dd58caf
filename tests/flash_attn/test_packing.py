"""Packed sequences: lists in every form, found in 64 bits or refused, and any number of sequences."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from fa_catalogue import PACK
from fa_compile import Worker, compile_backward, noted, only_hosts, swept
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.lists import formats
from flash_attn.cute.lists import rows as list_rows
from fuzz.attention import Inputs, backward, compile_case, forward, make_inputs, sequences
from fuzz.attention_lists import backward_lists, forward_lists
from fuzz.case import Attention as Case

CASES = [
    Case(D=64, packed=PACK, lists="both", form="stacked", causal=True),
    Case(D=128, packed=PACK, lists="both", form="compact", list_heads=4, Hkv=4, mask_mod="thirds"),
    Case(D=128, packed=PACK, lists="no full", form="ragged", list_heads=4, Hkv=1, window=(200, 0)),
    Case(D=64, packed=PACK, lists="both", form="shared", mask_mod="keyed"),
]


def types_of_starts(case: Case) -> dict[str, set[str]]:
    """Types that the kernels of a case find rows with: of starts, and of the strides that rows are multiplied with."""

    def kind(row: Any, tensor: Any, full: bool = False) -> str:
        start = row.starts[full]
        of = tensor.stride[-2] if start is None else start  # without a start the row is a coordinate
        return of.dtype.__name__ if hasattr(of, "dtype") else type(of).__name__

    x = make_inputs(case)
    with noted(list_rows.ListRow, "entries", kind) as forwards:
        o, lse = forward(case, x)
    with noted(list_rows.ListRow, "entries", kind) as backwards:
        backward(case, x, o, lse)
    return {"forward": set(forwards), "backward": set(backwards)}


@pytest.mark.parametrize("case", swept(CASES), ids=str)
def test_kernels_compile_and_find_rows_in_64_bits(compiler: Worker, case: Case) -> None:
    assert compiler.trace(types_of_starts, case) == {"forward": {"Int64"}, "backward": {"Int64"}}


@pytest.mark.parametrize(
    "more",
    [
        dict(form="compact", deterministic=True),
        dict(form="stacked", block=(256, 256)),
        pytest.param(dict(form="stacked", deterministic=True), marks=pytest.mark.sweep),
    ],
    ids=str,
)
def test_more_of_backward_compiles(compiler_sm100: Worker, more: dict[str, Any]) -> None:
    """Two CTAs loop over one row where a block of keys is two tiles."""
    compiler_sm100.trace(compile_backward, replace(CASES[1], mask_mod=None, **more))


@pytest.mark.parametrize("direction", [formats.FORWARD, formats.BACKWARD])
def test_stacked_rows_are_as_wide_as_their_sequence(direction: formats.Direction) -> None:
    """In blocks of the lists, of the lengths in use, or of the tensors' where those do not vary."""
    side = 1 - direction.side
    starts, used = torch.tensor([0, 300, 700], dtype=torch.int32), torch.tensor([130, 400], dtype=torch.int32)

    def widths(starts: Any, used: Any) -> list[int]:
        pairs = [(None, t) if side else (t, None) for t in (starts, used)]
        packed = formats.Packing(*pairs, (None, None))
        return formats.blocks_before(packed, side, 64, 256, batch=2, device="cpu").diff().tolist()

    assert widths(starts, None) == [5, 7]
    assert widths(starts, used) == widths(None, used) == [3, 7]
    assert widths(None, None) == [4, 4]


@pytest.fixture
def fake() -> Iterator[None]:
    with FakeTensorMode():
        yield


def fit(direction: formats.Direction = formats.FORWARD, **changes: Any) -> BlockSparseTensorsTorch:
    """Two sequences, three rows, lists compact or as `changes` say."""

    def of(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device="cuda")

    fields: dict[str, Any] = {"mask_block_cnt": of(1, 3), "mask_block_idx": of(1, 3, 2), direction.rows_before: of(3)}
    for field, value in changes.items():
        fields[field] = of(*value) if isinstance(value, tuple) else value
    packed = formats.Packing((of(3), of(3)), (None, None), (256, 300))
    sizes = {"block_size": (128, 128), "across": 0}
    return formats.fit(BlockSparseTensorsTorch(**fields), direction, packed, batch=2, heads=4, **sizes)


@pytest.mark.parametrize("direction", [formats.FORWARD, formats.BACKWARD])
def test_lists_are_expanded(fake: None, direction: formats.Direction) -> None:
    compact = fit(direction, full_block_cnt=(4, 3), full_block_idx=(1, 3, 9), dq_write_order=(1, 3, 2))
    assert compact.mask_block_cnt.shape == compact.full_block_cnt.shape == (4, 3)
    assert compact.mask_block_idx.shape == compact.dq_write_order.shape == (3 * 2,), "of one row for all heads"
    assert compact.full_block_idx.shape == (3 * 9,), "each list is as wide as it needs to be"
    assert compact.cu_block_idx_offsets.shape == compact.cu_full_block_idx_offsets.shape == (4, 3)
    padded = fit(direction, mask_block_cnt=(1, 1, 3), mask_block_idx=(2, 4, 3, 5), **{direction.rows_before: None})
    assert padded.mask_block_cnt.shape == (2, 4, 3)
    stacked = fit(direction, mask_block_idx=(4, 20), cu_block_idx_offsets=(3,))
    assert stacked.mask_block_idx.shape == (4 * 20,) and stacked.cu_block_idx_offsets.shape == (4, 3)
    assert fit(direction, dq_write_order_full=(1, 3, 2)).dq_write_order_full is None, "there are no full lists"
    ragged = fit(direction, mask_block_idx=(20,), cu_block_idx_offsets=(1, 4))
    assert ragged.mask_block_idx.shape == (20,) and ragged.cu_block_idx_offsets.shape == (4, 4)


def test_lists_of_no_form_are_refused(fake: None) -> None:
    with pytest.raises(ValueError, match="block_sparse_tensors.*lists of no form known"):
        fit(mask_block_cnt=(2, 1, 3))


def test_blocks_of_several_tiles(fake: None) -> None:
    lists = BlockSparseTensorsTorch(
        *(torch.zeros(shape, dtype=torch.int32, device="cuda") for shape in ((1, 3), (1, 3, 2))),
        cu_total_m_blocks=torch.zeros(3, dtype=torch.int32, device="cuda"),
        block_size=(384, 128),
    )
    sizes = {"batch": 2, "heads": 1, "block_k": 128, "seqlen_k": 256}
    assert formats.fit_forward(lists, None, tile_q=128, **sizes)[1] == 3
    assert formats.fit_forward(lists._replace(block_size=None), None, tile_q=128, **sizes)[1] == 1
    with pytest.raises(ValueError, match=r"sparse_block_size\[0\]=256 .* or a multiple of it; got 384"):
        formats.fit_forward(lists, None, tile_q=256, **sizes)


def test_kernels_are_compiled_for_the_types_of_offsets() -> None:
    def types(dtype: torch.dtype) -> tuple:
        offsets = torch.zeros(3, dtype=dtype)
        return formats.offset_types(BlockSparseTensorsTorch(None, None, cu_block_idx_offsets=offsets))

    assert types(torch.int32) != types(torch.int64)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_a_sequence_alone_gives_the_same_bits(case: Case) -> None:
    """o, lse and, where no sums race (as many query heads as key heads), dk and dv."""
    x = make_inputs(case)
    o, lse = forward(case, x)
    _, dk, dv = backward(case, x, o, lse)
    for at, (T_q, T_k) in enumerate(case.packed):
        if T_q == 0 or T_k == 0:
            continue
        alone, only = replace(case, packed=((T_q, T_k),)), slice(at, at + 1)
        q, do, o_own, lse_own = (sequences(case, t, False)[at] for t in (x.q, x.do, o, lse.mT))
        k, v, dk_own, dv_own = (sequences(case, t, True)[at] for t in (x.k, x.v, dk, dv))
        part = replace(make_inputs(alone), q=q, do=do, k=k, v=v)
        o_alone, lse_alone = forward(alone, part, forward_lists(case, only))
        assert torch.equal(o_alone, o_own) and torch.equal(lse_alone, lse_own.mT)
        if case.Hq == case.Hkv:
            _, dk_alone, dv_alone = backward(alone, part, o_alone, lse_alone, backward_lists(case, only))
            assert torch.equal(dk_alone, dk_own) and torch.equal(dv_alone, dv_own)


@pytest.mark.gpu
def test_entries_beyond_two_billion() -> None:
    """The same lists with rows so far apart that the last is 2**31 entries from the first: 8.6 GB in each direction."""
    case = replace(CASES[0], Hkv=4, lists="no full", form="compact", list_heads=1)
    x = make_inputs(case)
    o, lse = forward(case, x)
    _, dk, dv = backward(case, x, o, lse)
    far = [_far(forward_lists(case)), _far(backward_lists(case))]
    o_far, lse_far = forward(case, x, far[0])
    _, dk_far, dv_far = backward(case, x, o_far, lse_far, far[1])
    assert torch.equal(o, o_far) and torch.equal(lse, lse_far)
    assert torch.equal(dk, dk_far) and torch.equal(dv, dv_far)


def _far(lists: BlockSparseTensorsTorch) -> BlockSparseTensorsTorch:
    near = lists.mask_block_idx
    (heads, rows, n), apart = near.shape, 2**31 // (near.shape[1] - 1) + 1
    assert heads == 1 and (rows - 1) * apart >= 2**31
    capacity = torch.empty((rows - 1) * apart + n, dtype=torch.int32, device=near.device)
    far = capacity.as_strided((1, rows, n), (capacity.numel(), apart, 1))
    return lists._replace(mask_block_idx=far.copy_(near))


MANY = Case(B=70_000, T_q=70, T_k=70, Hq=2, Hkv=1)
BATCHES = [
    MANY,
    replace(MANY, causal=True),
    replace(MANY, causal=True, deterministic=True),
    replace(MANY, window=(20, 0)),
    replace(MANY, D=128, Hkv=2, mask_mod="keyed"),
]
# Lists are made in Python, so these are few sequences.
LISTED = [Case(mask_mod="keyed", lists="partial"), Case(D=128, lists="full", deterministic=True)]
PACKED = [Case(packed=((100, 100), (30, 40)), causal=True), Case(packed=((100, 100), (30, 40)), lists="full")]


def grids(compile_: Callable[[Case], None], case: Case) -> list[list[int | None]]:
    """The grids of all launches; None for what each call decides."""
    with only_hosts() as launches:
        compile_(case)
    sizes = ((getattr(size, "value", size) for size in config.grid) for config in launches)
    return [[size if isinstance(size, int) else None for size in grid] for grid in sizes]


def compile_block_lists(case: Case) -> None:
    """Of a mask."""
    from flash_attn.cute.compute_block_sparsity import compute_block_sparsity
    from fuzz.mask_mods import MASK_MODS

    compute_block_sparsity(128, 128, case.B, 2, 256, 256, MASK_MODS["thirds"][0], None, device="cuda")


GRIDS = [*BATCHES[1:3], replace(MANY, D=256), LISTED[1], PACKED[1]]
COMPRESSED = Case(D=128, B=70_000, T_q=256, T_k=4, compress=(64, 63))


@pytest.mark.parametrize("case", swept(GRIDS, 5), ids=str)
def test_only_the_first_dimension_of_a_grid_grows(compiler: Worker, case: Case) -> None:
    found = compiler.trace(grids, compile_case, case)
    assert found and all(None not in grid[1:] for grid in found), found


def test_other_grids_grow_alike(compiler: Worker) -> None:
    """Of compressed causal attention, from the last keys to the first where there are few, and of a mask's lists."""
    for case in (COMPRESSED, replace(COMPRESSED, deterministic=True)):
        found = compiler.trace(grids, compile_case, case)
        assert found and all(None not in grid[1:] for grid in found), found
    (grid,) = compiler.trace(grids, compile_block_lists, MANY)
    assert grid[0] is None and grid[2] == 1


def some(x: Inputs, sequences: slice) -> Inputs:
    return replace(x, q=x.q[sequences], k=x.k[sequences], v=x.v[sequences], do=x.do[sequences])


@pytest.mark.gpu
@pytest.mark.xdist_group("large batches")
@pytest.mark.parametrize("case", BATCHES, ids=str)
def test_sequences_of_a_large_batch_get_what_they_get_alone(case: Case) -> None:
    x = make_inputs(case)
    o, lse = forward(case, x)
    gradients = backward(case, x, o, lse)
    for at in (slice(0, 3), slice(65_530, 65_540), slice(-3, None)):
        part = replace(case, B=len(x.q[at]))
        alone = forward(part, some(x, at))
        alone += backward(part, some(x, at), *alone)
        for got, expected in zip((o, lse, *gradients), alone, strict=True):
            torch.testing.assert_close(got[at], expected, rtol=1e-2, atol=1e-2)
    assert all(bool(t.isfinite().all()) for t in (o, *gradients))


@pytest.mark.gpu
def test_every_sequence_of_a_large_batch_has_the_block_lists_of_its_mask() -> None:
    from flash_attn.cute.compute_block_sparsity import compute_block_sparsity
    from fuzz.mask_mods import MASK_MODS

    lists = compute_block_sparsity(128, 128, 70_000, 2, 300, 300, MASK_MODS["halves"][0], None, device="cuda")
    alone = compute_block_sparsity(128, 128, 1, 2, 300, 300, MASK_MODS["halves"][0], None, device="cuda")
    for name in ("mask_block_cnt", "full_block_cnt", "mask_block_idx", "full_block_idx"):
        got, expected = getattr(lists, name), getattr(alone, name)
        assert torch.equal(got, expected.expand_as(got)), name
