"""Backward calls that share row sums and accumulators: what may be shared, what is launched, and the gradients."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fa_compile import Worker, built_kernels
from fa_dq import as_rows

from fuzz.attention_lists import on_gpu

LIST_BLOCK = 64
WINDOW = 200
FACTOR = 64


@dataclass(frozen=True)
class Setup:
    """A compressed-causal call, one with block lists and one with a window, over the same queries."""

    D: int = 128
    heads: tuple[int, int] = (8, 2)
    T: int = 1000
    B: int = 2
    lengths: tuple[int, ...] = ()  # of packed sequences, in place of B and T; then without lists
    deterministic: bool = False


def tensors(setup: Setup) -> tuple[torch.Tensor, ...]:
    """q, do, k, v, k_cmp, v_cmp; unit normal, fake ones under FakeTensorMode."""
    torch.manual_seed(0)
    Hq, Hkv = setup.heads
    lead = (sum(setup.lengths),) if setup.lengths else (setup.B, setup.T)
    blocks = sum(n // FACTOR for n in setup.lengths) if setup.lengths else setup.T // FACTOR

    def tensor(H: int, compressed: bool = False) -> torch.Tensor:
        shape = (*lead[:-1], blocks if compressed else lead[-1], H, setup.D)
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda")

    return tensor(Hq), tensor(Hq), tensor(Hkv), tensor(Hkv), tensor(Hkv, True), tensor(Hkv, True)


def starts(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32, device="cuda")


def listed(setup: Setup) -> torch.Tensor:
    """The blocks of LIST_BLOCK keys that a tile of 128 queries sees: its own, the first, every third; [M, N]."""
    M, N = -(-setup.T // 128), -(-setup.T // LIST_BLOCK)
    m, n = torch.arange(M)[:, None], torch.arange(N)[None]
    return (n <= 2 * m + 1) & ((n == 0) | (n >= 2 * m) | (n % 3 == 0))


def lists(setup: Setup) -> tuple[Any, Any]:
    """Forward and backward lists."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    from flash_attn.cute.block_lists import lists_from_blocks, transpose_lists
    from flash_attn.cute.lists.backward_plan import RIGHT_TO_LEFT, plan_backward

    with unset_fake_temporarily():
        seen = listed(setup)
        forward = lists_from_blocks(seen.expand(setup.B, 1, *seen.shape), block_size=(128, LIST_BLOCK))
        backward = transpose_lists(forward, seen.shape[1])
        order = dict(deterministic=True, schedule=RIGHT_TO_LEFT) if setup.deterministic else {}
        heads = dict(num_heads=setup.heads[0], num_heads_kv=setup.heads[1])
        if setup.heads[0] != setup.heads[1] or setup.deterministic:
            backward = plan_backward(backward, num_q_blocks=seen.shape[0], **heads, **order)
    return on_gpu(forward), on_gpu(backward)


