"""The kernels that select blocks, by token, query tile and index, choose what the definition in fp64 does."""

# What runs in a worker is imported there, so nothing up here may ask for the kernels.
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import product

import pytest
import torch
from fa_compile import Worker, shared_worker, swept
from kernel_cases import faked

from nsa_layer import NSAConfig, reference
from nsa_layer.call import Call
from nsa_layer.checks import starts_of_lengths
from nsa_layer.config import BRANCHES
from nsa_layer.eager.pooling import mean_pool
from nsa_tools.testing.assertions import assert_same_choice
from nsa_tools.testing.cases import Case, Inputs, make_inputs

Tensor = torch.Tensor
Ranges = Sequence[tuple[int, int]]  # (first, end) of some queries of each sequence


def changed(case: Case, **changes: object) -> Case:
    """The case with other fields, its own or its configuration's; G: query heads of a key/value head."""
    own = {f.name: changes.pop(f.name) for f in fields(Case) if f.name in changes}
    G = changes.pop("G", case.Hq // case.Hkv)
    case = replace(case, **own, config=case.config.replace(**changes))
    return replace(case, Hq=G * case.Hkv)


TILES = Case(
    B=2, T=1024, Hq=8, D=64, dtype=torch.bfloat16, gate="none",
    config=NSAConfig(block_size=8, block_counts=5, q_tile=16, window_size=8),
)  # fmt: skip
TOKENS = changed(TILES, T=1000, block_counts=7, q_tile=1, own_keys=("k_cmp",))
INDEX = Case(
    B=2, T=1000, Hq=3, Hkv=3, dtype=torch.bfloat16, gate="none", index_dim=32, index_loss=False,
    config=NSAConfig(rule="index", branches=("selected",)),
)  # fmt: skip
OVERLAPPING = dict(compress_size=16, compress_stride=4)
PAPER = dict(T=1000, D=128, block_size=64, block_counts=16, compress_size=32, compress_stride=16)
UNFORCED = dict(init_blocks=0, local_blocks=0)
BOTH = {
    "default": {},
    "128": dict(B=1, D=128, dtype=torch.float16),
    "96": dict(B=1, D=96),
    "256": dict(B=1, D=256, block_size=64, block_counts=16),
    "not causal": dict(causal=False),
    "not causal, unforced": dict(causal=False, **UNFORCED),
    "unforced": UNFORCED,
    "first and local": dict(init_blocks=3, local_blocks=4, block_counts=12),
    "first alone": dict(init_blocks=3, local_blocks=0),
    "local alone": dict(init_blocks=0, local_blocks=3),
    "too many forced": dict(init_blocks=5, local_blocks=5),
    "first behind, not causal": dict(causal=False, init_blocks=4, local_blocks=1),
    "too many, not causal": dict(causal=False, init_blocks=5, local_blocks=2, block_counts=4),
    "33 blocks": dict(block_counts=33),
    "64 blocks": dict(block_counts=64, G=1, T=4096),
    "packed": dict(lengths=(1024, 0, 1, 16, 0, 688, *(16 * i for i in range(40)), 2304)),
    "packed, unforced": dict(lengths=(1024, 0, 1, 16, 0, 688, 2304), **UNFORCED),
    "packed, not causal": dict(lengths=(512, 16, 2048), causal=False),
}
BY_TILE = {
    "one step": dict(T=300),
    "wide tiles, unforced": dict(q_tile=64, block_counts=16, **UNFORCED),
    "stride": dict(compress_stride=2),
    "small tiles": dict(q_tile=4),
    "wide tiles": dict(q_tile=64, block_counts=16),
    "one block": dict(block_counts=1),
    "packed, stride, three heads": dict(compress_stride=4, G=3, lengths=(0, 528, 32, 1040, 0)),
    "long": dict(T=20480, B=1, D=128),
    **{f"{G} heads": dict(G=G) for G in (1, 2, 3, 8)},
    "32 heads": dict(G=32, Hkv=1),
}
BY_TOKEN = {
    "blocks of 64": dict(B=1, T=8193, D=128, block_size=64, block_counts=16),
    "paper": dict(PAPER, B=1, T=4096, G=16),
    "paper, two heads": dict(PAPER, D=64, G=2),
    "paper, 192": dict(PAPER, D=192, G=16, B=1),
    "paper, not causal": dict(PAPER, B=1, T=2000, causal=False),
    "paper, unforced": dict(PAPER, B=1, T=4000, G=16, **UNFORCED),
    "paper, InfLLM's": dict(PAPER, B=1, T=9000, G=16, local_blocks=8),
    "blocks of two keys": dict(compress_size=4, compress_stride=4),
    "blocks of three keys": dict(block_size=12, compress_size=12, compress_stride=4),
    "keys of two blocks": dict(B=1, compress_size=16, compress_stride=8),
    "early keys": dict(compress_offset=0),
    "late keys": dict(B=1, compress_offset=40),
    "overlapping, unforced": dict(**OVERLAPPING, **UNFORCED),
    "overlapping, first alone": dict(**OVERLAPPING, init_blocks=3, local_blocks=0),
    "forced only": dict(block_counts=2),
    "one candidate": dict(block_counts=4),
    "64 blocks, two heads": dict(block_counts=64, G=2),
    "packed, overlapping, three heads": dict(lengths=(0, 528, 32, 1040, 0, 7), G=3, **OVERLAPPING),
    **{f"{G} heads": dict(B=1, T=600, G=G) for G in (1, 2, 3, 5, 6, 7, 8, 12, 16, 32, 40, 64, 128)},
}
BY_INDEX = {
    "default": {},
    "Di 16": dict(index_dim=16),
    "Di 64, fp16": dict(index_dim=64, dtype=torch.float16),
    "Di 128": dict(index_dim=128),
    "one key": dict(one_key=True, Hkv=5),
    "blocks of 16": dict(block_size=16),
    "blocks of 32, unforced": dict(block_size=32, **UNFORCED),
    "blocks of 128, first behind none": dict(block_size=128, T=3000, init_blocks=0, local_blocks=1),
    "unforced": dict(UNFORCED, block_counts=7),
    "first alone": dict(init_blocks=3, local_blocks=0, block_counts=5),
    "too many forced": dict(init_blocks=9, local_blocks=9),
    "32 blocks": dict(T=5000, block_counts=32),
    "64 blocks": dict(T=6001, block_counts=64, Hkv=1),
    "128 blocks of 16": dict(T=4097, block_counts=128, block_size=16, Hkv=1, **UNFORCED),
    "long": dict(T=10000, Hkv=1),
    "packed": dict(lengths=(1024, 0, 1, 63, 0, 690, *(16 * i for i in range(20)), 2305), one_key=True),
    "packed, unforced": dict(lengths=(130, 0, 1, 2300), block_size=16, **UNFORCED),
    "packed, last queries": dict(lengths=(2000, 5, 65, 700), **UNFORCED),
}
VARIANTS = {f"tile: {name}": changed(TILES, **changes) for name, changes in (BOTH | BY_TILE).items()}
VARIANTS |= {f"token: {name}": changed(TOKENS, **changes) for name, changes in (BOTH | BY_TOKEN).items()}
VARIANTS |= {f"index: {name}": changed(INDEX, **changes) for name, changes in BY_INDEX.items()}

RANGES = {  # of variants
    "token: paper, two heads": [[(0, 417), (0, 417)], [(583, 1000), (311, 728)], [(999, 1000), (64, 65)]],
    "token: packed, overlapping, three heads": [
        [(0, 0), (0, 528), (0, 31), (0, 500), (0, 0), (0, 7)],
        [(0, 0), (5, 300), (31, 32), (500, 1039), (0, 0), (7, 7)],
    ],
    "token: paper, not causal": [[(0, 1000)], [(1000, 1999)], [(1999, 2000)]],
    "token: packed, not causal": [[(100, 512), (15, 16), (0, 2047)], [(0, 100), (0, 0), (2047, 2048)]],
    "token: keys of two blocks": [[(200, 300)]],
    "token: late keys": [[(7, 1000)]],
    "token: unforced": [[(130, 500), (0, 370)]],
    "token: first and local": [[(3, 700), (303, 1000)], [(999, 1000), (0, 1)]],
    "index: unforced": [[(130, 500), (0, 370)]],
    "index: packed, last queries": [[(1900, 2000), (5, 5), (64, 65), (0, 700)], [(7, 64), (0, 5), (0, 0), (100, 517)]],
}


def lengths_of(case: Case) -> tuple[int, ...]:
    return case.lengths or (case.T,) * case.B


def log_sum_exps(inputs: Inputs) -> Tensor | None:
    """Those of the compressed branch, from fp64, for a choice by them."""
    case, exact, found = inputs.case, inputs.to(torch.float64), []
    if case.index_dim or not case.config.by_token:
        return None
    for call in exact.call().sequences():
        q, k_cmp, static = call.q, call.k_cmp, dict(config=case.config, causal=case.causal, device=call.q.device)
        visible = reference.compressed_mask(len(q), len(k_cmp), **static)
        found.append(reference.attention(q, k_cmp, k_cmp, visible, softmax_scale=case.spec.softmax_scale)[1].float())
    return torch.cat(found, dim=1) if case.lengths else torch.stack(found)


def means(inputs: Inputs) -> Tensor:
    """fp32 [B, Tc, Hkv, D], packed [all, Hkv, D]: the means that tiles choose by."""
    lengths, config = inputs.case.lengths, inputs.case.config
    if lengths is None:
        return mean_pool(inputs.k, config=config)
    return torch.cat([mean_pool(k[None], config=config)[0] for k in inputs.k.split(lengths)])


def selected(inputs: Inputs, lse: Tensor | None = None, ranges: Ranges | None = None) -> Tensor:
    """Lists by the kernels, [B, M, Hkv, n] or packed [all tiles, Hkv, n]; of some queries with all keys.

    lse: of `log_sum_exps`.
    """
    from nsa_layer.kernels.select_by_index.kernel import select_by_index
    from nsa_layer.kernels.select_by_tile.kernel import block_topk
    from nsa_layer.kernels.select_by_token.kernel import token_topk

    case, config, q, where = inputs.case, inputs.case.config, inputs.q_index if inputs.case.index_dim else inputs.q, {}
    lengths, device, packed = lengths_of(case), q.device, case.lengths is not None
    static, sizes = dict(config=config, causal=case.causal, softmax_scale=case.spec.softmax_scale), lengths

    def rows(x: Tensor | None, dim: int) -> Tensor | None:
        if x is None or ranges is None:
            return x
        each = zip(x.split(lengths, dim) if packed else x, ranges)
        parts = [own.narrow(dim, first, end - first) for own, (first, end) in each]
        return torch.cat(parts, dim) if packed else torch.stack(parts)

    if ranges is not None:
        sizes = tuple(end - first for first, end in ranges)
        where = dict(q_offset=torch.tensor([first for first, _ in ranges]).int().to(device), max_seqlen_k=max(lengths))
        where |= dict(cu_seqlens_k=inputs.cu_seqlens) if packed else {}
    if packed:
        starts = inputs.cu_seqlens if ranges is None else starts_of_lengths(sizes, device)
        where |= dict(cu_seqlens=starts, max_seqlen=max(sizes))
    if case.index_dim:
        return select_by_index(rows(q, 0), inputs.k_index, config=config, **where)[0]
    if packed:
        where["cu_blocks"] = starts_of_lengths(map(config.compressed_length, lengths), device)
    if config.by_token:
        return token_topk(rows(q, 0), inputs.k_cmp, rows(lse, 1), **static, **where)
    where.pop("max_seqlen", None)
    lists, counts = block_topk(q, means(inputs) if inputs.k_cmp is None else inputs.k_cmp, **static, **where)
    expected = (lists >= 0).sum(-1).int()
    assert counts.shape == expected.shape and (type(lists) is not Tensor or counts.equal(expected)), repr(case)
    if packed and type(lists) is Tensor:
        tiles, n = sum(map(config.num_tiles, lengths)), config.list_width(max(lengths))
        assert (lists[:, tiles:] == -1).all() and (lists[..., n:] == -1).all(), repr(case)
        lists = lists[:, :tiles, :n]
    return lists.transpose(-3, -2)


def made(case: Case) -> tuple[Inputs, Tensor | None]:
    """Inputs on a GPU, and the log-sum-exps for a choice by them."""
    inputs = make_inputs(case, "cuda")
    return inputs, log_sum_exps(inputs)


def assert_right(inputs: Inputs, *, exact: bool = False) -> None:
    """The definition's lists, and the same ones twice."""
    lse = log_sum_exps(inputs)
    lists = selected(inputs, lse)
    assert_same_choice(inputs, lists, exact=exact)
    assert selected(inputs, lse).equal(lists), f"other bits: {inputs.case!r}"


def traced(name: str) -> tuple[int, ...]:
    """In a worker, for its architecture: the shape that comes back."""
    case = VARIANTS[name]

    def make() -> Inputs:
        inputs = make_inputs(case)
        return inputs if case.config.by_token else replace(inputs, k_cmp=means(inputs))

    inputs = faked(make)
    lse = torch.empty(*inputs.q.shape[:-3], case.Hq, inputs.q.shape[-3], device="cuda")
    return tuple(selected(inputs, lse, RANGES[name][0] if name in RANGES else None).shape)


FORCED = ["unforced", "first alone", "local alone", "too many, not causal"]
TRACED = [f"tile: {name}" for name in ("default", "96", "256", "64 blocks", "packed, stride, three heads", *FORCED)]
TRACED += [f"token: {name}" for name in ("default", "paper", "paper, 192", "256", "not causal", "40 heads", *FORCED)]
TRACED += ["token: paper, two heads", "token: packed, overlapping, three heads"]
OF_INDEX = ("default", "Di 16", "packed", "Di 128", "blocks of 128, first behind none", "64 blocks")
OF_INDEX += ("packed, last queries", "blocks of 16", "unforced")
TRACED += swept([f"index: {name}" for name in OF_INDEX])


@pytest.mark.parametrize("name", TRACED)
def test_kernels_are_traced(name: str, compiler: Worker) -> None:
    case = VARIANTS[name]
    lengths = lengths_of(case)
    if name in RANGES:
        lengths = [end - first for first, end in RANGES[name][0]]
    T = sum(lengths) if case.lengths else lengths[0]
    tiles = case.config.num_tiles(T, len(case.lengths or (T,)))
    width = case.config.list_width(max(lengths_of(case)) if case.config.by_token else T)
    assert compiler.trace(traced, name) == (*(() if case.lengths else (case.B,)), tiles, case.Hkv, width)


def stack_and_order(name: str) -> tuple[list[int], bool]:
    """Stack frames of a variant's kernel, and whether its products wait for one another; in a worker."""
    from fa_cubin import machine_code

    [code] = machine_code(traced, name)
    return code.stack, code.serialized


@pytest.mark.xdist_group("sm_90")
@pytest.mark.parametrize("name", swept(["token: blocks of 64", "index: Di 64, fp16"]))
def test_registers_suffice(name: str) -> None:
    """By token for two warpgroups of 176 and 80 in each of two CTAs."""
    assert shared_worker("sm_90").run(stack_and_order, name) == ([0], False)


def test_registers_are_there_to_take() -> None:
    """A warpgroup that asks for more than others gave back waits forever."""
    from nsa_layer.kernels.select_by_index.spec import IndexTopKSpec

    multiply, lists, loads = IndexTopKSpec.of(32, 16, 1, 2, False, 64, False, False).registers
    assert loads <= 128 <= min(multiply, lists) and 2 * multiply + lists + loads <= 4 * 128


LAYERS = {  # of an index, or with fewer branches; their numbers: `test_cute`, `test_index_loss`
    "batch": changed(INDEX, index_loss=True, B=1, T=1500, Hkv=8, G=4, D=64, block_counts=5),
    "packed": changed(
        INDEX, index_loss=True, lengths=(700, 0, 1, 64, 900), Hkv=2, G=4, D=64, block_size=16, index_dim=64
    ),
    "a gate": changed(INDEX, index_loss=True, B=1, T=1500, Hkv=2, G=4, D=64, block_counts=5, gate="weight"),
    "groups of heads": changed(
        INDEX, index_loss=True, T=300, Hkv=3, D=64, one_key=True, gate="given", branches=BRANCHES
    ),
    "the paper's model": Case(
        T=300, Hq=16, Hkv=1, D=192, Dv=128, config=NSAConfig.paper(), compress_weights=True, dtype=torch.bfloat16
    ),
    "D 96": Case(lengths=(300, 0, 70), D=96, config=NSAConfig(q_tile=16), gate="given", dtype=torch.bfloat16),
    "D 256": Case(T=300, D=256, config=NSAConfig(deterministic=True), gate="none", dtype=torch.bfloat16),
    "no compressed key": Case(T=40, D=64, config=NSAConfig(branches=("compressed",)), dtype=torch.bfloat16),
    "window": Case(
        T=300, D=64, config=NSAConfig(branches=("window",)), own_keys=("k_win", "v_win"), dtype=torch.bfloat16
    ),
}


def traced_layer(name: str) -> list[tuple[int, ...]]:
    """In a worker: shapes of the output and the gradients that the kernels give."""
    from flash_attn.cute.runtime.kernel_cache import at_first_miss
    from nsa_layer.cute.backend import backward, forward
    from nsa_layer.cute.memory_plan import MemoryPlan, split_heads
    from nsa_layer.saved_shapes import saved_shapes
    from nsa_layer.warm_up.lookup import OnMeta

    inputs, case = faked(lambda: make_inputs(LAYERS[name])), LAYERS[name]
    call = Call(**inputs.tensors(), cu_seqlens=inputs.cu_seqlens, spec=case.spec)
    plan = MemoryPlan(split_heads(case.Hkv, 2), (False,) * 3)
    with at_first_miss(lambda: None), OnMeta():
        o, saved = forward(call, plan=plan)
        for x, expected in zip(saved, saved_shapes(call, kept=plan.kept)):
            assert (x is None) == (expected is None) and (x is None or (x.shape, x.dtype) == expected)
        grads = backward(call, saved, torch.empty_like(o), o=o, plan=plan, d_sums=saved.index_sums)
    return [tuple(x.shape) for x in (o, *grads) if x is not None]


SWEPT = ("groups of heads", "a gate", "the paper's model", "D 96", "D 256")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.sweep if name in SWEPT else ()) for name in LAYERS]
)
def test_the_layer_is_traced(name: str, compiler: Worker) -> None:
    """With nothing saved of a branch that is not there, and gradients of all inputs."""
    inputs = make_inputs(LAYERS[name])
    shapes = [x.shape for x in inputs.tensors().values()]
    assert compiler.trace(traced_layer, name) == [tuple(shape) for shape in (inputs.do.shape, *shapes)]


