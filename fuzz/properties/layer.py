"""The operator in plain PyTorch: against its definition, and what has to hold between one call and another."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st

from fuzz import query_shards, strategies
from fuzz.attention import laid_out
from fuzz.case import LAYOUTS
from fuzz.prop import GPU, holds
from fuzz.properties.kernels import near
from nsa_layer import NSAConfig
from nsa_tools.testing.assertions import assert_close_to_reference
from nsa_tools.testing.cases import LSES, OWN_KEYS, Backend, Case, Inputs, make_inputs, run, spoilt

NO_BLOCKS = (-7, 99_999_999, 2**40)
GATES = ("given", "none", "cmp", "slc", "swa")  # that do not depend on q


def on_both(name: str, *drawn: object, **options: Any) -> Callable:
    """Register a property of eager on a CPU, and of the kernels."""

    def register(check: Callable[[Case, str, str], None]) -> Callable:
        holds(name, lambda: strategies.layer_cases(*drawn), **options)(partial(check, backend="eager", device="cpu"))
        holds(f"{name}, kernels", lambda: kernel_cases(), needs=GPU)(partial(check, backend="cute", device="cuda"))
        return check

    return register


@on_both("layer.is its definition", (torch.float64, torch.float32, torch.bfloat16, torch.float16), pr=50)
def is_its_definition(case: Case, backend: str, device: str) -> None:
    assert_close_to_reference(case, backend, device)


@holds("layer.index is its definition", strategies.index_cases, pr=30)
def index_is_its_definition(case: Case) -> None:
    """The index' choice, loss and gradients, and branches that are left out; of small integers the choice, exactly."""
    if not case.integers:
        assert_close_to_reference(case, "eager")
    elif case.index_dim:
        got, expected = (run(backend, make_inputs(case)).aux.block_indices for backend in ("eager", "reference"))
        assert got.equal(expected), f"chosen {got.tolist()}, expected {expected.tolist()}"


