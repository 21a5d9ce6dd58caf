"""The kernel that selects blocks by an index of tokens chooses what the definition in fp64 does."""

# What runs in a worker is imported there, so nothing up here may ask for the kernels.
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from fa_compile import Worker, shared_worker
from kernel_cases import faked, starts

from nsa_layer import NSAConfig, reference
from nsa_layer.call import Call
from nsa_tools.testing.assertions import assert_close_to_reference, assert_sequence_choice, rounding_of_scores
from nsa_tools.testing.cases import Case, make_inputs

Tensor = torch.Tensor
UNFORCED = dict(init_blocks=0, local_blocks=0)


@dataclass(frozen=True)
class IndexInputs:
    """Of a call, with `first` and `lengths` of the queries and keys of each packed sequence, or of a batch of two."""

    q_index: Tensor
    k_index: Tensor
    config: NSAConfig
    lengths: tuple[int, ...] | None
    lengths_k: tuple[int, ...] | None = None

    def sequences(self) -> Iterator[tuple[Tensor, Tensor]]:
        """q_index and k_index of each, in fp64."""
        q, k = self.q_index.double(), self.k_index.double()
        if self.lengths is None:
            return zip(q, k)
        return zip(q.split(self.lengths), k.split(self.lengths_k or self.lengths))


def inputs(
    lengths: tuple[int, ...] | None = None,
    T: int = 1000,
    lengths_k: tuple[int, ...] | None = None,
    Hs: int = 3,
    Di: int = 32,
    one_key: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    integers: bool = False,
    device: str = "cuda",
    seed: int = 0,
    **config: int,
) -> IndexInputs:
    torch.manual_seed(seed)

    def rows(count: tuple[int, ...] | None, heads: int) -> Tensor:
        shape = (2, T, heads, Di) if count is None else (sum(count), heads, Di)
        x = torch.randint(-2, 3, shape).float() if integers else torch.randn(shape)
        return x.to(device, dtype)

    q, k = rows(lengths, Hs), rows(lengths_k or lengths, 1 if one_key else Hs)
    return IndexInputs(q, k, NSAConfig(**config), lengths, lengths_k)


CASES = {
    "default": {},
    "Di 16": dict(Di=16),
    "Di 64, fp16": dict(Di=64, dtype=torch.float16),
    "Di 128": dict(Di=128),
    "one key": dict(one_key=True, Hs=5),
    "blocks of 16": dict(block_size=16),
    "blocks of 32, unforced": dict(block_size=32, **UNFORCED),
    "blocks of 128, first behind none": dict(block_size=128, T=3000, init_blocks=0, local_blocks=1),
    "unforced": dict(UNFORCED, block_counts=7),
    "first alone": dict(init_blocks=3, local_blocks=0, block_counts=5),
    "too many forced": dict(init_blocks=9, local_blocks=9),
    "32 blocks": dict(T=5000, block_counts=32),
    "64 blocks": dict(T=6001, block_counts=64, Hs=1),
    "128 blocks of 16": dict(T=4097, block_counts=128, block_size=16, Hs=1, **UNFORCED),
    "long": dict(T=20000, Hs=1),
    "packed": dict(lengths=(1024, 0, 1, 63, 0, 690, *(16 * i for i in range(20)), 2305), one_key=True),
    "packed, unforced": dict(lengths=(130, 0, 1, 2300), block_size=16, **UNFORCED),
    "packed, last queries": dict(lengths=(100, 0, 1, 700), lengths_k=(2000, 5, 65, 700), **UNFORCED),
}


def selected(of: IndexInputs) -> Tensor:
    """Lists by the kernel, [B, T, Hs, n] or packed [total, Hs, n]."""
    from nsa_layer.kernels.select_by_index.kernel import select_by_index

    device, where = of.q_index.device, {}
    if of.lengths is not None:
        where = dict(cu_seqlens=starts(of.lengths, device), max_seqlen=max(of.lengths))
    if of.lengths_k is not None:
        past = [S - T for T, S in zip(of.lengths, of.lengths_k)]
        where |= dict(q_offset=torch.tensor(past, dtype=torch.int32).to(device))
        where |= dict(cu_seqlens_k=starts(of.lengths_k, device), max_seqlen_k=max(of.lengths_k))
    return select_by_index(of.q_index, of.k_index, config=of.config, **where)


def assert_right(of: IndexInputs, *, exact: bool = False) -> None:
    """The definition's lists, but for scores within rounding where they are not exact; and the same ones twice."""
    lists = selected(of)
    assert selected(of).equal(lists)
    for own, (q, k) in zip(lists if of.lengths is None else lists.split(of.lengths), of.sequences()):
        for begin in range(0, len(q), 2048):  # the definition holds all scores
            rows = slice(begin, begin + 2048)
            static = dict(config=of.config, softmax_scale=1.0, q_offset=len(k) - len(q) + begin)
            scores = reference.index_selection(q[rows], k, **static)
            expected = reference.select_blocks(scores, config=of.config, width=lists.shape[-1])
            error = 0.0 if exact else rounding_of_scores(q, k, 1.0, torch.finfo(torch.float32).eps)
            allowed = torch.full_like(scores.values, -1.0 if exact else error)
            assert_sequence_choice(f"{of.config!r}, row {begin}", own[rows], expected, scores, allowed)


def traced(name: str) -> tuple[int, ...]:
    """In a worker, for its architecture: the shape that comes back."""
    return tuple(selected(faked(lambda: inputs(**CASES[name], device="cpu"))).shape)


TRACED = ["default", "Di 16", "Di 128", "blocks of 16", "blocks of 128, first behind none", "unforced", "64 blocks"]