def calls(setup: Setup) -> list[tuple[dict, dict, bool]]:
    """Options of forward and of backward, and whether over the compressed keys."""
    compressed: dict[str, Any] = dict(causal=True, compress_factor=FACTOR, compress_offset=FACTOR - 1)
    window: dict[str, Any] = dict(window_size_left=WINDOW - 1, window_size_right=0)
    deterministic = dict(deterministic=setup.deterministic)
    if setup.lengths:
        blocks = [n // FACTOR for n in setup.lengths]
        q, k = starts(list(setup.lengths)), starts(blocks)
        longest = max(setup.lengths)
        window |= dict(cu_seqlens_q=q, cu_seqlens_k=q, max_seqlen_q=longest, max_seqlen_k=longest)
        compressed |= dict(cu_seqlens_q=q, cu_seqlens_k=k, max_seqlen_q=longest, max_seqlen_k=max(blocks))
        # A causal call has tiles of its own at head dimension 64.
        causal = {**window, "causal": True, "window_size_left": None, "window_size_right": None}
        return [(x, x | deterministic, x is compressed) for x in (compressed, causal, window)]
    forward, backward = (dict(causal=True, block_sparse_tensors=x) for x in lists(setup))
    return [
        (compressed, compressed | deterministic, True),
        (forward, backward | deterministic, False),
        (window, window | deterministic, False),
    ]


def shared_gradients(
    setup: Setup, rows: list[tuple[torch.Tensor, torch.Tensor]] | None, outputs: list[Any], before: Any
) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv on top of `before`, and dk and dv of the compressed call; rows are made from `outputs`."""
    from flash_attn.cute.interface import _flash_attn_bwd
    from flash_attn.cute.shared_backward import SharedBackward, aligned, backward_layout, convert, zeroed

    q, do, k, v, k_cmp, v_cmp = tensors(setup)
    scale = setup.D**-0.5
    options = [backward for _, backward, _ in calls(setup)]
    keys = [(k_cmp, v_cmp), (k, v), (k, v)]
    layouts = aligned(*(backward_layout(q, *kv, **each) for kv, each in zip(keys, options)))
    assert len({x.dq.place for x in layouts}) == 1 and layouts[1].dk.place == layouts[2].dk.place
    if rows is None:
        rows = [row_sums(setup, layouts[0], do, *output) for output in outputs]
    dq = torch.full(layouts[0].dq.shape, torch.nan, device="cuda")
    *accums, flags = zeroed(layouts[0].dk, layouts[0].dv, layouts[1].dk, layouts[1].dv, (2, 3, 1), device=q.device)
    flags = zeroed(layouts[0].flags, device=q.device)[0] if layouts[0].flags else None
    for i, (layout, kv, row, each) in enumerate(zip(layouts, keys, rows, options)):
        dk, dv = accums[:2] if i == 0 else accums[2:]
        shared = SharedBackward(layout, *row, dq, dk, dv, first=i == 0, flags=None if i else flags)
        got = _flash_attn_bwd(q, *kv, None, do, None, softmax_scale=scale, **each, shared=shared)
        assert got == (None, None, None)
    cu = [options[0].get(f"cu_seqlens_{side}") for side in "qk"]
    own = options[1].get("cu_seqlens_k")
    out_q, out_k, out_v = (x.clone() for x in before)
    convert(dq, layouts[0].dq, out_q, scale=scale, cu_seqlens=cu[0], add=True)
    convert(accums[2], layouts[1].dk, out_k, scale=scale, cu_seqlens=own, add=True)
    convert(accums[3], layouts[2].dv, out_v, scale=1.0, cu_seqlens=own, add=True)
    blocks_k, blocks_v = torch.full_like(k_cmp, torch.nan), torch.full_like(v_cmp, torch.nan)
    convert(accums[0], layouts[0].dk, blocks_k, scale=scale, cu_seqlens=cu[1])
    convert(accums[1], layouts[0].dv, blocks_v, scale=1.0, cu_seqlens=cu[1])
    return out_q, out_k, out_v, blocks_k, blocks_v


def row_sums(setup: Setup, layout: Any, do: torch.Tensor, o: torch.Tensor, lse: torch.Tensor) -> Any:
    return as_rows(o, do, lse, setup.lengths or [setup.T], layout.row_shape, layout.dq.start)


def compiled(setup: Setup) -> list[str]:
    """The kernels that shared calls and conversions compile; in a worker."""
    from flash_attn.cute.shared_backward import aligned, backward_layout

    q, _, k, v, _, _ = tensors(setup)
    options = [backward for _, backward, _ in calls(setup)]
    layout = aligned(*(backward_layout(q, k, v, **each) for each in options))[0]
    row = tuple(torch.empty(layout.row_shape, device="cuda") for _ in range(2))
    with built_kernels() as kernels:
        shared_gradients(setup, [row] * 3, [], (q, k, v))
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
    names = compiler_sm90.trace(compiled, Setup())
    assert names[:3] == expected and set(names[3:]) == {f"{convert} True", f"{convert} False"}
    packed = compiler_sm90.trace(compiled, Setup(D=64, lengths=(300, 0, 1, 200)))
    assert packed[0] == f"{kernel} (128, 128)" and not any("Preprocess" in name for name in packed)


def test_deterministic_calls_share_too(compiler_sm90: Worker) -> None:
    assert not any("Preprocess" in name for name in compiler_sm90.trace(compiled, Setup(deterministic=True)))


def conversions(arch: int, D: int) -> int:
    """Compile every conversion that adds; in a worker."""
    from flash_attn.cute.bwd_accum_tile import AccumTileOrder
    from flash_attn.cute.shared_backward import AccumLayout, Tile, convert

    tiles = [(64, 256, 1, False), (64, 128, 1, False), (128, 256, 2, False), (80, 256, 1, True)]
    cases = [(*tile, False, None) for tile in tiles if tile[0] != 80 or D == 128]
    if arch == 100:
        orders = [(AccumTileOrder.TMEM_FRAG_1CTA, False), (AccumTileOrder.ROW_MAJOR, False)]
        orders += [(AccumTileOrder.TMEM_FRAG_2CTA, True)] if D == 128 else []
        cases = [(128, 128, 1, False, two_cta, order) for order, two_cta in orders]
    for rows, threads, atoms, swapped, two_cta, order in cases:
        tile = Tile(arch, rows, threads, atoms, swapped, two_cta, 32, order)
        for sequences in (None, 3):
            layout = AccumLayout((2, 4) if sequences is None else (4,), 1000, sequences, rows, D, tile)
            out = torch.empty(*layout.heads[:-1], 1000, 4, D, dtype=torch.float16, device="cuda")
            cu_seqlens = None if sequences is None else torch.empty(4, dtype=torch.int32, device="cuda")
            accum = torch.empty(layout.shape, device="cuda")
            convert(accum, layout, out, scale=0.5, cu_seqlens=cu_seqlens, add=True)
    return len(cases)


@pytest.mark.parametrize("D", [64, 128])
def test_conversions_that_add_compile(compiler_sm90: Worker, D: int) -> None:
    assert compiler_sm90.trace(conversions, 90, D) == (3 if D == 64 else 4)


@pytest.mark.parametrize("D", [64, 128])
def test_conversions_that_add_compile_for_blackwell(compiler_sm100: Worker, D: int) -> None:
    assert compiler_sm100.trace(conversions, 100, D) == (2 if D == 64 else 3)


def places(rows: int, threads: int, atoms: int, D: int) -> list[list[int]]:
    """The places where a kernel with such tiles leaves the elements of 128 rows: [row][column]; in a worker."""
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
    alike = [compiler_sm90.trace(places, *tile, D) for tile in tiles]
    assert sorted(x for row in alike[0] for x in row) == list(range(128 * D))
    assert alike[0] == alike[1] == alike[2]


def test_tiles_that_differ_have_patterns_of_their_own() -> None:
    from flash_attn.cute.shared_backward import Tile

    tile = Tile(90, 64, 256, 1, False, False, 32, None)
    others = [tile._replace(rows=80, swapped=True), tile._replace(rows=128), tile._replace(arch=100)]
    assert len({each.pattern for each in (tile, *others)}) == 4


GPU_SETUPS = [
    Setup(),
    Setup(D=64, T=777),
    Setup(heads=(8, 1), T=70),
    Setup(deterministic=True),
    Setup(lengths=(300, 1, 0, 513, 64)),
    Setup(D=64, lengths=(300, 1, 0, 513, 64)),
    Setup(D=64, lengths=(300, 1, 513), deterministic=True),
]


@pytest.mark.gpu
@pytest.mark.parametrize("setup", GPU_SETUPS, ids=str)
def test_shared_calls_give_the_sum_of_separate_ones(setup: Setup) -> None:
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    q, do, k, v, k_cmp, v_cmp = tensors(setup)
    before = tuple(torch.randn_like(x) * 0.1 for x in (q, k, v))
    outputs, parts = [], []
    for forward, backward, compressed in calls(setup):
        kv = (k_cmp, v_cmp) if compressed else (k, v)
        o, lse, *_ = _flash_attn_fwd(q, *kv, return_lse=True, **forward)
        outputs.append((o, lse))
        parts.append(_flash_attn_bwd(q, *kv, o, do, lse, **backward))
    got = shared_gradients(setup, None, outputs, before)
    sums = [before[0].float() + sum(part[0].float() for part in parts)]
    sums += [before[i].float() + sum(part[i].float() for part in parts[1:]) for i in (1, 2)]
    for name, mine, expected in zip(("dq", "dk", "dv", "dk_cmp", "dv_cmp"), got, (*sums, *parts[0][1:])):
        # Where a row sees one key its scores have no gradient: what is left is fp32 rounding of its terms.
        limit = max(5e-3 * float(expected.float().abs().max()), 1e-5)
        torch.testing.assert_close(
            mine.float(), expected.float(), rtol=2e-2, atol=limit, msg=lambda m: f"{name} of {setup}: {m}"
        )
    if setup.deterministic:
        again = shared_gradients(setup, None, outputs, before)
        assert all(map(torch.equal, got, again)), setup


@pytest.mark.gpu
def test_an_infinite_row_sum_takes_a_row_out() -> None:
    setup = Setup(T=500)
    q, do, k, v, _, _ = tensors(setup)
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
    from flash_attn.cute.shared_backward import SharedBackward, backward_layout

    o, lse, *_ = _flash_attn_fwd(q, k, v, return_lse=True, causal=True)
    layout = backward_layout(q, k, v, causal=True)
    dpsum, logs = row_sums(setup, layout, do, o, lse)
    out = torch.arange(setup.T, device="cuda") % 3 == 0
    logs[:, :, : setup.T].masked_fill_(out, math.inf)
    dq, dk, dv = _flash_attn_bwd(q, k, v, None, do, None, causal=True, shared=SharedBackward(layout, dpsum, logs))
    expected = _flash_attn_bwd(q, k, v, o, do * ~out[:, None, None], lse, causal=True)
    assert not dq[:, out].any()
    for mine, true in zip((dq, dk, dv), expected):
        torch.testing.assert_close(mine, true, rtol=2e-2, atol=5e-3 * float(true.abs().max()))


@pytest.mark.gpu
def test_accumulators_may_lie_far_apart() -> None:
    """Heads and sequences past 2**31 elements: as they are with 32 heads of 4M tokens."""
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
    from flash_attn.cute.shared_backward import SharedBackward, backward_layout, convert, zeroed

    setup, far = Setup(heads=(2, 1), T=300), 2**31 + 256
    q, do, k, v, _, _ = tensors(setup)
    o, lse, *_ = _flash_attn_fwd(q, k, v, return_lse=True, causal=True)
    layout = backward_layout(q, k, v, causal=True)
    rows = row_sums(setup, layout, do, o, lse)
    of_q, of_k = (math.prod(x.shape) // 2 for x in (layout.dq, layout.dk))
    whole = torch.zeros(far + of_q + 2 * of_k, device="cuda")
    # The second head of dq, and the second sequence of dk and dv, are far from the first.
    apart = [
        whole.as_strided(layout.dq.shape, (of_q // 2, far, 1)),
        whole.as_strided(layout.dk.shape, (far, of_k, 1), of_q),
        whole.as_strided(layout.dv.shape, (far, of_k, 1), of_q + of_k),
    ]
    gradients = []
    for accums in (apart, zeroed(layout.dq, layout.dk, layout.dv, device=q.device)):
        _flash_attn_bwd(q, k, v, None, do, None, causal=True, shared=SharedBackward(layout, *rows, *accums))
        parts = zip(accums, (layout.dq, layout.dk, layout.dv), (q, k, v), (setup.D**-0.5, setup.D**-0.5, 1.0))
        gradients.append([convert(a, x, torch.full_like(t, torch.nan), scale=scale) for a, x, t, scale in parts])
    for mine, expected in zip(*gradients):
        torch.testing.assert_close(mine, expected, rtol=2e-2, atol=1e-2)
