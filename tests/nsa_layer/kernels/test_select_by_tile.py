"""The choice of blocks by kernels: compiles everywhere, and on a GPU chooses what `choose.choose_blocks` does."""

# What runs in a worker is imported there, so nothing up here may ask for the kernels.
from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, product

import pytest
import torch
from fa_compile import Worker

from nsa_layer import NSAConfig
from nsa_layer.choose import choose_blocks
from nsa_layer.compress import mean_pool
from nsa_tools.testing.assertions import assert_same_choice
from nsa_tools.testing.cases import Case, Inputs, make_inputs

SMALL = NSAConfig(block_size=8, block_counts=5, q_tile=16, window_size=8)
HALF = Case(T=1024, Hq=8, Hkv=2, D=64, dtype=torch.bfloat16, config=SMALL)


def with_config(case: Case, **changes: object) -> Case:
    return replace(case, config=case.config.replace(**changes))


VARIANTS = {
    "default": HALF,
    "128": replace(HALF, D=128, dtype=torch.float16),
    "one step": replace(HALF, T=300),
    "one head": replace(HALF, Hq=2),
    "two heads": replace(HALF, Hq=4),
    "three heads": replace(HALF, Hq=6),
    "eight heads": replace(HALF, Hq=16),
    "32 heads": replace(HALF, Hq=32, Hkv=1),
    "not causal": replace(HALF, causal=False),
    "not causal, unforced": replace(with_config(HALF, init_blocks=0, local_blocks=0), causal=False),
    "unforced": with_config(HALF, init_blocks=0, local_blocks=0),
    "first and local": with_config(HALF, init_blocks=3, local_blocks=4, block_counts=12),
    "first alone": with_config(HALF, init_blocks=3, local_blocks=0),
    "local alone": with_config(HALF, init_blocks=0, local_blocks=3),
    "too many forced": with_config(HALF, init_blocks=4, local_blocks=3),
    "first behind, not causal": replace(with_config(HALF, init_blocks=4, local_blocks=1), causal=False),
    "too many, not causal": replace(with_config(HALF, init_blocks=5, local_blocks=2, block_counts=4), causal=False),
    "wide tiles, unforced": with_config(HALF, init_blocks=0, local_blocks=0, q_tile=64, block_counts=16),
    "packed, unforced": replace(
        with_config(HALF, init_blocks=0, local_blocks=0), lengths=(1024, 0, 1, 16, 0, 688, 2304)
    ),
    "stride": with_config(HALF, compress_stride=2),
    "small tiles": with_config(HALF, q_tile=4),
    "wide tiles": with_config(HALF, q_tile=64, block_counts=16),
    "one block": with_config(HALF, block_counts=1),
    "33 blocks": with_config(HALF, block_counts=33),
    "64 blocks": replace(with_config(HALF, block_counts=64), Hq=2, T=4096),
    "packed": replace(HALF, lengths=(1024, 0, 1, 16, 0, 688, *(16 * i for i in range(40)), 2304)),
    "packed, stride, three heads": replace(with_config(HALF, compress_stride=4), Hq=6, lengths=(0, 528, 32, 1040, 0)),
    "packed, not causal": replace(HALF, lengths=(512, 16, 2048), causal=False),
    "long": replace(HALF, T=20480, B=1, D=128),
}
FORCED = ["unforced", "first alone", "local alone", "too many, not causal"]
BATCHES = {name: case if case.lengths or case.B > 1 else replace(case, B=2) for name, case in VARIANTS.items()}


def trace_case(case: Case) -> list[tuple[int, ...]]:
    """For the architecture of a worker; the shapes that come back."""
    from nsa_layer.kernels.select_by_tile.kernel import block_topk

    tokens = (case.B, case.T) if case.lengths is None else (sum(case.lengths),)
    q = torch.empty(*tokens, case.Hq, case.D, dtype=case.dtype, device="cuda")
    rows = (case.B, case.config.compressed_length(case.T)) if case.lengths is None else (7,)
    k_mean = torch.empty(*rows, case.Hkv, case.D, device="cuda")
    starts = torch.empty(9, dtype=torch.int32, device="cuda") if case.lengths else None
    choice = dict(config=case.config, causal=case.causal, softmax_scale=0.125)
    lists = block_topk(q, k_mean, **choice, cu_seqlens=starts, cu_blocks=starts, lengths=case.lengths)
    return [tuple(x.shape) for x in lists]


