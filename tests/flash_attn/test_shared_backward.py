"""Backward calls that share row sums and accumulators: what may be shared, what is launched, and the gradients."""

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from fa_compile import Worker, built_kernels
from fa_dq import as_rows, converted, queries

from fuzz.attention import Inputs, backward, forward, make_inputs, options
from fuzz.attention_lists import backward_lists
from fuzz.case import Attention as Case

FACTOR = 64
BASE = Case(D=128, T_q=1000, T_k=1000, Hq=8)


def pack(*lengths: int) -> dict[str, Any]:
    return dict(packed=tuple((n, n) for n in lengths))


def calls(base: Case) -> list[tuple[Case, Inputs]]:
    """A compressed-causal call, one with block lists, or packed a causal one, which has tiles of its own at head
    dimension 64, and one with a window, over the same queries; the latter two over the same keys."""
    lengths = dict(packed=tuple((n, n // FACTOR) for n, _ in base.packed), T_k=base.T_q // FACTOR)
    compressed = replace(base, compress=(FACTOR, FACTOR - 1), **lengths)
    plan = dict(plan=32, launch="right to left") if base.Hq != base.Hkv or base.deterministic else {}
    listed = {} if base.packed else dict(lists="both", block=(128, 64), **plan)
    x = make_inputs(base)
    cases = compressed, replace(base, causal=True, **listed), replace(base, window=(199, 0))
    return list(zip(cases, (replace(make_inputs(compressed), q=x.q, do=x.do), x, x)))


def of_backward(case: Case, x: Inputs) -> dict[str, Any]:
    return options(case, x) | dict(deterministic=case.deterministic, block_sparse_tensors=backward_lists(case))


def shared_gradients(
    called: list[tuple[Case, Inputs]], rows: list[Any] | None, results: list[Any], before: Any
) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv on top of `before`, and dk and dv of the compressed call; rows from o and lse of `results`."""
    from flash_attn.cute.interface import _flash_attn_bwd
    from flash_attn.cute.shared_backward import SharedBackward, aligned, backward_layout, convert, zeroed

    (case, compressed), (_, x), _ = called
    scale, given = case.D**-0.5, [of_backward(*each) for each in called]
    layouts = aligned(*(backward_layout(x.q, own.k, own.v, **each) for (_, own), each in zip(called, given)))
    assert len({of.dq.layout_key for of in layouts}) == 1 and layouts[1].dk.layout_key == layouts[2].dk.layout_key
    if rows is None:
        rows = [row_sums(case, layouts[0], x.do, *each[:2]) for each in results]
    dq = torch.full(layouts[0].dq.shape, torch.nan, device="cuda")
    *accums, flags = zeroed(layouts[0].dk, layouts[0].dv, layouts[1].dk, layouts[1].dv, (2, 3, 1), device=x.q.device)
    flags = zeroed(layouts[0].flags, device=x.q.device)[0] if layouts[0].flags else None
    for i, (layout, (_, own), row, each) in enumerate(zip(layouts, called, rows, given)):
        dk, dv = accums[:2] if i == 0 else accums[2:]
        shared = SharedBackward(layout, *row, dq, dk, dv, first=i == 0, flags=None if i else flags)
        got = _flash_attn_bwd(x.q, own.k, own.v, None, x.do, None, softmax_scale=scale, **each, shared=shared)
        assert got == (None, None, None)
    cu_q, cu_k = x.cu_seqlens or (None, None)
    cu_blocks = compressed.cu_seqlens[1] if case.packed else None
    out_q, out_k, out_v = (t.clone() for t in before)
    convert(dq, layouts[0].dq, out_q, scale=scale, cu_seqlens=cu_q, add=True)
    convert(accums[2], layouts[1].dk, out_k, scale=scale, cu_seqlens=cu_k, add=True)
    convert(accums[3], layouts[2].dv, out_v, scale=1.0, cu_seqlens=cu_k, add=True)
    blocks_k, blocks_v = (torch.full_like(t, torch.nan) for t in (compressed.k, compressed.v))
    convert(accums[0], layouts[0].dk, blocks_k, scale=scale, cu_seqlens=cu_blocks)
    convert(accums[1], layouts[0].dv, blocks_v, scale=1.0, cu_seqlens=cu_blocks)
    return out_q, out_k, out_v, blocks_k, blocks_v


def row_sums(case: Case, layout: Any, do: torch.Tensor, o: torch.Tensor, lse: torch.Tensor) -> Any:
    return as_rows(o, do, lse, queries(case), layout.row_shape, layout.dq.start)


def compiled(base: Case) -> list[str]:
    """The kernels that shared calls and conversions compile; in a worker."""
    from flash_attn.cute.shared_backward import aligned, backward_layout

    called = calls(base)
    x = called[1][1]
    layout = aligned(*(backward_layout(x.q, x.k, x.v, **of_backward(*each)) for each in called))[0]
    row = tuple(torch.empty(layout.row_shape, device="cuda") for _ in range(2))
    with built_kernels() as kernels:
        shared_gradients(called, [row] * 3, [], (x.q, x.k, x.v))
    return [*map(_named, kernels)]


def _named(kernel: Any) -> str:
    name = type(kernel).__name__
    if "Sm90" in name:
        return f"{name} {kernel.sequence_starts}"
    return f"{name} {kernel.add_to}" if name.endswith("Postprocess") else name


def test_nothing_but_the_kernels_and_the_conversions_is_launched(compiler_sm90: Worker) -> None:
    kernel, convert = "FlashAttentionBackwardSm90", "FlashAttentionBackwardPostprocess"
    # Three calls; dq and the tokens' dk and dv on top of what is there, the blocks' by themselves.
    expected = [f"{kernel} {tile}" for tile in ((64, 128), (64, 64), (64, 128))]
    more = (replace(BASE, D=64, **pack(300, 0, 1, 200)), replace(BASE, deterministic=True))
    names, packed, ordered = (compiler_sm90.trace(compiled, base) for base in (BASE, *more))
    assert names[:3] == expected and set(names[3:]) == {f"{convert} True", f"{convert} False"}
    assert packed[0] == f"{kernel} (128, 128)" and not any("Preprocess" in name for name in packed + ordered)


def accumulators(case: Case) -> tuple[int, ...]:
    """The shape of the accumulator of dq; in a worker."""
    from flash_attn.cute.shared_backward import backward_layout

    x = make_inputs(case)
    return backward_layout(x.q, x.k, x.v, **of_backward(case, x)).dq.shape


def test_calls_share_at_head_dimension_256(compiler: Worker) -> None:
    case = replace(BASE, D=256, window=(199, 0))
    assert compiler.trace(accumulators, case) == (case.B, case.Hq, 1024 * 256)


def conversions(arch: int, D: int) -> None:
    """Compile every conversion that adds; in a worker."""
    from flash_attn.cute.bwd_accum_tile import AccumTileOrder
    from flash_attn.cute.shared_backward import AccumLayout, Tile, convert

    tiles = [(64, 256, 1, False), (64, 128, 1, False), (128, 256, 2, False), (80, 256, 1, True)]
    cases = [(*tile, False, None) for tile in tiles if tile[0] != 80 or D == 128]
    if arch == 100:
        orders = [(False, AccumTileOrder.TMEM_FRAG_1CTA), (False, AccumTileOrder.ROW_MAJOR)]
        orders += [(True, AccumTileOrder.TMEM_FRAG_2CTA)] if D == 128 else []
        cases = [(128, 128, 1, False, *order) for order in orders]
    for (rows, *more, order), sequences in product(cases, (None, 3)):
        tile = Tile(arch, rows, *more, 32, order)
        layout = AccumLayout((2, 4) if sequences is None else (4,), 1000, sequences, rows, D, tile)
        out = torch.empty(*layout.heads[:-1], 1000, 4, D, dtype=torch.float16, device="cuda")
        cu_seqlens = None if sequences is None else torch.empty(4, dtype=torch.int32, device="cuda")
        convert(torch.empty(layout.shape, device="cuda"), layout, out, scale=0.5, cu_seqlens=cu_seqlens, add=True)


def test_conversions_that_add_compile(compiler: Worker) -> None:
    for D in (64, 128):
        compiler.trace(conversions, int(compiler.arch.removeprefix("sm_")), D)


def positions(rows: int, threads: int, atoms: int, D: int) -> list[list[int]]:
    """The positions where a kernel with such tiles leaves the elements of 128 rows: [row][column]; in a worker."""
    import cutlass
    import cutlass.cute as cute

    from flash_attn.cute.flash_bwd_postprocess import FlashAttentionBackwardPostprocess

    post = FlashAttentionBackwardPostprocess(cutlass.BFloat16, D, 90, rows, threads, atoms)
    found = [[-1] * D for _ in range(128)]

    def look() -> None:
        layout = post._get_tiled_mma().tv_layout_C_tiled
        values = cute.size(layout, mode=[1])
        for thread in range(threads):
            for value in range(values):
                at = int(cute.crd2idx((thread, value), layout))
                # A warpgroup's share lies together; in it come fours of registers, of one thread after the other.
                group, four = thread // 128, value // 4
                place = group * 128 * values + (four * 128 + thread % 128) * 4 + value % 4
                found[at % rows][at // rows] = place

    @cute.jit
    def trace():
        look()

    cute.compile(trace)
    for tile in range(rows, 128, rows):
        for row in range(rows):
            found[tile + row] = [place + tile * D for place in found[row]]
    return found


@pytest.mark.parametrize("D", [64, pytest.param(128, marks=pytest.mark.sweep)])
def test_tiles_of_one_pattern_put_elements_in_one_place(compiler_sm90: Worker, D: int) -> None:
    from flash_attn.cute.shared_backward import Tile

    tiles = [(64, 128, 1), (64, 256, 1), (128, 256, 2)]
    assert len({Tile(90, *tile, False, False, 32, None).pattern for tile in tiles}) == 1
    alike = [compiler_sm90.trace(positions, *tile, D) for tile in tiles]
    assert sorted(x for row in alike[0] for x in row) == list(range(128 * D))
    assert alike[0] == alike[1] == alike[2]


def test_tiles_that_differ_have_patterns_of_their_own() -> None:
    from flash_attn.cute.shared_backward import Tile

    tile = Tile(90, 64, 256, 1, False, False, 32, None)
    others = [tile._replace(rows=80, swapped=True), tile._replace(rows=128), tile._replace(arch=100)]
    assert len({each.pattern for each in (tile, *others)}) == 4


ON_A_GPU = [
    {},
    dict(D=64, T_q=777, T_k=777),
    dict(Hkv=1, T_q=70, T_k=70),
    dict(deterministic=True),
    pack(300, 1, 0, 513, 64),
    dict(D=64, **pack(300, 1, 0, 513, 64)),
    dict(D=64, **pack(300, 1, 513), deterministic=True),
]


@pytest.mark.gpu
@pytest.mark.parametrize("options", ON_A_GPU, ids=str)
def test_shared_calls_give_the_sum_of_separate_ones(options: dict[str, Any]) -> None:
    base = replace(BASE, **options)
    called = calls(base)
    x, parts = called[1][1], []
    before = tuple(torch.randn_like(t) * 0.1 for t in (x.q, x.k, x.v))
    for case, own in called:
        o, lse = forward(case, own)
        parts.append((o, lse, *backward(case, own, o, lse)))
    got = shared_gradients(called, None, parts, before)
    sums = [before[0].float() + sum(part[2].float() for part in parts)]
    sums += [before[i].float() + sum(part[2 + i].float() for part in parts[1:]) for i in (1, 2)]
    for name, mine, expected in zip(("dq", "dk", "dv", "dk_cmp", "dv_cmp"), got, (*sums, *parts[0][3:])):
        # Where a row sees one key its scores have no gradient: the rest is fp32 rounding of its terms.
        limit = max(5e-3 * float(expected.float().abs().max()), 1e-5)
        close = dict(rtol=2e-2, atol=limit, msg=lambda m: f"{name} of {base}: {m}")
        torch.testing.assert_close(mine.float(), expected.float(), **close)
    if base.deterministic:
        again = shared_gradients(called, None, parts, before)
        assert all(map(torch.equal, got, again)), base


@pytest.mark.gpu
def test_an_infinite_row_sum_takes_a_row_out() -> None:
    from flash_attn.cute.shared_backward import SharedBackward, backward_layout

    case = replace(BASE, T_q=500, T_k=500, causal=True)
    x = make_inputs(case)
    o, lse = forward(case, x)
    layout = backward_layout(x.q, x.k, x.v, causal=True)
    dpsum, logs = row_sums(case, layout, x.do, o, lse)
    out = torch.arange(case.T_q, device="cuda") % 3 == 0
    logs[:, :, : case.T_q].masked_fill_(out, math.inf)
    dq, dk, dv = backward(case, x, None, None, shared=SharedBackward(layout, dpsum, logs))
    expected = backward(case, replace(x, do=x.do * ~out[:, None, None]), o, lse)
    assert not dq[:, out].any()
    for mine, true in zip((dq, dk, dv), expected):
        torch.testing.assert_close(mine, true, rtol=2e-2, atol=5e-3 * float(true.abs().max()))


@pytest.mark.gpu
def test_accumulators_may_lie_far_apart() -> None:
    """Heads and sequences past 2**31 elements: as they are with 32 heads of 4M tokens."""
    from flash_attn.cute.shared_backward import SharedBackward, backward_layout, zeroed

    case, far = replace(BASE, Hq=2, Hkv=1, T_q=300, T_k=300, causal=True), 2**31 + 256
    x = make_inputs(case)
    o, lse = forward(case, x)
    layout = backward_layout(x.q, x.k, x.v, causal=True)
    rows = row_sums(case, layout, x.do, o, lse)
    of_q, of_k = (math.prod(x.shape) // 2 for x in (layout.dq, layout.dk))
    whole = torch.zeros(far + of_q + 2 * of_k, device="cuda")
    # The second head of dq, and the second sequence of dk and dv, are far from the first.
    apart = [
        whole.as_strided(layout.dq.shape, (of_q // 2, far, 1)),
        whole.as_strided(layout.dk.shape, (far, of_k, 1), of_q),
        whole.as_strided(layout.dv.shape, (far, of_k, 1), of_q + of_k),
    ]
    gradients = []
    for accums in (apart, zeroed(layout.dq, layout.dk, layout.dv, device=x.q.device)):
        backward(case, x, None, None, shared=SharedBackward(layout, *rows, *accums))
        gradients.append(converted(case, x, layout, *accums))
    for mine, expected in zip(*gradients):
        torch.testing.assert_close(mine, expected, rtol=2e-2, atol=1e-2)
