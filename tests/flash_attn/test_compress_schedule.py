"""SM90's split of compressed-causal attention into CTAs: the plan, and kernels that follow it to the same results."""

import pytest
import torch
from fa_compile import Worker, built_kernels

from flash_attn.cute.compressed_causal import schedule as compress_schedule
from flash_attn.cute.compressed_causal.mask import CompressArgs
from flash_attn.cute.compressed_causal.schedule import (
    QueryShares,
    forward_tile,
    query_shares,
)

OPTIONS = dict(causal=True, compress_factor=64, compress_offset=63)


def limits(shares: QueryShares) -> list[tuple[int, int]]:
    """Every share's query tiles, by definition."""
    return [(share * shares.tiles, (share + 1) * shares.tiles) for share in range(shares.count)]


def test_multiprocessors_get_four_shares_each() -> None:
    plans = {T: query_shares(CompressArgs(64, 63), T, T // 64, 64, 128, 32, 132) for T in (4096, 16384, 65536)}
    # One key tile, then two and eight, which 64, 256 + 128 and 8 * 1024 - 28 * 128 query tiles see, but for the first.
    assert plans == {4096: QueryShares(8, 8), 16384: QueryShares(12, 23), 65536: QueryShares(8, 128)}


def limits_in_a_kernel(plan: tuple[int, ...]) -> list[tuple[int, int]]:
    """QueryShares.limits of all shares, from compiled code; in a worker."""
    import cutlass.cute as cute
    from cutlass import Int32
    from cutlass.cute.runtime import from_dlpack
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    @cute.jit
    def each(shares: QueryShares, out: cute.Tensor):
        for share in range(cute.size(out, mode=[0])):
            out[share, 0], out[share, 1] = shares.limits(Int32(share))

    with unset_fake_temporarily():
        out, shares = torch.full((plan[0], 2), -1, dtype=torch.int32), QueryShares(*plan)
        arg = from_dlpack(out).mark_layout_dynamic()
        cute.compile(each, shares.traced(), arg, options="--enable-tvm-ffi")(shares, out)
        return [tuple(row) for row in out.tolist()]


@pytest.mark.parametrize("plan", [(1, 256), (4, 16), (8, 255)])
def test_kernels_cut_where_the_plan_says(compiler_sm90: Worker, plan: tuple[int, ...]) -> None:
    assert compiler_sm90.run(limits_in_a_kernel, plan) == limits(QueryShares(*plan))


def test_the_tile_is_for_calls_that_leave_room() -> None:
    assert forward_tile(128, 128, 1, plain=True) == (192, 80)
    assert forward_tile(128, 128, 5, plain=True) is None
    assert forward_tile(64, 64, 1, plain=True) is None
    assert forward_tile(128, 128, 4, plain=False) is None


def kernels(Hkv: int, deterministic: bool) -> tuple[tuple[int, int], bool]:
    """The forward kernel's tile, and whether backward shares queries."""
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    q, o, do = (torch.empty(1, 4096, 4, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    k, v = (torch.empty(1, 64, Hkv, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    lse = torch.empty(1, 4, 4096, device="cuda")
    with built_kernels("FlashAttentionForwardSm90") as forward:
        _flash_attn_fwd(q, k, v, **OPTIONS)
    with built_kernels("FlashAttentionBackwardSm90", traced=True) as backward:
        _flash_attn_bwd(q, k, v, o, do, lse, deterministic=deterministic, **OPTIONS)
    return (forward[0].tile_m, forward[0].tile_n), backward[0].splits_queries


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_kernels_follow_the_plan(compiler_sm90: Worker, deterministic: bool) -> None:
    assert compiler_sm90.trace(kernels, 2, deterministic) == ((192, 80), True)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("factor,offset", [(64, 63), (7, 0)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_plan_changes_no_result(
    D: int, factor: int, offset: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    torch.manual_seed(0)
    T, options = 9000, OPTIONS | dict(compress_factor=factor, compress_offset=offset)
    q, do = (torch.randn(2, T, 8, D, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    k, v = (torch.randn(2, T // factor + 3, 2, D, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    o, lse, *_ = _flash_attn_fwd(q, k, v, return_lse=True, **options)
    plain, plain_lse, *_ = _flash_attn_fwd(q, k, v, return_lse=True, tile_mn=(128, 128), **options)
    torch.testing.assert_close(o, plain, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse, plain_lse, rtol=1e-4, atol=1e-4)
    results = []
    # In order no share may be empty: those before it would wait for it.
    fewest = [(-(-T // (8192 // D) // tiles), tiles) for tiles in (200, 80, 11, 3)]
    for shares in fewest if deterministic else [*fewest, (1000, 3)]:
        shares = QueryShares(*shares)
        monkeypatch.setattr(compress_schedule, "query_shares", lambda *_, shares=shares: shares)
        results.append(_flash_attn_bwd(q, k, v, o, do, lse, deterministic=deterministic, **options))
    for result in results[1:]:
        for got, expected in zip(result, results[0], strict=True):
            # The shares are added up in fp32: what is left is the rounding of the sum.
            torch.testing.assert_close(got, expected, rtol=1e-2, atol=float(expected.abs().max()) * 1e-2)