@pytest.mark.parametrize("name", ["default", "64 blocks", "packed, stride, three heads", *FORCED])
def test_kernels_are_traced(compiler: Worker, name: str) -> None:
    case = BATCHES[name]
    indices, counts = compiler.trace(trace_case, case)
    lengths = case.lengths or [case.T]
    tiles, width = sum(map(case.config.num_tiles, lengths)), case.config.list_width(max(lengths))
    lead = () if case.lengths else (case.B,)
    assert indices == (*lead, case.Hkv, tiles, width) and counts == indices[:-1]


def kernel_choice(inputs: Inputs, softmax_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    from nsa_layer.kernels.select_by_tile.kernel import block_topk

    case, packed = inputs.case, {}
    choice = dict(config=case.config, causal=case.causal, softmax_scale=softmax_scale)
    if case.lengths is None:
        return block_topk(inputs.q, mean_pool(inputs.k, config=case.config), **choice)
    means = [mean_pool(k[None], config=case.config)[0] for k in inputs.k.split(case.lengths)]
    starts = torch.tensor([0, *accumulate(map(len, means))], dtype=torch.int32, device=inputs.q.device)
    packed = dict(cu_seqlens=inputs.cu_seqlens, cu_blocks=starts, lengths=case.lengths)
    return block_topk(inputs.q, torch.cat(means), **choice, **packed)


def exact_choice(inputs: Inputs, softmax_scale: float) -> torch.Tensor:
    """In fp64, sequence by sequence."""
    case = inputs.case
    width = case.config.list_width(max(case.lengths) if case.lengths else case.T)
    lists = []
    for q, k, _ in inputs.to(torch.float64).sequences():
        if len(q):
            k_mean = mean_pool(k[None], config=case.config)
            choice = dict(config=case.config, causal=case.causal, softmax_scale=softmax_scale)
            chosen = choose_blocks(q[None], k_mean, **choice)[0]
            lists.append(torch.nn.functional.pad(chosen, (0, width - chosen.shape[-1]), value=-1))
    return torch.cat(lists, dim=1) if case.lengths else torch.stack(lists)


def assert_equal_lists(case: Case, got: tuple[torch.Tensor, torch.Tensor], expected: torch.Tensor) -> None:
    indices, counts = got
    assert indices.shape == expected.shape and indices.dtype == torch.int32, f"{indices.shape}: {case!r}"
    wrong = (indices != expected).any(-1).nonzero()
    assert not len(wrong), (
        f"{len(wrong)} lists of {counts.numel()} differ, first {(at := tuple(wrong[0].tolist()))}: "
        f"got {indices[at].tolist()}, expected {expected[at].tolist()}: {case!r}"
    )
    assert torch.equal(counts, (expected >= 0).sum(-1).int()), f"counts: {case!r}"


@pytest.mark.gpu
@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("name", VARIANTS)
def test_exact_scores(name: str) -> None:
    """Small integers: scores are exact, and one head ranks by them; there are many ties."""
    for seed in range(2):
        case = replace(BATCHES[name], Hq=BATCHES[name].Hkv, integers=True, seed=seed)
        inputs = make_inputs(case, "cuda")
        assert_equal_lists(case, kernel_choice(inputs, 0.125), exact_choice(inputs, 0.125))


@pytest.mark.gpu
@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("name", VARIANTS)
def test_real_scores(name: str) -> None:
    case = BATCHES[name]
    inputs = make_inputs(case, "cuda")
    # Heads of a group with very different softmaxes.
    spread = torch.arange(1, case.Hq + 1, device="cuda")[:, None].to(case.dtype)
    for q in (inputs.q, inputs.q * spread):
        given = replace(inputs, q=q)
        indices, counts = kernel_choice(given, case.spec.softmax_scale)
        assert_same_choice(given, indices.transpose(-3, -2))
        assert torch.equal(counts, (indices >= 0).sum(-1).int())
        again = kernel_choice(given, case.spec.softmax_scale)
        assert torch.equal(again[0], indices), f"other bits: {case!r}"


@pytest.mark.gpu
@pytest.mark.usefixtures("filled")
def test_lengths() -> None:
    for T, Hq, causal in product((1, 7, 8, 9, 16, 17, 100, 1023, 1025, 2049), (8, 2), (True, False)):
        case = replace(HALF, T=T, B=2, Hq=Hq, causal=causal)
        inputs = make_inputs(case, "cuda")
        assert_same_choice(inputs, kernel_choice(inputs, case.spec.softmax_scale)[0].transpose(-3, -2))


@pytest.mark.gpu
def test_strided_inputs() -> None:
    """q is some heads of a bigger tensor, k_mean too."""
    from nsa_layer.kernels.select_by_tile.kernel import block_topk

    case = replace(HALF, B=2, D=128)
    inputs = make_inputs(case, "cuda")
    k_mean = mean_pool(inputs.k, config=case.config)
    choice = dict(config=case.config, causal=True, softmax_scale=0.1)
    whole, counts = block_topk(inputs.q, k_mean, **choice)
    part, part_counts = block_topk(inputs.q[:, :, 4:], k_mean[:, :, 1:], **choice)
    assert torch.equal(part, whole[:, 1:]) and torch.equal(part_counts, counts[:, 1:])


@pytest.mark.gpu
@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("Hq", [8, 2])
def test_any_numbers_give_lists(Hq: int, value: float) -> None:
    """With NaN, inf or numbers near the largest, lists are ascending, in range and of the right length."""
    case = replace(HALF, T=4096, Hq=Hq)
    inputs = make_inputs(case, "cuda")
    proper, counts = kernel_choice(inputs, 0.125)
    for name in ("q", "k"):
        x = getattr(inputs, name).clone()
        x[:, 100::900] = value
        got, got_counts = kernel_choice(replace(inputs, **{name: x}), 0.125)
        assert torch.equal(got_counts, counts) and torch.equal(got >= 0, proper >= 0)
        assert (got < case.config.num_blocks(case.T)).all() and (got >= -1).all()
        assert ((got[..., 1:] > got[..., :-1]) | (got[..., 1:] < 0)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("Hq", [2, 8])
@pytest.mark.parametrize("exponent", [100, 110, -85])
def test_huge_keys_meet_tiny_queries_and_the_other_way_round(Hq: int, exponent: int) -> None:
    """Only the product of q and k has to be in range."""
    inputs = make_inputs(replace(HALF, T=2048, D=128, Hq=Hq), "cuda")
    # So far from 0 that the mean of some is not far smaller.
    inputs = replace(inputs, q=inputs.q + 4 * inputs.q[:, :1].sign(), k=inputs.k + inputs.k[:, :1].sign())
    indices, _ = kernel_choice(inputs, 0.125)
    scaled = [replace(inputs, q=inputs.q * 2.0**-exponent, k=inputs.k * 2.0**exponent)]
    if Hq == 2:  # one head ranks by scores of any scale
        scaled += [replace(inputs, q=inputs.q * factor) for factor in (2.0**60, 2.0**-60)]
    assert all(torch.equal(kernel_choice(given, 0.125)[0], indices) for given in scaled)


@pytest.mark.gpu
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("q_tile", [64, 24, 1])
def test_means_of_queries_at_the_end_of_the_range_are_in_range(q_tile: int, own: bool) -> None:
    from nsa_layer.kernels.select_by_tile.pooled_queries import pooled_queries

    torch.manual_seed(0)
    q = (1 + torch.rand(1, 1000, 4, 64, device="cuda").bfloat16().clamp(max=0.99)) * torch.randn(
        64, device="cuda"
    ).sign()
    means, large = (
        pooled_queries(x, torch.ones(1, 3, 2, 64, device="cuda"), q_tile=q_tile, own=own, tiles=-(-1000 // q_tile))[0]
        for x in (q.bfloat16(), q.bfloat16() * 2.0**127)
    )
    assert means.rows.isfinite().all() and torch.equal(large.rows, means.rows)
