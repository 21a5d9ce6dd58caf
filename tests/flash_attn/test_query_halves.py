"""Lists of an odd number of 64 queries on SM100: the union that tiles of 128 walk is what either half lists.

Everything is compared with the same thing computed block by block in plain Python.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fa_query_halves import Drawn, Launched, adds, as_joined, assert_in_order, expected, key_rows, tensors, tiles
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch, NormalizedBlockSparseConfig
from flash_attn.cute.lists import own_rows, query_halves
from fuzz.case import FORMS

drawn = st.builds(
    Drawn,
    shapes=st.builds(
        lambda first, more: (first, *more),
        st.tuples(st.integers(1, 5), st.integers(1, 5)),
        st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=3),
    ),
    H=st.integers(1, 3),
    factor=st.sampled_from([1, 3, 5]),
    form=st.sampled_from(sorted((*FORMS, "shared"))),
    density=st.sampled_from([0.0, 0.2, 0.6, 1.0]),
    full=st.sampled_from([0.0, 0.4, 1.0]),
    with_full=st.booleans(),
    seed=st.integers(0, 1 << 30),
)


def walked(merged: BlockSparseTensorsTorch, before: torch.Tensor, rows: list[int], values: torch.Tensor | None = None):
    """{(sequence, head, kind, row, block): halves} as a kernel finds it; or the `values` in place of the halves."""
    table = {}
    kinds = [(merged.mask_block_cnt, merged.cu_block_idx_offsets)]
    if merged.full_block_cnt is not None:
        kinds.append((merged.full_block_cnt, merged.cu_full_block_idx_offsets))
    for kind, (counts, starts) in enumerate(kinds):
        for head in range(counts.shape[0]):
            for sequence, of in enumerate(rows):
                for row in range(of):
                    at = int(before[sequence]) + row
                    for place in range(int(starts[head, at]), int(starts[head, at]) + int(counts[head, at])):
                        entry = int(merged.mask_block_idx[place])
                        found = entry & 3 if values is None else int(values[place])
                        where = sequence, head, kind, row, entry >> 2
                        assert where not in table, "listed twice"
                        table[where] = found
    return table


@settings(deadline=None, max_examples=150)
@given(case=drawn, asked=st.booleans())
def test_forward_tiles_walk_what_either_half_lists(case: Drawn, asked: bool) -> None:
    merged = query_halves.merged_forward(as_joined(case, backward=False), asked=asked)
    rows = [tiles(case, sequence) for sequence in range(len(case.shapes))]
    got = walked(merged, merged.cu_total_m_blocks, rows)
    if not asked:  # they are full blocks
        got = {(*place[:2], 0, *place[3:]): halves for place, halves in got.items()}
        assert int(merged.mask_block_cnt.sum()) == 0
    assert got == expected(case, False, asked)
    assert merged.block_size == (128, 128) and merged.mask_block_idx.ndim == 1


@settings(deadline=None, max_examples=150)
@given(case=drawn, asked=st.booleans())
def test_backward_entries_are_tiles_of_both_halves(case: Drawn, asked: bool) -> None:
    merged = query_halves.merged_backward(as_joined(case, backward=True), asked=asked)
    assert walked(merged, merged.cu_total_n_blocks, key_rows(case)) == expected(case, True, asked)
    assert merged.dq_write_order is None and merged.block_size == (128, 128)


@settings(deadline=None, max_examples=150)
@given(case=drawn, asked=st.booleans(), spt=st.booleans())
def test_adds_to_a_tile_of_queries_come_in_the_order_of_launch(case: Drawn, asked: bool, spt: bool) -> None:
    merged = query_halves.merged_backward(as_joined(case, backward=True), asked=asked, ordered=True, spt=spt)
    assert merged.spt is spt and (merged.dq_write_order_full is None) == (merged.full_block_cnt is None)
    got = walked(merged, merged.cu_total_n_blocks, key_rows(case), merged.dq_write_order)
    adds: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for sequence, head, kind, row, tile in got:
        adds.setdefault((sequence, head, tile), []).append((-row if spt else row, kind))
    for (sequence, head, tile), found in adds.items():
        for lock, (row, kind) in enumerate(sorted(found)):
            assert got[sequence, head, kind, abs(row), tile] == lock


@settings(deadline=None, max_examples=150)
@given(
    case=drawn, asked=st.booleans(), spt=st.booleans(), groups=st.integers(1, 3), cut=st.integers(0, 2)
)  # fmt: skip
def test_ctas_of_a_key_block_add_in_turn(case: Drawn, asked: bool, spt: bool, groups: int, cut: int) -> None:
    """Every add waits for a value of its own, which adds made earlier, or by CTAs launched earlier, bring about."""
    lists = as_joined(case, backward=True)
    merged = query_halves.merged_backward(lists, asked=asked, ordered=True, spt=spt, groups=groups)
    for sequence, rows in enumerate(key_rows(case)):
        launched = Launched(groups, max(rows * groups - cut % groups, 0), spt)
        for head in range(case.H if rows else 0):
            walks = adds(merged, head, int(merged.cu_total_n_blocks[sequence]), launched)
            assert_in_order(walks, launched)


def test_what_is_shared_stays_shared() -> None:
    """One list for 3 sequences and 4 heads is joined once."""
    case = Drawn(shapes=((3, 4),) * 3, H=1, form="shared")
    lists = tensors(case, backward=False)
    lists = lists._replace(**{n: getattr(lists, n).expand(3, 4, *getattr(lists, n).shape[2:]) for n in FIELDS})
    merged = query_halves.merged_forward(lists, asked=True)
    assert merged.mask_block_cnt.shape == (4, 2) and merged.mask_block_cnt.stride(0) == 0
    assert merged.cu_total_m_blocks.tolist() == [0, 0, 0, 0]
    room = lists.mask_block_idx.shape[-1] * 3 + lists.full_block_idx.shape[-1] * 3
    assert merged.mask_block_idx.numel() == room + 1
    packed = tensors(replace(case, form="ragged"), backward=True)
    packed = packed._replace(
        **{n: getattr(packed, n).expand(4, -1) for n in ("mask_block_cnt", "full_block_cnt", *own_rows.STARTS)}
    )
    merged = query_halves.merged_backward(packed, asked=True)
    assert merged.mask_block_idx.numel() == packed.mask_block_idx.numel() + packed.full_block_idx.numel() + 1


FIELDS = ("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx")


def test_forward_walks_tiles_as_rows() -> None:
    case = Drawn(shapes=((3, 4), (2, 5)), form="stacked", factor=3)
    config = NormalizedBlockSparseConfig(as_joined(case, backward=False), None, 3, 1)
    config = query_halves.forward_config(config, tile_q=128, packed=False, asked=True)
    rows = [tiles(case, sequence) for sequence in (0, 1)]
    assert walked(config.tensors, config.tensors.cu_total_m_blocks, rows) == expected(case, False, asked=True)
    assert config.q_subtile_factor == 1


@pytest.mark.parametrize(
    ("block_q", "heads", "tile_q", "divided"), [(64, 2, 128, 1), (64, 4, 256, 1), (192, 4, 128, 6), (320, 12, 256, 15)]
)
def test_tiles_of_packed_heads_find_their_block(block_q: int, heads: int, tile_q: int, divided: int) -> None:
    lists = BlockSparseTensorsTorch(None, None, block_size=(block_q, 128))
    assert query_halves.packs(lists, heads) and not query_halves.packs(lists, 1)
    heads, divisor = query_halves.whole_tiles(heads, query_halves.block_tiles(block_q, tile_q))
    assert heads * divisor == divided
    assert query_halves.whole_tiles(4, query_halves.block_tiles(256, 128)) == (4, 2), "what it is without halves"


def test_which_calls_are_joined() -> None:
    def joined(arch: int, block_size: tuple[int, int] | None) -> bool:
        return query_halves.has_halves(arch, BlockSparseTensorsTorch(None, None, block_size=block_size))

    assert [joined(100, (block_q, 128)) for block_q in (64, 128, 192, 256, 0)] == [True, False, True, False, False]
    assert not joined(90, (64, 128)) and not joined(100, None) and not query_halves.has_halves(100, None)


def test_rows_behind_the_last_sequence_are_not_read() -> None:
    case = Drawn(shapes=((3, 4), (2, 4)))
    lists = tensors(case, backward=False)
    behind = {
        n: torch.nn.functional.pad(getattr(lists, n), (0,) * (n.endswith("idx") * 2) + (0, 2), value=2) for n in FIELDS
    }
    merged = query_halves.merged_forward(lists._replace(**behind), asked=True)
    rows = [tiles(case, sequence) for sequence in (0, 1)]
    assert walked(merged, merged.cu_total_m_blocks, rows) == expected(case, False, True)
    assert int(merged.mask_block_cnt.sum() + merged.full_block_cnt.sum()) == len(expected(case, False, True))