@pytest.mark.parametrize("name", [*TRACED, "packed", "packed, last queries"])
def test_the_kernel_is_traced(name: str, compiler: Worker) -> None:
    of = inputs(**CASES[name], device="cpu")
    longest = max(of.lengths_k or of.lengths or of.q_index.shape[1:2])
    assert compiler.trace(traced, name) == (*of.q_index.shape[:-1], of.config.list_width(longest))


def stack_and_order(name: str) -> tuple[list[int], bool]:
    """Stack frames of a case's kernel, and whether its products wait for one another; in a worker."""
    from fa_cubin import machine_code

    [code] = machine_code(traced, name)
    return code.stack, code.serialized


@pytest.mark.xdist_group("sm_90")
def test_registers_suffice() -> None:
    assert shared_worker("sm_90").run(stack_and_order, "Di 64, fp16") == ([0], False)


def test_registers_are_there_to_take() -> None:
    """A warpgroup that asks for more than others gave back waits forever."""
    from nsa_layer.kernels.select_by_index.spec import IndexTopKSpec

    multiply, lists, loads = IndexTopKSpec.of(32, 16, 1, 2, False, 64, False, False).registers
    assert loads <= 128 <= min(multiply, lists) and 2 * multiply + lists + loads <= 4 * 128


@pytest.mark.gpu
@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("name", CASES)
def test_exact_scores(name: str) -> None:
    """Small integers: scores are exact, and many tie."""
    assert_right(inputs(**CASES[name], integers=True), exact=True)


@pytest.mark.gpu
@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("name", CASES)
def test_real_scores(name: str) -> None:
    """Of any sign, all negative, and all positive."""
    of = inputs(**CASES[name])
    assert_right(of)
    q, k = of.q_index.abs(), of.k_index.abs()
    for sign in (1, -1):
        assert_right(replace(of, q_index=q * sign, k_index=k))


@pytest.mark.gpu
def test_zeros_of_either_sign_tie() -> None:
    of = inputs(**UNFORCED, block_counts=4)
    assert_right(replace(of, q_index=-torch.zeros_like(of.q_index)), exact=True)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 63, 64, 65, 127, 128, 129, 255, 257, 4096, 8193])
def test_lengths(T: int) -> None:
    for changes in (dict(), dict(UNFORCED), dict(block_size=16, block_counts=5)):
        assert_right(inputs(T=T, Hs=1, **changes))


@pytest.mark.gpu
def test_later_tokens_change_nothing() -> None:
    of = inputs(T=1500, **UNFORCED)
    whole = selected(of)
    for T in (1499, 777, 64):
        later = [torch.cat([x[:, :T], torch.full_like(x[:, T:], 9)], 1) for x in (of.q_index, of.k_index)]
        assert selected(replace(of, q_index=later[0], k_index=later[1]))[:, :T].equal(whole[:, :T])


@pytest.mark.gpu
def test_products_by_warp(monkeypatch: pytest.MonkeyPatch) -> None:
    """As SM100 makes them."""
    from flash_attn.cute.mma import form

    monkeypatch.setattr(form, "FORCED", True)
    test_exact_scores("default")
    test_real_scores("packed, unforced")


INDEX = NSAConfig(rule="index", branches=("selected",), block_counts=5)
LAYERS = {
    "32/8": Case(T=1500, Hq=32, Hkv=8, D=64, config=INDEX, index_dim=32),
    "one key, 64/4": Case(T=1025, Hq=64, Hkv=4, D=128, config=INDEX, index_dim=16, one_key=True),
    "packed": Case(
        lengths=(700, 0, 1, 64, 900), Hq=8, D=64, config=INDEX.replace(block_size=16, **UNFORCED), index_dim=64
    ),
    "32 blocks of 128, deterministic": Case(
        T=5000, Hq=8, D=128, config=INDEX.replace(block_size=128, block_counts=32, deterministic=True), index_dim=128
    ),
    "128 blocks": Case(T=9000, Hq=4, D=64, config=INDEX.replace(block_counts=128), index_dim=32),
}
LAYERS = {name: replace(case, dtype=torch.bfloat16, gate="none", index_loss=False) for name, case in LAYERS.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYERS)
def test_the_layer_is_that_of_the_definition(name: str) -> None:
    assert_close_to_reference(LAYERS[name], "cute", "cuda")


def traced_layer(name: str) -> list[tuple[int, ...]]:
    """In a worker: shapes of the output, the lists and the gradients that the kernels give."""
    from nsa_layer.cute.memory_plan import MemoryPlan
    from nsa_layer.cute.pages import backward, forward

    inputs, case = faked(lambda: make_inputs(LAYERS[name])), LAYERS[name]
    call = Call(**inputs.tensors(), cu_seqlens=inputs.cu_seqlens, spec=case.spec)
    how = dict(plan=MemoryPlan(((0, case.Hkv),), (False,) * 3), together=False)
    o, saved = forward(call, **how)
    grads = backward(call, saved, torch.empty_like(o), o=o, **how)
    return [tuple(x.shape) for x in (o, saved.block_indices, *grads) if x is not None]


@pytest.mark.parametrize("name", ["32/8", "packed"])
def test_the_layer_is_traced(name: str, compiler: Worker) -> None:
    case, inputs = LAYERS[name], make_inputs(LAYERS[name])
    lists = (*inputs.q.shape[:-2], case.Hkv, case.config.list_width(max(case.lengths or (case.T,))))
    shapes = [inputs.q.shape, lists, *(x.shape for x in (inputs.q, inputs.k, inputs.v))]
    assert compiler.trace(traced_layer, name) == [tuple(shape) for shape in shapes]
