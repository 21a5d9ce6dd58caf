"""Every token's own choice of blocks: cases whose answer is known by hand, and eager against the reference."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fuzz.causality import assert_backward_causal, assert_forward_causal
from nsa_layer import NSAConfig, eager, nsa, reference, token_attention
from nsa_layer.choose import choose_blocks_by_token
from nsa_tools.testing.assertions import assert_close_to_reference
from nsa_tools.testing.cases import Case, make_inputs, run

SMALL = NSAConfig(block_size=8, block_counts=4, q_tile=1, window_size=8)
OVERLAP = SMALL.replace(compress_size=4, compress_stride=2)  # the sizes of `NSAConfig.paper` over 8
LONG = SMALL.replace(compress_size=16, compress_stride=4, init_blocks=0, local_blocks=0)
BACKENDS = ["eager", "reference"]


def importance_of_key(i: int, config: NSAConfig, T: int) -> list[float]:
    """Importance of each block where compressed key i has all the probability, for the last token."""
    q, k_cmp = torch.ones(1, 1, 1), torch.full((config.compressed_length(T), 1, 1), -1e4)
    k_cmp[i] = 1e4
    static = dict(config=config, causal=True, softmax_scale=1.0)
    importance = reference.token_importance(q, k_cmp, torch.tensor([T - 1]), blocks=config.num_blocks(T), **static)
    return importance[0, 0].tolist()


def test_keys_count_once_for_each_stride_that_they_share_with_a_block() -> None:
    """Means of 32 tokens every 16, blocks of 64: keys 4j - 1 .. 4j + 3 count 1, 2, 2, 2, 1."""
    config, T = NSAConfig.paper(), 1024
    weights = torch.tensor([importance_of_key(i, config, T) for i in range(config.compressed_length(T))])
    for j in range(1, T // 64 - 1):
        expected = torch.zeros(len(weights))
        expected[4 * j - 1 : 4 * j + 4] = torch.tensor([1.0, 2.0, 2.0, 2.0, 1.0])
        assert torch.equal(weights[:, j], expected), j
    assert weights[:, 0].tolist()[:5] == [2.0, 2.0, 2.0, 1.0, 0.0]
    assert [importance_of_key(i, NSAConfig(q_tile=1), 256) for i in range(4)] == torch.eye(4).tolist()
    wide = SMALL.replace(block_size=4, compress_size=8, compress_stride=4)  # keys that are longer than blocks
    assert importance_of_key(1, wide, 16) == [0.0, 1.0, 1.0, 0.0]


def lists(backend: str, q: torch.Tensor, k: torch.Tensor, config: NSAConfig, **options: object) -> torch.Tensor:
    """The first head's [T, n] of q [T, Hq, D] and k [T, Hkv, D]."""
    aux = nsa(q[None], k[None], k[None], config=config, backend=backend, return_aux=True, **options)[1]
    return aux.block_indices[0, :, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_token_asks_for_itself(backend: str) -> None:
    """Keys of block j are the j-th unit vector; token t asks for block 1 + t % 5."""
    T, n, D = 128, 4, 16
    k = torch.eye(D).repeat_interleave(8, dim=0)[:T, None].contiguous()
    asked = 1 + torch.arange(T) % 5
    q = 20 * torch.eye(D)[asked][:, None]
    got = lists(backend, q, k, SMALL.replace(block_counts=n), softmax_scale=1.0)
    for t in range(T):
        own = t // 8
        forced = {0, max(0, own - 1), own}
        wanted = {int(asked[t])} if (int(asked[t]) + 1) * 8 - 1 <= t else set()
        chosen = {j for j in got[t].tolist() if j >= 0}
        assert forced | wanted <= chosen and len(chosen) == min(n, own + 1), t
        # What nobody asks for scores alike: the earliest of the rest.
        rest = [j for j in range(own) if j not in forced | wanted]
        assert chosen == forced | wanted | set(rest[: max(0, n - len(forced | wanted))]), t


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [True, False])
def test_ties_go_to_the_earlier_block(backend: str, causal: bool) -> None:
    """Queries of 0 find all blocks alike, whose importance is 0 before any compressed key is visible."""
    T, k = 100, torch.randn(100, 1, 4)
    for config in (SMALL, OVERLAP.replace(compress_size=8, compress_stride=8), SMALL.replace(compress_offset=1000)):
        got = lists(backend, torch.zeros(T, 2, 4), k, config, causal=causal)
        for t in range(T):
            own = t // 8
            complete = range(own if (t + 1) % 8 else own + 1) if causal else range(T // 8)
            forced = sorted({0, max(0, own - 1), own})
            expected = sorted(forced + [j for j in complete if j not in forced][: 4 - len(forced)])
            assert got[t].tolist() == expected + [-1] * (4 - len(expected)), t


@pytest.mark.parametrize("backend", BACKENDS)
def test_hidden_keys_do_not_count(backend: str) -> None:
    """Keys visible only long after their block are of no weight before, however large."""
    T, k = 96, torch.randn(96, 1, 4, generator=torch.Generator().manual_seed(0))
    k[8:16] *= 1000  # block 1
    late = SMALL.replace(compress_offset=50, block_counts=3, init_blocks=0, local_blocks=0)
    got = lists(backend, k.abs(), k.abs(), late)
    for t in range(T):
        seen = [j for j in range(T // 8) if j * 8 + 50 <= t]
        assert (1 in got[t].tolist()) == (8 <= t) and (1 in seen) == (58 <= t)
        if t < 50:  # nothing is visible: all are 0, the earliest ones are listed, the own one included
            begun = t // 8 + 1
            assert got[t].tolist() == [*range(min(3, begun)), *[-1] * max(0, 3 - begun)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("config", [SMALL, OVERLAP, LONG], ids=str)
def test_later_tokens_have_no_say(backend: str, config: NSAConfig) -> None:
    for t in (0, 6, 7, 8, 40, 63, 64, 98) if backend == "eager" else (7, 64):
        case = Case(B=2, T=100, Hq=6, Hkv=2, D=8, config=config, compress_weights=True)
        assert_forward_causal(case, backend, t)
        assert_backward_causal(case, backend, t)


@pytest.mark.parametrize("G", [1, 3, 4])
@pytest.mark.parametrize("T", [1, 63, 64, 65, 129])
def test_eager_is_the_reference(T: int, G: int) -> None:
    config = (SMALL, OVERLAP)[T % 2]
    for case in (
        Case(T=T, Hq=2 * G, Hkv=2, D=16, config=NSAConfig.paper(block_counts=2), compress_weights=True),
        Case(B=2, T=T, Hq=2 * G, Hkv=2, D=8, Dv=6, dtype=torch.bfloat16, config=config, compress_weights=True),
        Case(T=T, Hq=2 * G, Hkv=2, D=8, dtype=torch.float64, config=config, causal=False),
        Case(lengths=(T, 0, 1, 70), Hq=2 * G, Hkv=2, D=8, config=config, gate="slc"),
    ):
        assert_close_to_reference(case, "eager")


def test_a_pack_is_its_sequences() -> None:
    case = Case(lengths=(33, 0, 1, 70, 8), Hq=4, Hkv=2, D=8, config=OVERLAP)
    inputs = make_inputs(case)
    whole = run("eager", inputs)
    for tensors, tiles in zip(
        zip(*(x.split(case.lengths) for x in (inputs.q, inputs.k, inputs.v))), inputs.sequences()
    ):
        if len(tensors[0]):
            given = dict(config=case.config, gate_weight=inputs.gate_weight, backend="eager", return_aux=True)
            aux = nsa(*(x[None] for x in tensors), **given)[1]
            own = whole.aux.block_indices[tiles[2]]
            assert torch.equal(own[..., : aux.block_indices.shape[-1]], aux.block_indices[0])
            assert (own[..., aux.block_indices.shape[-1] :] == -1).all()


@pytest.mark.parametrize("q_tile", [2, 32])
def test_tokens_of_small_tiles_have_its_list(monkeypatch: pytest.MonkeyPatch, q_tile: int) -> None:
    """Keys are gathered for each tile only where it is large."""
    monkeypatch.setattr(eager, "KeyBlocks", None)
    assert_close_to_reference(Case(T=130, config=SMALL.replace(q_tile=q_tile), compress_weights=True), "eager")


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token and all of them: in fp64 the numbers agree to rounding."""
    case = Case(B=2, T=90, D=8, dtype=torch.float64, config=OVERLAP)
    once = run("eager", make_inputs(case)).tensors()
    monkeypatch.setattr(token_attention, "CPU_PAIRS", 1)
    monkeypatch.setattr(token_attention, "ITEM", 3)
    monkeypatch.setattr("nsa_layer.choose.CPU_SCORE_BUDGET", 1)
    for name, x in run("eager", make_inputs(case)).tensors().items():
        torch.testing.assert_close(x, once[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_twice(dtype: torch.dtype) -> None:
    inputs = make_inputs(Case(B=2, T=300, config=OVERLAP, dtype=dtype, compress_weights=True))
    first, second = (run("eager", inputs) for _ in range(2))
    assert torch.equal(first.aux.block_indices, second.aux.block_indices)
    for name, x in first.tensors().items():
        assert torch.equal(x, second.tensors()[name]), name


def test_without_a_count_on_the_host() -> None:
    """Shapes alone decide what is computed on a device that must not be waited for."""
    q, k = (torch.empty(2, 70, H, 8, device="meta", requires_grad=True) for H in (4, 2))
    o = nsa(q, k, k, config=SMALL)
    o.sum().backward()
    assert o.shape == q.shape == q.grad.shape and k.grad.shape == k.shape


def test_the_probabilities_are_the_branches_own() -> None:
    """A log-sum-exp that says twice as much halves the weight of its head in the sum over the group."""
    q = torch.tensor([[3.0, 0.0], [0.0, 1.0]]).expand(1, 32, 2, 2)  # head 0 asks for block 1, head 1 for block 2
    k_cmp = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])[None, :, None]
    config = SMALL.replace(block_counts=1, init_blocks=0, local_blocks=0)
    static = dict(config=config, causal=False, softmax_scale=1.0)
    true = (q.movedim(1, 2) @ k_cmp[:, :, 0].mT).logsumexp(-1)
    for moved, expected in ((0.0, 1), (10.0, 2)):
        lse = true + moved * torch.tensor([1.0, 0.0])[None, :, None]
        assert choose_blocks_by_token(q, k_cmp, lse, **static).unique().tolist() == [expected]
    assert math.isfinite(float(true.sum()))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T", [1, 65, 1000, 4096])
def test_on_a_gpu(dtype: torch.dtype, T: int) -> None:
    case = Case(T=T, Hq=4, Hkv=2, D=64, dtype=dtype, config=NSAConfig(q_tile=1), compress_weights=True)
    for config in (NSAConfig(q_tile=1), NSAConfig.paper()):
        assert_close_to_reference(replace(case, config=config), "eager", "cuda")
    assert_close_to_reference(replace(case, lengths=(300, 0, 1, T), config=NSAConfig.paper()), "eager", "cuda")
