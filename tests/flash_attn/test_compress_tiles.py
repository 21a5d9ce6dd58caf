"""Compressed-causal tiles: ranges and masks against the definition, and SM90's split of the work."""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from fa_compile import Worker, in_order, kernel_fields, on_cpu
from torch._subclasses.fake_tensor import unset_fake_temporarily

from flash_attn.cute.compressed_causal import schedule as compress_schedule
from flash_attn.cute.compressed_causal.mask import CompressArgs
from flash_attn.cute.compressed_causal.schedule import QueryShares, first_query_tile, forward_tile, query_shares
from fuzz.attention import backward, compile_case, forward, make_inputs, options
from fuzz.case import Attention as Case

PAIRS = [(factor, offset) for factor in (1, 2, 3, 5, 16) for offset in (-40, -3, 0, 1, factor - 1, factor + 4, 31)]
TILES = [(4, 4), (8, 4), (4, 8), (6, 16)]
GROUPS = [1, 2, 3, 8]
LENGTHS_Q = [1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 33]
LENGTHS_K = [1, 3, 4, 5, 8, 9, 15, 17, 33]


def keys_seen_by(row: int, factor: int, offset: int) -> int:
    """Number of keys j with j * factor + offset <= row, were there no end of the keys."""
    return max((row - offset) // factor + 1, 0)


def kernel_ranges(cases: torch.Tensor, tile_m: int, tile_n: int, group: int) -> torch.Tensor:
    """BlockInfo's ranges for (seqlen_q, seqlen_k, factor, offset, m tile, n tile); in a worker.

    Forward's first and last tile and the end of those without a mask, the end that the order of
    deterministic writes counts from, and backward's first and last tile.
    """
    import cutlass
    import cutlass.cute as cute

    from flash_attn.cute.block_info import BlockInfo
    from flash_attn.cute.compressed_causal.mask import CompressArgs, CompressedCausal
    from flash_attn.cute.seqlen_info import SeqlenInfoQK

    @cute.jit
    def ranges(cases: cute.Tensor, out: cute.Tensor, group: cutlass.Constexpr):
        for i in range(cute.size(cases, mode=[0])):
            compress = CompressedCausal.create(CompressArgs(cases[i, 2], cases[i, 3]))
            info = SeqlenInfoQK.create(0, cases[i, 0], cases[i, 1])
            blocks = BlockInfo(tile_m, tile_n, True, qhead_per_kvhead_packgqa=group, compress=compress)
            n_min, n_max = blocks.get_n_block_min_max(info, cases[i, 4])
            out[i, 0], out[i, 1] = n_min, n_max
            out[i, 2] = blocks.get_n_block_min_causal_local_mask(info, cases[i, 4], n_min)
            out[i, 3] = blocks.get_n_block_max_for_m_block(info, cases[i, 4])
            # Backward never packs heads.
            blocks = BlockInfo(tile_m, tile_n, True, compress=compress)
            m_min, m_max = blocks.get_m_block_min_max(info, cases[i, 5])
            out[i, 4], out[i, 5] = m_min, m_max

    return on_cpu(ranges, cases, (6,), group)


def small_cases(tile_m: int, tile_n: int, group: int) -> Iterator[tuple[int, ...]]:
    for seqlen_q, seqlen_k, (factor, offset) in product(LENGTHS_Q, LENGTHS_K, sorted(set(PAIRS))):
        tiles = max(-(-seqlen_q * group // tile_m), -(-seqlen_k // tile_n))
        for tile in range(tiles):
            m, n = min(tile, (seqlen_q * group - 1) // tile_m), min(tile, (seqlen_k - 1) // tile_n)
            yield seqlen_q, seqlen_k, factor, offset, m, n


def large_cases(tile_m: int, tile_n: int, group: int) -> Iterator[tuple[int, ...]]:
    """Cases at the end of 32 bits: keys whose first row does not fit, long sequences, the largest pair."""
    lengths_q, lengths_k = [1 << 20, (1 << 27) - 1, (1 << 30) // group - 300], [1, 1 << 17, 1 << 24, 1 << 30]
    pairs = [(1, 0), (1, -(1 << 29)), (1000, 999), (4096, 1 << 29), (1 << 22, (1 << 22) - 1), (1 << 22, -(1 << 29))]
    for seqlen_q, seqlen_k, (factor, offset) in product(lengths_q, lengths_k, pairs):
        last_m, last_n = (seqlen_q * group - 1) // tile_m, (seqlen_k - 1) // tile_n
        for part in range(5):
            yield seqlen_q, seqlen_k, factor, offset, last_m * part // 4, last_n * part // 4


@pytest.mark.parametrize(
    "tile_m,tile_n,group,cases",
    [(*tiles, group, small_cases) for tiles, group in in_order(TILES, *GROUPS)] + [(128, 128, 8, large_cases)],
)
def test_kernels_visit_ranges(compiler_sm90: Worker, tile_m: int, tile_n: int, group: int, cases: Callable) -> None:
    table = torch.tensor(list(cases(tile_m, tile_n, group)), dtype=torch.int32)
    got = compiler_sm90.run(kernel_ranges, table, tile_m, tile_n, group)
    for case, ranges in zip(table.tolist(), got.tolist()):
        seqlen_q, seqlen_k, factor, offset, m, n = case
        rows = (m * tile_m // group, min(((m + 1) * tile_m - 1) // group, seqlen_q - 1))
        full, seen = (min(keys_seen_by(row, factor, offset), seqlen_k) for row in rows)
        end = -(-seen // tile_n)
        n_min, n_max, n_masked, n_order, m_min, m_max = ranges
        assert (n_min, n_max, n_order) == (0, end, end), case
        # The tile visited first gets a mask in any case: the keys may end in it.
        assert min(n_masked, n_max - 1) == min(full // tile_n, end - 1), case
        assert m_min == first_query_tile(CompressArgs(factor, offset), n * tile_n, seqlen_q, tile_m), case
        assert m_max == -(-seqlen_q // tile_m), case


def written_ends(cases: torch.Tensor, tile_m: int, tile_n: int) -> torch.Tensor:
    """first_written_end of (seqlen_q, seqlen_k, factor, offset, key tile, end of the query tiles); in a worker."""
    import cutlass.cute as cute

    from flash_attn.cute.block_info import BlockInfo
    from flash_attn.cute.bwd_sm90.accumulators import first_written_end
    from flash_attn.cute.compressed_causal.mask import CompressArgs, CompressedCausal
    from flash_attn.cute.seqlen_info import SeqlenInfoQK

    @cute.jit
    def ends(cases: cute.Tensor, out: cute.Tensor):
        for i in range(cute.size(cases, mode=[0])):
            compress = CompressedCausal.create(CompressArgs(cases[i, 2], cases[i, 3]))
            info = SeqlenInfoQK.create(0, cases[i, 0], cases[i, 1])
            blocks = BlockInfo(tile_m, tile_n, True, compress=compress)
            out[i] = first_written_end(blocks, info, cases[i, 4], cases[i, 5])

    return on_cpu(ends, cases, ())


@pytest.mark.parametrize("share", [3, 1000])
def test_every_seen_tile_has_one_writer_the_last_key_tile(compiler_sm90: Worker, share: int) -> None:
    tile_m, tile_n = TILES[2]
    calls = [(*lengths, *pair) for *lengths, pair in product(LENGTHS_Q[::2], LENGTHS_K[::2], sorted(set(PAIRS)))]
    loops = []
    for T_q, T_k, factor, offset in calls:
        m_tiles = -(-T_q // tile_m)
        for n, first in product(range(-(-T_k // tile_n)), range(0, m_tiles, share)):
            begin = first_query_tile(CompressArgs(factor, offset), n * tile_n, T_q, tile_m)
            loops.append(((T_q, T_k, factor, offset), n, max(begin, first), min(m_tiles, first + share)))
    cases = torch.tensor([(*call, n, end) for call, n, _, end in loops], dtype=torch.int32)
    wrote: Counter[tuple[Any, int, int]] = Counter()
    for (call, n, begin, end), written in zip(loops, compiler_sm90.run(written_ends, cases, tile_m, tile_n).tolist()):
        wrote.update((call, m, n) for m in range(begin, min(written, end)))
    last = {}
    for T_q, T_k, factor, offset in calls:
        for m in range(-(-T_q // tile_m)):
            seen = min(keys_seen_by(min((m + 1) * tile_m, T_q) - 1, factor, offset), T_k)
            if seen:
                last[(T_q, T_k, factor, offset), m, (seen - 1) // tile_n] = 1
    assert wrote == last


KINDS = {"sm90": (128, 64), "sm90 swapped": (64, 128), "sm100": (128, 128), "sm100 backward": (128, 128)}


def kernel_masks(cases: torch.Tensor, kind: str, group: int) -> torch.Tensor:
    """The part of a tile AttentionMask leaves for (seqlen_q, seqlen_k, factor, offset, m tile, n tile); in a worker."""
    import cutlass
    import cutlass.cute as cute
    import cutlass.utils.hopper_helpers as sm90_utils
    from cutlass import Float32, Int32, Int64, Uint32, const_expr
    from cutlass.cute.nvgpu import OperandMajorMode

    import flash_attn.cute.mask
    from flash_attn.cute.compressed_causal.mask import CompressArgs, CompressedCausal
    from flash_attn.cute.mask import AttentionMask
    from flash_attn.cute.seqlen_info import SeqlenInfoQK

    # The one thing that a CPU lacks: shifts in PTX.
    @cute.jit
    def bits_below(limit: Int32, s: int) -> Uint32:
        bits = Int64(cutlass.min(cutlass.max(limit - s * 32, 0), 32))
        return Uint32((Int64(1) << bits) - 1)

    @cute.jit
    def bits_above(limit: Int32, s: int) -> Uint32:
        return Uint32(0xFFFFFFFF) ^ bits_below(limit, s)

    class OwnsOneRow:
        """A thread of the SM100 softmax: partitions of the tile are that thread's row."""

        def __init__(self, row: Int32) -> None:
            self.row = row

        def partition_C(self, tile: cute.Tensor) -> dict:
            return {((None, None), 0, 0): tile[self.row, None]}

        def partition_D(self, row: cute.Tensor) -> cute.Tensor:
            return row

    tile_m, tile_n = KINDS[kind]
    num_rep, num_threads = 16, 128 if kind == "sm100" else 256

    @cute.jit
    def masks(cases: cute.Tensor, out: cute.Tensor, group: cutlass.Constexpr):
        tiler = (64, tile_m if kind == "sm90 swapped" else tile_n)
        major = OperandMajorMode.K
        tiled_mma = sm90_utils.make_trivial_tiled_mma(
            cutlass.BFloat16, cutlass.BFloat16, major, major, Float32, atom_layout_mnk=(2, 1, 1), tiler_mn=tiler
        )
        for i in range(cute.size(cases, mode=[0])):
            compress = CompressedCausal.create(CompressArgs(cases[i, 2], cases[i, 3]))
            m, n = cases[i, 4], cases[i, 5]
            swapped = const_expr(kind in ("sm90 swapped", "sm100 backward"))
            mask = AttentionMask(
                tile_m, tile_n, SeqlenInfoQK.create(0, cases[i, 0], cases[i, 1]),
                qhead_per_kvhead_packgqa=group, swap_AB=swapped, compress=compress,
            )  # fmt: skip
            tile = cute.make_identity_tensor((tile_n, tile_m) if swapped else (tile_m, tile_n))
            for thread in range(num_threads):
                if const_expr(kind == "sm100"):
                    owned = tile[thread, None]
                elif const_expr(kind == "sm100 backward"):
                    # Two warp groups take turns of num_rep rows each.
                    parts = cute.flat_divide(cute.flat_divide(tile[thread % 128, None], (num_rep,)), (num_rep, 2))
                    owned = parts[None, thread // 128, 0, None]
                else:
                    owned = tiled_mma.get_slice(thread).partition_C(tile)
                acc = cute.make_rmem_tensor(owned.shape, Float32)
                acc.fill(1.0)
                if const_expr(kind == "sm100"):
                    mask.apply_mask_sm100(acc, m, n, OwnsOneRow(thread), OwnsOneRow(thread), True, True)
                elif const_expr(kind == "sm100 backward"):
                    mask.apply_mask_sm100_transposed(acc, owned, owned, m, n, True, True, False)
                else:
                    mask.apply_mask(acc, 0, 0, m, n, tiled_mma.get_slice(thread), True, True)
                for e in cutlass.range_constexpr(cute.size(acc)):
                    row, col = (owned[e][1], owned[e][0]) if const_expr(swapped) else owned[e]
                    out[i, row, col] = acc[e]

    with unset_fake_temporarily(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash_attn.cute.mask, "r2p_bitmask_below", bits_below)
        patch.setattr(flash_attn.cute.mask, "r2p_bitmask_above", bits_above)
        return on_cpu(masks, cases, torch.full((len(cases), tile_m, tile_n), torch.nan), group)


def mask_cases(tile_m: int, tile_n: int, group: int) -> Iterator[tuple[int, ...]]:
    """Tiles along the edge, and one before and one after it."""
    for (factor, offset), seqlen_q in product([(1, 0), (1, -70), (3, 2), (7, 31), (64, 63), (1000, -77)], (100, 700)):
        for beyond in (-9, 0, 200):
            seqlen_k = max(keys_seen_by(seqlen_q - 1, factor, offset) + beyond, 1)
            for m in range(-(-seqlen_q * group // tile_m)):
                edge = keys_seen_by(m * tile_m // group, factor, offset) // tile_n
                for n in {max(edge - 1, 0), edge, edge + 1}:
                    if n * tile_n < seqlen_k:
                        yield seqlen_q, seqlen_k, factor, offset, m, n


@pytest.mark.parametrize("kind,group", [(kind, 1) for kind in KINDS] + [("sm100", 5)])
def test_kernels_mask_these_pairs(compiler_sm90: Worker, kind: str, group: int) -> None:
    tile_m, tile_n = KINDS[kind]
    table = torch.tensor(list(mask_cases(tile_m, tile_n, group)), dtype=torch.int32)
    got = compiler_sm90.run(kernel_masks, table, kind, group)
    for case, left in zip(table.tolist(), got):
        seqlen_q, seqlen_k, factor, offset, m, n = case
        t = (torch.arange(tile_m)[:, None] + m * tile_m) // group
        j = torch.arange(tile_n)[None, :] + n * tile_n
        seen = torch.where((j * factor + offset <= t) & (j < seqlen_k), 1.0, -torch.inf)
        within = (t < seqlen_q)[:, 0]
        assert left[within].equal(seen[within]), f"{case!r}: {(left != seen).nonzero()[:4].tolist()}"


def test_multiprocessors_get_four_shares_each() -> None:
    plans = {T: query_shares(CompressArgs(64, 63), T, T // 64, 64, 128, 32, 132) for T in (4096, 16384, 65536)}
    # One key tile, then two and eight, which 64, 256 + 128 and 8 * 1024 - 28 * 128 query tiles see, but for the first.
    assert plans == {4096: QueryShares(8, 8), 16384: QueryShares(12, 23), 65536: QueryShares(8, 128)}


def test_the_tile_is_for_calls_that_leave_room() -> None:
    assert forward_tile(128, 128, 1, plain=True) == (192, 80)
    assert forward_tile(128, 128, 5, plain=True) is None
    assert forward_tile(64, 64, 1, plain=True) == forward_tile(96, 96, 8, plain=True) == (192, 112)
    assert forward_tile(192, 128, 1, plain=True) is forward_tile(80, 80, 1, plain=True) is None
    assert forward_tile(128, 128, 4, plain=False) is None


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_kernels_follow_the_plan(compiler_sm90: Worker, deterministic: bool) -> None:
    """The forward kernel's tile, and backward's shares of the queries."""
    case = Case(D=128, B=1, T_q=4096, T_k=64, compress=(64, 63), deterministic=deterministic)
    assert compiler_sm90.trace(kernel_fields, "tile_m tile_n", compile_case, case) == [(192, 80)]
    kind = "FlashAttentionBackwardSm90"
    assert compiler_sm90.trace(kernel_fields, "splits_queries", compile_case, case, kind=kind, traced=True) == [(True,)]


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("factor,offset", [(64, 63), (7, 0)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_plan_changes_no_result(
    D: int, factor: int, offset: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flash_attn.cute.interface import _flash_attn_fwd

    T = 9000
    case = Case(D=D, T_q=T, T_k=T // factor + 3, Hq=8, compress=(factor, offset), deterministic=deterministic)
    x = make_inputs(case)
    o, lse = forward(case, x)
    plain, plain_lse, *_ = _flash_attn_fwd(x.q, x.k, x.v, return_lse=True, tile_mn=(128, 128), **options(case, x))
    torch.testing.assert_close(o, plain, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse, plain_lse, rtol=1e-4, atol=1e-4)
    results = []
    # In order no share may be empty: those before it would wait for it.
    fewest = [(-(-T // (8192 // D) // tiles), tiles) for tiles in (200, 80, 11, 3)]
    for shares in fewest if deterministic else [*fewest, (1000, 3)]:
        monkeypatch.setattr(compress_schedule, "query_shares", lambda *_, shares=shares: QueryShares(*shares))
        results.append(backward(case, x, o, lse))
    for result in results[1:]:
        for got, expected in zip(result, results[0], strict=True):
            # The shares are added up in fp32: the rest is the rounding of the sum.
            torch.testing.assert_close(got, expected, rtol=1e-2, atol=float(expected.abs().max()) * 1e-2)