@pytest.mark.gpu
@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("name", VARIANTS)
def test_exact_scores(name: str) -> None:
    """Small integers: scores are exact, and one head ranks by them; there are many ties."""
    for seed in range(2):
        case = replace(VARIANTS[name], integers=True, seed=seed)
        case = case if case.config.by_token else replace(case, Hq=case.Hkv)
        assert_right(make_inputs(case, "cuda"), exact=case.Hq == case.Hkv)


@pytest.mark.gpu
@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("name", VARIANTS)
def test_real_scores(name: str) -> None:
    """Heads of a group with softmaxes alike, very different ones, and sharp ones; scores of an index of any sign."""
    inputs = make_inputs(VARIANTS[name], "cuda")
    if inputs.case.index_dim:
        q, k = inputs.q_index, inputs.k_index
        changes = [{}, *(dict(q_index=q.abs() * sign, k_index=k.abs()) for sign in (1, -1))]
    else:
        spread = 1 + torch.arange(inputs.case.Hq, device=inputs.q.device)[:, None].to(inputs.q.dtype) % 32
        changes = [dict(q=inputs.q * factor) for factor in (1, spread, 24)]
    for change in changes:
        assert_right(replace(inputs, **change))


@pytest.mark.gpu
def test_zeros_of_either_sign_tie() -> None:
    inputs = make_inputs(changed(INDEX, **UNFORCED, block_counts=4), "cuda")
    assert_right(replace(inputs, q_index=-torch.zeros_like(inputs.q_index)), exact=True)