@holds(
    "layer.choice is the oracle's",
    lambda: strategies.layer_cases((torch.float32, torch.bfloat16), integers=True, D=4, compress_weights=False),
    pr=40,
)
def choice_is_the_oracles(case: Case) -> None:
    """Exact scores choose the same blocks: ties go to the earlier block.

    They are sums of small integers over powers of 2: D is 4, so that its root divides exactly. A softmax of one head
    keeps their order; where compressed keys overlap blocks their sums are rounded, so they are the blocks' own here.
    """
    size = case.config.block_size if case.config.block_size != 6 else 8
    q_tile = 1 if case.config.by_token else 2 * size
    config = case.config.replace(block_size=size, compress_size=None, compress_stride=None, q_tile=q_tile)
    case = replace(case, config=config, Hq=case.Hq if config.rule == "seed" else case.Hkv)
    inputs = make_inputs(case)
    got = run("eager", inputs).aux.block_indices
    expected = run("reference", inputs.to(torch.float64)).aux.block_indices
    lengths = [case.T] if case.lengths is None else case.lengths
    asked_by_few = config.rule == "seed" or not case.causal  # a short last tile divides by what it has
    kept = torch.cat([torch.arange(config.num_tiles(T)) < (T // config.q_tile if asked_by_few else T) for T in lengths])
    got, expected = (x.movedim(-3, 0)[kept] for x in (got, expected))
    assert got.equal(expected), f"chosen {got.tolist()}, expected {expected.tolist()}"


@on_both("layer.the earlier of equal blocks", (torch.float32, torch.bfloat16))
def earlier_of_equals(case: Case, backend: str, device: str) -> None:
    """Queries of 0 rank all blocks alike, exactly so in any arithmetic: the choice is the oracle's, of the earlier.

    But for sums over several compressed keys, which are taken in any order.
    """
    if case.config.by_token:
        case = replace(case, config=case.config.replace(compress_size=None, compress_stride=None))
    inputs = make_inputs(case, device)
    inputs = replace(inputs, q=torch.zeros_like(inputs.q))
    got = run(backend, inputs).aux.block_indices
    expected = run("reference", inputs.to(torch.float64)).aux.block_indices
    assert got.equal(expected), f"chosen {got.tolist()}, expected {expected.tolist()}"


def assert_forward_causal(case: Case, backend: Backend, t: int, device: torch.device | str = "cpu") -> None:
    """Changing every input of the tokens after t changes no bit of what belongs to the tokens up to t. That
    is o, the LSEs, and the lists of the tiles that start at t or before."""
    inputs, other = make_inputs(case, device), make_inputs(replace(case, seed=case.seed + 1), device)
    changed = {}
    for name in ("q", "k", "v", "gates", "k_win", "v_win", "q_index", "k_index"):
        x = getattr(inputs, name)
        if x is not None:
            # Large, so that other blocks are chosen wherever later tokens have a say.
            later = x[:, t + 1 :] if name == "gates" else 8 * getattr(other, name)[:, t + 1 :]
            changed[name] = torch.cat([x[:, : t + 1], later], dim=1)
    before, after = run(backend, inputs), run(backend, replace(inputs, **changed))
    tiles = t // case.config.q_tile + 1
    kept = {"o": (before.o[:, : t + 1], after.o[:, : t + 1])}
    kept["block_indices"] = tuple(r.aux.block_indices[:, :tiles] for r in (before, after))
    kept |= {name: tuple(getattr(r.aux, name)[..., : t + 1] for r in (before, after)) for name in LSES}
    for name, (old, new) in kept.items():
        differ = (old != new).nonzero()
        assert not len(differ), f"{name}{differ[0].tolist()} depends on tokens after {t}\n{case!r}"


def assert_backward_causal(case: Case, backend: Backend, t: int, device: torch.device | str = "cpu") -> None:
    """The gradient of o[.. t] with respect to every input of the tokens after t is exactly 0."""
    inputs = make_inputs(case, device)
    do = inputs.do.clone()
    do[:, t + 1 :] = 0
    grads = run(backend, replace(inputs, do=do)).grads
    later = dict.fromkeys(("q", "k", "v", "gates", "k_win", "v_win"), t + 1)
    later |= dict.fromkeys(("k_cmp", "v_cmp"), max(0, (t - case.config.offset) // case.config.stride + 1))
    for name, first in later.items():
        if name in grads:
            differ = (grads[name][:, first:] != 0).nonzero()
            assert not len(differ), f"d{name}{differ[0].tolist()} after {t} is not 0\n{case!r}"


def causal_only(case: Case) -> Case:
    """The nearest case that promises causality."""
    config = case.config.replace(compress_offset=max(case.config.offset, case.config.span - 1), rule="nsa")
    return replace(case, lengths=None, causal=True, config=config)


@on_both("layer.causality")
def causality(case: Case, backend: str, device: str) -> None:
    """Later tokens change no bit, and get no gradient from earlier outputs."""
    case = causal_only(case)
    t = case.seed % case.T
    for each in {backend, "reference"} if device == "cpu" else {backend}:
        assert_forward_causal(case, each, t, device)
        assert_backward_causal(case, each, t, device)


@on_both("layer.lists of the caller's", pr=8)
def lists_of_the_caller(case: Case, backend: str, device: str) -> None:
    """Any order, blocks named twice, for each head or for each query head: what is listed is seen; any other number, in
    int64 too, is padding."""
    config, generator = case.config, torch.Generator().manual_seed(case.seed)
    Hs, n = (case.Hkv, case.Hq)[case.seed % 2], 1 + case.seed % 5
    lengths = case.lengths or (case.T,)
    each = [
        torch.randint(-1, config.num_blocks(T), (config.num_tiles(T), Hs, n), generator=generator) if T else None
        for T in lengths
    ]
    lists = torch.cat([x for x in each if x is not None])
    most = torch.cat([torch.full((len(x),), config.num_blocks(T)) for x, T in zip(each, lengths) if T])[:, None, None]
    padding = torch.stack([most.expand_as(lists), most + lists.abs(), *map(torch.full_like, [lists] * 3, NO_BLOCKS)])
    turn = torch.randint(len(padding), lists.shape, generator=generator)
    lists = torch.where(lists < 0, padding.gather(0, turn[None])[0], lists)
    narrow = lists.clamp(max=2**31 - 1).int()
    alike = lists.where((lists >= 0) & (lists < most), -1).int()
    if case.lengths is None:
        lists, narrow, alike = (x.expand(case.B, *x.shape) for x in (lists, narrow, alike))
    arguments = [lists if case.seed % 3 else narrow, alike]
    once, other = (run(backend, make_inputs(case, device), block_indices=x.to(device)) for x in arguments)
    assert once.o.equal(other.o), "padding of other numbers makes another output"
    assert_close_to_reference(case, backend, device, block_indices=narrow)


@on_both("layer.shards")
def shards(case: Case, backend: str, device: str) -> None:
    """Queries in shards, each with all keys: together they give the definition's output, lists and gradients."""
    if device == "cuda" and not hopper():
        return
    size = case.config.block_size if device == "cpu" else 64
    case = replace(case, config=case.config.replace(q_tile=1, rule="nsa", block_size=size))
    draw, bounds = random.Random(case.seed), []
    for T in case.lengths or (case.T,):
        bounds.append((0, *sorted(draw.randint(0, T) for _ in range(2)), T))
    cut = [[each[i : i + 2] for each in bounds] for i in range(3)]
    cut = [shard for shard in cut if any(end > first for first, end in shard)]
    if case.lengths is None:  # offsets differ between the sequences of a batch
        cut = [[(first, end)] + [(case.T - end, case.T - first)] * (case.B - 1) for ((first, end),) in cut]
    attend = partial(query_shards.attend, backend=backend)
    assert_close_to_reference(case, query_shards.in_shards(attend, cut), device)


@on_both("layer.neighbours")
def neighbours(case: Case, backend: str, device: str) -> None:
    """NaN, inf or huge numbers in other sequences change no bit of an output, or of a deterministic gradient."""
    if case.lengths is None:
        case = replace(case, lengths=(case.T, 1 + case.seed % 30, case.T))
    inputs, mine = make_inputs(case, device), case.seed % len(case.lengths)
    value = (math.nan, math.inf, torch.finfo(case.dtype).max)[case.seed % 3]
    once, other = (run(backend, arguments) for arguments in (inputs, spoilt(inputs, value, {mine})))
    clean, beside = (result.o.split(case.lengths)[mine] for result in (once, other))
    assert beside.equal(clean), f"o of sequence {mine} has {int((beside != clean).sum())} other numbers"
    for name in ("q", "k", "v"):
        clean, beside = (result.grads[name].split(case.lengths)[mine] for result in (once, other))
        if case.config.deterministic:
            assert beside.equal(clean), f"d{name} of sequence {mine} has {int((beside != clean).sum())} other numbers"
        else:
            near(f"d{name}", beside, clean)


def strided(inputs: Inputs, layout: str) -> Inputs:
    """The same values, laid out in another way."""
    names = [name for name in ("q", "k", "v", "do", "gates") if getattr(inputs, name) is not None]
    return replace(inputs, **{name: laid_out(getattr(inputs, name), layout) for name in names})


@holds("layer.strides", strategies.layer_cases)
def strides(case: Case) -> None:
    """Views of larger tensors, heads before tokens, every other batch: the same output and gradients."""
    inputs = make_inputs(case)
    once, other = (run("eager", x).tensors() for x in (inputs, strided(inputs, LAYOUTS[case.seed % len(LAYOUTS)])))
    for name, x in once.items():
        torch.testing.assert_close(other[name], x, msg=lambda said, name=name: f"{name}: {said}")


def hopper() -> bool:
    """True if a GPU is here whose kernels have a deterministic backward."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@holds("layer.kernels give the same bits", lambda: kernel_cases(), needs=GPU)
def kernels_give_the_same_bits(case: Case) -> None:
    """The output always, gradients where they are deterministic; whatever the strides, wherever sequences' starts are,
    and while other work goes on."""
    inputs, square = make_inputs(case, "cuda"), torch.randn(1024, 1024, device="cuda")
    starts = [inputs.cu_seqlens, None if inputs.cu_seqlens is None else inputs.cu_seqlens.cpu()]
    once, other = run("cute", inputs).tensors(), torch.cuda.Stream()
    for turn in range(2 * len(LAYOUTS)):
        with torch.cuda.stream(other):
            for _ in range((case.seed + 7 * turn) % 20):
                square @ square
        arguments = replace(strided(inputs, LAYOUTS[turn % len(LAYOUTS)]), cu_seqlens=starts[turn // len(LAYOUTS)])
        again = run("cute", arguments).tensors()
        for name, x in again.items():
            if case.config.deterministic or name in ("o", *LSES):
                assert x.equal(once[name]), f"{name} has {int((x != once[name]).sum())} other numbers in round {turn}"


@st.composite
def kernel_cases(draw: st.DrawFn) -> Case:
    """Few kinds of kernels, any data."""
    small, D = draw(st.booleans()), draw(st.sampled_from((64, 128)))
    q_tile = draw(st.sampled_from((1, 16))) if small else 128
    G = draw(st.sampled_from((2, 4) if D == 128 else (1, 3, 16)))
    config = NSAConfig(
        block_size=64 if small else draw(st.sampled_from((64, 128))),
        **draw(st.sampled_from(({}, dict(compress_size=32, compress_stride=16)))) if q_tile == 1 else {},
        block_counts=draw(st.integers(1, 12)),
        q_tile=q_tile,
        window_size=draw(st.just(0) | st.integers(1, 700)),
        **draw(strategies.forced()),
        deterministic=draw(st.booleans()) and hopper(),
    )
    lengths = st.lists(st.integers(0, 700), min_size=1, max_size=4).filter(any).map(tuple)
    fixed = dict(
        B=draw(st.integers(1, 2)),
        T=draw(st.one_of(st.integers(1, 1500), st.sampled_from((1, 64, 128, 129)))),
        Hq=G * (Hkv := 1 if G == 16 else 2),
        Hkv=Hkv,
        D=D,
        Dv=None,
        config=config,
        causal=True,
        lengths=draw(st.none() | lengths),
        own_keys=draw(st.sampled_from(((), OWN_KEYS, ("k_cmp", "v_win")))),
    )
    return draw(strategies.layer_cases((torch.bfloat16,), **fixed))
