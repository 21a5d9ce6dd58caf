"""Lists by token as the kernels read them: unions with their bits, and the tokens of each block, hold the pairs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from hypothesis import strategies as st

from fuzz.prop import GPU, holds
from nsa_layer import NSAConfig
from nsa_tools.testing.cases import Case

ROWS, SIZE = 128, 64  # (token, head) pairs of a tile, keys of a block
COMPILED = ((4, 16), (3, 5), (16, 16), (1, 8))  # heads of a group, entries of a list

Tensors = Sequence[torch.Tensor]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Few kinds of kernels, any lengths; the lists are drawn from the seed."""
    G, n = draw(st.sampled_from(COMPILED))
    lengths = st.lists(st.integers(0, 700), min_size=2, max_size=4).filter(any).map(tuple)
    return Case(
        B=draw(st.integers(1, 2)),
        T=draw(st.one_of(st.integers(1, 1500), st.sampled_from((1, 64, 128, 129)))),
        Hq=2 * G,
        Hkv=2,
        config=NSAConfig(q_tile=1, block_size=SIZE, block_counts=n),
        causal=draw(st.booleans()),
        lengths=draw(st.none() | lengths),
        seed=draw(st.integers(0, 999)),
    )


def lengths_of(case: Case) -> tuple[int, ...]:
    return (case.T,) * case.B if case.lengths is None else case.lengths


def drawn_lists(case: Case) -> torch.Tensor:
    """int32 [B, T, Hkv, n] or [total, Hkv, n]: in any order, padded anywhere, twice, and outside of the sequence."""
    generator = torch.Generator().manual_seed(case.seed)
    shape = (case.Hkv, case.config.block_counts)
    lists = [torch.randint(-1, -(-T // SIZE) + 2, (T, *shape), generator=generator) for T in lengths_of(case)]
    return (torch.stack if case.lengths is None else torch.cat)(lists).int()


def listed_pairs(case: Case, lists: torch.Tensor) -> list[torch.Tensor]:
    """bool [T, Hkv, N] of each sequence: the token lists the block, and sees some of it."""
    counted = []
    for own in lists if case.lengths is None else lists.split(case.lengths):
        T = len(own)
        N = -(-T // SIZE)
        valid = (own >= 0) & (own < N)
        if case.causal:
            valid &= own * SIZE <= torch.arange(T).view(-1, 1, 1)
        table = torch.zeros(T, case.Hkv, N + 1, dtype=torch.bool)
        counted.append(table.scatter_(2, own.where(valid, N).long(), True)[..., :N])
    return counted


def assert_unions(case: Case, listed: list[torch.Tensor], unions: Tensors) -> None:
    """Counts [B, H, M], blocks [B, H, M, R] and bits [B, H, M, R, W]; packed without B, M of all sequences.

    Each pair is in every tile that the token has rows in, once.
    """
    G = case.Hq // case.Hkv
    starts = list(accumulate((-(-len(own) * G // ROWS) for own in listed), initial=0))
    for b, own in enumerate(listed):
        counts, blocks, bits = (x[b] if case.lengths is None else x[:, starts[b] : starts[b + 1]] for x in unions)
        T, M = len(own), counts.shape[1]
        j = torch.arange(32 * bits.shape[-1])
        shown = (bits.repeat_interleave(32, -1) >> j % 32) & 1 == 1
        shown &= (torch.arange(blocks.shape[-1]) < counts[..., None])[..., None]
        h, m, r, bit = shown.nonzero().T
        token = m * ROWS // G + bit
        assert (token < T).all(), f"sequence {b}: a token behind the end"
        counted = torch.zeros(T, case.Hkv, own.shape[2], dtype=torch.int64)
        counted.index_put_((token, h, blocks[h, m, r].long()), torch.ones_like(h), accumulate=True)
        first = torch.arange(T) * G
        tiles = (first + G - 1) // ROWS - first // ROWS + 1
        assert counted.equal(own * tiles.view(-1, 1, 1)), f"sequence {b}: other pairs in unions of {M} tiles"


def assert_pairs(case: Case, listed: list[torch.Tensor], tokens: torch.Tensor, items: Tensors, ends: Tensors) -> None:
    """The tokens of each block: ``tokens[begin:end]`` of the items (row, begin, end, partial); ends: `row_items`."""
    longest = max(map(len, listed))
    by_block = [torch.nn.functional.pad(own.permute(1, 2, 0), (0, longest - len(own))) for own in listed]
    expected = torch.cat([x.flatten(0, 1) for x in by_block]) if case.lengths is None else torch.cat(by_block, 1)
    expected = expected.flatten(0, -2)  # [rows, longest]
    row, begin, end, _ = items[: int(ends[-1])].long().T
    count = end - begin
    place = torch.arange(int(count.sum())) - (count.cumsum(0) - count - begin).repeat_interleave(count)
    counted = torch.zeros(expected.shape, dtype=torch.int64)
    one = torch.ones_like(place)
    counted.index_put_((row.repeat_interleave(count), tokens[place].long()), one, accumulate=True)
    assert counted.equal(expected.long()), "other tokens in the blocks' items"


def made_lists(case: Case, lists: torch.Tensor) -> tuple[Tensors, Tensors]:
    """The unions that forward and dq read, and the pairs that dk and dv read."""
    from nsa_layer.cute.selected import selected_options, token_block_csr
    from nsa_layer.cute.varlen import Varlen

    T, heads = sum(case.lengths) if case.lengths else case.T, (case.Hq, case.Hkv)
    varlen = Varlen.of(case.spec, lists.device, case.Hq // case.Hkv)
    static = dict(S=T, spec=case.spec, varlen=varlen, q_offset=None)
    unions = selected_options(lists, T, heads, backward=False, **static)["block_sparse_tensors"]
    pairs = token_block_csr(lists, heads, T, **static)
    of_queries = (unions.mask_block_cnt, unions.mask_block_idx, unions.mask_block_bits)
    return of_queries, (pairs.tokens, pairs.items, pairs.row_items)


@holds("layer.lists by token", cases, needs=GPU)
def hold_exactly_their_pairs(case: Case) -> None:
    lists = drawn_lists(case)
    listed = listed_pairs(case, lists)
    unions, pairs = made_lists(case, lists.cuda())
    assert_unions(case, listed, [x.cpu() for x in unions])
    assert_pairs(case, listed, *(x.cpu() for x in pairs))