@pytest.mark.gpu
@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("kind", [TILES, TOKENS], ids=["tile", "token"])
@pytest.mark.parametrize("G", [1, 4, 16])
@pytest.mark.parametrize("D, dtype", [(64, torch.float16), (128, torch.bfloat16)])
def test_lengths(kind: Case, G: int, D: int, dtype: torch.dtype) -> None:
    configs = [{}] if kind is TILES else [dict(block_size=64, block_counts=16), PAPER]
    lengths = (1, 7, 8, 9, 16, 17, 63, 64, 65, 127, 128, 129, 1000, 1023, 1025, 2049, 4096, 8193)
    for T, config, causal in product(lengths, configs, (True, False)):
        case = changed(kind, **config | dict(G=G, D=D, dtype=dtype, T=T, causal=causal, B=2 if T < 4000 else 1))
        assert_right(make_inputs(case, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 63, 64, 65, 127, 128, 129, 255, 257, 4096, 8193])
def test_lengths_by_index(T: int) -> None:
    for changes in ({}, UNFORCED, dict(block_size=16, block_counts=5)):
        assert_right(make_inputs(changed(INDEX, T=T, Hkv=1, **changes), "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{}, UNFORCED, dict(block_size=16, block_counts=5)], ids=["64", "unforced", "16"])
def test_signs_change_along_keys_and_tokens(changes: dict) -> None:
    """Lists are full of scores from 0 on, then blocks of scores below 0 follow; and some tokens have the opposite."""
    inputs = make_inputs(changed(INDEX, B=1, T=8193, Hkv=1, **changes), "cuda")
    q, k, positions = inputs.q_index.abs(), inputs.k_index.abs(), torch.arange(8193, device="cuda")[:, None, None]
    k = torch.where(positions < 3000, k, -k)
    assert_right(replace(inputs, q_index=q, k_index=k))
    assert_right(replace(inputs, q_index=torch.where(positions % 320 < 16, -q, q), k_index=k))


BY_WARP = [f"token: {name}" for name in ("blocks of 64", "paper", "paper, two heads", "1 heads")]
BY_WARP += ["token: packed, overlapping, three heads", "index: default", "index: packed, unforced"]


@pytest.mark.gpu
@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("name", BY_WARP)
def test_products_by_warp(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As SM100 makes them: both forms choose alike."""
    from flash_attn.cute.mma import form

    monkeypatch.setattr(form, "FORCED", True)
    test_real_scores(name)
    test_exact_scores(name)


LATER = [f"token: {name}" for name in ("default", "paper", "unforced", "early keys", "16 heads")]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*LATER, "index: unforced"])
def test_later_tokens_and_the_place_in_a_tile_change_nothing(name: str) -> None:
    """Lists of a prefix, bit for bit; the prefix ends anywhere in a tile."""
    inputs, lse = made(VARIANTS[name])
    case, whole = inputs.case, selected(inputs, lse)
    read = ("q_index", "k_index") if case.index_dim else ("q", "k_cmp")
    for T in (case.T - 1, case.T // 2 + 3, 77):
        ends = T, T if case.index_dim else case.config.compressed_length(T)
        prefix = {name: getattr(inputs, name)[:, :end] for name, end in zip(read, ends)}
        part = selected(replace(inputs, case=replace(case, T=T), **prefix), None if lse is None else lse[..., :T])
        n = part.shape[-1]
        assert torch.equal(part, whole[:, :T, :, :n]) and (whole[:, :T, :, n:] < 0).all(), f"{T}: {case!r}"
        seen = T if case.index_dim else max(0, (T - 1 - case.config.offset) // case.config.stride + 1)
        other = {name: getattr(inputs, name).clone() for name in read}
        other[read[0]][:, T:] = 9
        other[read[1]][:, seen:] = 9 if case.index_dim else torch.nan
        assert torch.equal(selected(replace(inputs, **other), lse)[:, :T], whole[:, :T]), f"{T}: {case!r}"


@pytest.mark.gpu
@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("name", RANGES)
def test_some_queries_have_the_lists_of_the_whole(name: str) -> None:
    inputs, lse = made(VARIANTS[name])
    whole = selected(inputs, lse)
    whole = whole.split(inputs.case.lengths) if inputs.case.lengths else whole
    for ranges in RANGES[name]:
        parts = [x[first:end] for x, (first, end) in zip(whole, ranges)]
        expected = torch.cat(parts) if inputs.case.lengths else torch.stack(parts)
        assert selected(inputs, lse, ranges).equal(expected), f"{ranges}: {inputs.case!r}"


@pytest.mark.gpu
def test_scores_that_rise_and_that_all_tie() -> None:
    """Streams in which every block is better than all before, none is, and all are equal, also to 0."""
    for config, G in product((dict(), PAPER, dict(block_size=16, block_counts=16)), (1, 4, 16)):
        inputs = make_inputs(changed(TOKENS, **config | dict(B=1, T=4000, D=64, G=G)), "cuda")
        k = inputs.k_cmp
        slope = torch.linspace(-1, 1, k.shape[1], device=k.device).to(k.dtype)[:, None, None]
        for keys in (slope, -slope, torch.ones_like(slope), 20 * (slope > 0.999).to(k.dtype)):
            assert_right(replace(inputs, q=torch.ones_like(inputs.q), k_cmp=keys.expand_as(k).contiguous()))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [changed(TILES, D=128), TOKENS], ids=["tile", "token"])
def test_strided_inputs(kind: Case) -> None:
    """Some heads of bigger tensors."""
    inputs, lse = made(kind)
    whole, G = selected(inputs, lse), kind.Hq // kind.Hkv
    some = {name: x[:, :, 1:] for name in ("k", "k_cmp") if (x := getattr(inputs, name)) is not None}
    part = replace(inputs, case=replace(kind, Hq=G, Hkv=1), q=inputs.q[:, :, G:], **some)
    assert torch.equal(selected(part, None if lse is None else lse[:, G:]), whole[:, :, 1:])


@pytest.mark.gpu
@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e38])
@pytest.mark.parametrize("kind", [TILES, changed(TILES, G=1), TOKENS], ids=["tile", "tile, one head", "token"])
def test_any_numbers_give_lists(kind: Case, value: float) -> None:
    """With NaN, inf or numbers near the largest, lists are ascending, in range and of the right length."""
    inputs, lse = made(replace(kind, T=4096))
    proper = selected(inputs, lse)
    for name in ("q", "k_cmp", "lse") if lse is not None else ("q", "k"):
        x = (lse if name == "lse" else getattr(inputs, name)).clone()
        x[:, 3::90] = value
        got = selected(inputs, x) if name == "lse" else selected(replace(inputs, **{name: x}), lse)
        assert torch.equal(got >= 0, proper >= 0)
        assert (got < inputs.case.config.num_blocks(4096)).all() and (got >= -1).all()
        assert ((got[..., 1:] > got[..., :-1]) | (got[..., 1:] < 0)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("G", [1, 4])
@pytest.mark.parametrize("exponent", [100, 110, -85])
def test_huge_keys_meet_tiny_queries_and_the_other_way_round(G: int, exponent: int) -> None:
    """Only the product of q and k has to be in range."""
    inputs = make_inputs(changed(TILES, B=1, T=2048, D=128, G=G), "cuda")
    # So far from 0 that the mean of some is not far smaller.
    inputs = replace(inputs, q=inputs.q + 4 * inputs.q[:, :1].sign(), k=inputs.k + inputs.k[:, :1].sign())
    lists = selected(inputs)
    scaled = [replace(inputs, q=inputs.q * 2.0**-exponent, k=inputs.k * 2.0**exponent)]
    if G == 1:  # one head ranks by scores of any scale
        scaled += [replace(inputs, q=inputs.q * factor) for factor in (2.0**60, 2.0**-60)]
    assert all(torch.equal(selected(other), lists) for other in scaled)


@pytest.mark.gpu
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("q_tile", [64, 24, 1])
def test_means_of_queries_at_the_end_of_the_range_are_in_range(q_tile: int, own: bool) -> None:
    from nsa_layer.kernels.select_by_tile.pooled_queries import pooled_queries

    torch.manual_seed(0)
    q = (1 + torch.rand(1, 1000, 4, 64, device="cuda").bfloat16().clamp(max=0.99)) * torch.randn(64).sign().cuda()
    static = dict(q_tile=q_tile, own=own, tiles=-(-1000 // q_tile))
    k_mean = torch.ones(1, 3, 2, 64, device="cuda")
    means, large = (pooled_queries(x.bfloat16() * scale, k_mean, **static)[0] for x, scale in ((q, 1), (q, 2.0**127)))
    assert means.rows.isfinite().all() and torch.equal(large.rows, means.rows)
