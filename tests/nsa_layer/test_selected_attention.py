"""Lists of the caller's own: in `nsa` in place of a choice, and in `selected_attention` alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nsa_layer import NSAConfig, nsa, reference, selected, selected_attention, support
from nsa_layer.selected import TILES
from nsa_tools.testing.cases import Case, make_inputs, run

Tensor = torch.Tensor
SMALL = NSAConfig(block_size=8, block_counts=4, q_tile=1, window_size=8)
BACKENDS = ["eager", "reference"]


def drawn(*shape: int, blocks: int, seed: int = 0) -> Tensor:
    """Lists in any order, of any length, with blocks named twice."""
    return torch.randint(-1, blocks, shape, generator=torch.Generator().manual_seed(seed)).int()


def called(given: dict[str, Tensor], do: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """o, the LSE, dq, dk and dv."""
    leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
    o, lse = selected_attention(**leaves, return_lse=True, **options)
    assert not lse.requires_grad
    return o.detach(), lse, *torch.autograd.grad(o, list(leaves.values()), do)


def tensors(*lead: int, S: int, Hq: int = 4, Hkv: int = 2, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = dict(q=(*lead, Hq, 8), k=(*lead[:-1], S, Hkv, 8), v=(*lead[:-1], S, Hkv, 6))
    return {n: torch.randn(x, generator=generator, dtype=torch.float64).to(dtype) for n, x in shapes.items()}


def by_hand(given: dict[str, Tensor], lists: Tensor, size: int, first: int, tile: int, causal: bool) -> tuple:
    """o [T, Hq, Dv] and the LSE [Hq, T] of one sequence, query by query."""
    q, k, v = given["q"], given["k"], given["v"]
    o, lse = torch.zeros(*q.shape[:2], v.shape[-1], dtype=q.dtype), torch.full(q.shape[:2], -math.inf, dtype=q.dtype)
    for t in range(len(q)):
        for h in range(q.shape[1]):
            own = set(lists[t // tile, h * lists.shape[1] // q.shape[1]].tolist()) - {-1}
            seen = [s for s in range(len(k)) if s // size in own and (s <= first + t or not causal)]
            if seen:
                kv = h * k.shape[1] // q.shape[1]
                s = k[seen, kv] @ q[t, h] * 8**-0.5
                lse[t, h], o[t, h] = s.logsumexp(0), s.softmax(0) @ v[seen, kv]
    return o, lse.mT


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("Hs", "tile"), [(2, 1), (4, 1), (2, 8), (4, 64), (2, 2)])
def test_by_hand(backend: str, causal: bool, Hs: int, tile: int) -> None:
    """Queries in the middle and at the end of a longer context, with lists for tiles and for query heads."""
    B, T, S, size = 2, 21, 50, 8
    given, lists = tensors(B, T, S=S), drawn(B, -(-T // tile), Hs, 3, blocks=7)
    for q_offset, firsts in ((None, (29, 29)), (11, (11, 11)), (torch.tensor([0, 40]).int(), (0, 40))):
        options = dict(block_size=size, q_offset=q_offset, causal=causal, backend=backend, return_lse=True)
        o, lse = selected_attention(**given, block_indices=lists, **options)
        for b, first in enumerate(firsts):
            own = {name: x[b] for name, x in given.items()}
            expected = by_hand(own, lists[b], size, first, tile, causal)
            torch.testing.assert_close((o[b], lse[b]), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
def test_eager_is_the_reference(causal: bool, dtype: torch.dtype) -> None:
    given, lists = tensors(2, 70, S=90), drawn(2, 70, 2, 5, blocks=12)
    do = torch.randn(2, 70, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    options = dict(block_indices=lists, block_size=8, causal=causal)
    exact = called(given, do, backend="reference", **options)
    rounded = {name: x.to(dtype) for name, x in given.items()}
    got, straight = (called(rounded, do.to(dtype), backend=backend, **options) for backend in BACKENDS)
    if dtype == torch.float64:
        torch.testing.assert_close(got, exact)
        return
    for mine, plain, truth in zip(got, straight, exact, strict=True):
        error, allowed = ((x.double() - truth).nan_to_num().abs().max() for x in (mine, plain))
        assert error <= 2 * allowed + 4 * torch.finfo(dtype).eps * truth.nan_to_num(neginf=0).abs().max()


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_queries_of_longer_contexts(backend: str) -> None:
    of_q, of_k, size = (5, 0, 30, 1), (20, 3, 30, 9), 8
    lists = drawn(sum(of_q), 2, 3, blocks=2)
    starts = [torch.tensor([0, *x]).cumsum(0).int() for x in (of_q, of_k)]
    given = tensors(sum(of_q), S=0) | {n: x for n, x in tensors(1, S=sum(of_k)).items() if n != "q"}
    do = torch.randn(sum(of_q), 4, 6, dtype=torch.float64)
    options = dict(block_size=size, backend=backend)
    whole = called(given, do, block_indices=lists, cu_seqlens=starts[0], cu_seqlens_k=starts[1], **options)
    for i, (T, S) in enumerate(zip(of_q, of_k)):
        if not T:
            continue
        mine, its = (slice(int(x[i]), int(x[i + 1])) for x in starts)
        own = {n: x[mine if n == "q" else its][None] for n, x in given.items()}
        alone = called(own, do[mine][None], block_indices=lists[mine][None], **options)
        places = (mine, (slice(None), mine), mine, its, its)
        for x, y, place in zip(whole, alone, places, strict=True):
            torch.testing.assert_close(x[place], y[0])


def test_the_number_of_lists_tells_the_tile_of_packed_sequences() -> None:
    """The number of lists tells their tile for any lengths, or lengths are looked at."""
    told = 0
    for sequences, most in ((1, 2000), (3, 300), (40, 90)):
        for tile in TILES:
            lengths = [*drawn(sequences, blocks=most).clamp(min=0).tolist(), 1]
            lists = torch.zeros(sum(-(-T // tile) for T in lengths), 2, 3, dtype=torch.int32)
            want = selected._tile_of(lists, lengths, packed=True)
            got = selected._tile_of_any(lists, sum(lengths), len(lengths))
            assert got in (want, None), (lengths, tile)
            told += got is not None
    assert told >= len(TILES), "whole sequences are much longer than tiles"


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_strides_order_and_padding(backend: str) -> None:
    given, do = tensors(1, 40, S=40), torch.randn(1, 40, 4, 6, dtype=torch.float64)
    plain = torch.tensor([0, 2, 4, -1]).int().expand(1, 40, 2, 4)
    expected = called(given, do, block_indices=plain.contiguous(), block_size=8, backend=backend)
    wider = torch.full((40, 7, 2, 1), -1).int().transpose(0, 2)  # heads, then entries, then tokens
    wider[:, 1], wider[:, 3], wider[:, 4], wider[:, 6] = 4, 0, 4, 2
    lists = wider.permute(3, 2, 0, 1)
    for other in (plain, lists):
        for x, y in zip(called(given, do, block_indices=other, block_size=8, backend=backend), expected, strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("config", [SMALL, SMALL.replace(q_tile=16), NSAConfig.seed(block_size=8, q_tile=8)], ids=str)
@pytest.mark.parametrize("lengths", [None, (33, 0, 1, 66)])
def test_nsa_takes_lists_as_they_are(backend: str, config: NSAConfig, lengths: tuple[int, ...] | None) -> None:
    """Nothing is forced; the lists are those of `Aux` again."""
    case = Case(B=2, T=100, Hq=4, Hkv=2, D=8, dtype=torch.float64, config=config, lengths=lengths, gate="slc")
    inputs = make_inputs(case)
    tiles = [config.num_tiles(T) for T in lengths or (100,)]
    for Hs in (2, 4):
        shape = (sum(tiles), Hs, 3) if lengths else (2, *tiles, Hs, 3)
        lists = drawn(*shape, blocks=1 if lengths else 13)
        got = run(backend, inputs, block_indices=lists)
        assert torch.equal(got.aux.block_indices, lists)
        expected = run(reference.attend, inputs, lists)
        for name, x in got.tensors().items():
            torch.testing.assert_close(x, expected.tensors()[name])
        starts = {} if lengths is None else dict(cu_seqlens=inputs.cu_seqlens)
        alone = dict(block_indices=lists, block_size=8, backend=backend, **starts)
        torch.testing.assert_close(got.o, selected_attention(inputs.q, inputs.k, inputs.v, **alone))


def test_a_choice_given_back_gives_the_same_bits() -> None:
    case = Case(B=2, T=100, D=8, config=SMALL)
    for config in (SMALL, SMALL.replace(q_tile=8)):
        inputs = make_inputs(replace(case, config=config))
        chosen = run("eager", inputs)
        again = run("eager", inputs, block_indices=chosen.aux.block_indices)
        for name, x in chosen.tensors().items():
            assert torch.equal(x, again.tensors()[name]), name


def test_the_kernels_refuse_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists that they do not take are refused by `nsa` and by `selected_attention`, before anything is computed."""
    with FakeTensorMode():
        q, k = (torch.empty(1, 128, H, 64, dtype=torch.bfloat16, device="cuda") for H in (4, 2))
        lists = torch.empty(1, 128, 2, 3, dtype=torch.int32, device="cuda")
        for arch in support.ARCHITECTURES:
            monkeypatch.setattr(support, "device_arch", lambda index=None: arch)
            for backend in (None, "cute"):
                with pytest.raises(
                    NotImplementedError, match=f"sm_{arch}: the kernels do not support block_size below"
                ):
                    nsa(q, k, k, block_indices=lists, config=NSAConfig(block_size=8, q_tile=1), backend=backend)
                with pytest.raises(
                    NotImplementedError, match=f"sm_{arch}: the kernels do not support block_size below"
                ):
                    selected_attention(q, k, k, lists, block_size=8, backend=backend)


def test_a_mixture_of_blocks_for_each_query_head() -> None:
    """MoBA, arXiv:2502.13189: a query's own block, and the two before it whose mean key is most like the query."""
    T, size, given = 100, 16, tensors(1, 100, S=100)
    q, k, v = (x[0].repeat_interleave(4 // x.shape[2], 1).movedim(1, 0) for x in given.values())  # [Hq, T, D]
    own, block = torch.arange(T)[:, None] // size, torch.arange(-(-T // size))
    means = torch.stack([part.mean(1) for part in k.split(size, 1)], 1)
    score = (q @ means.mT).masked_fill(block >= own, -math.inf).masked_fill(block == own, math.inf)
    best = score.topk(3)
    lists = best.indices.masked_fill(best.values == -math.inf, -1).movedim(0, 1)[None].int()
    listed = (lists[0].movedim(0, 1)[..., None] == block).any(-2).repeat_interleave(size, -1)[..., :T]
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, listed.tril()).movedim(0, 1)[None]
    for backend in BACKENDS:
        o = selected_attention(**given, block_indices=lists, block_size=size, backend=backend)
        torch.testing.assert_close(o, expected)


def test_rows_without_keys() -> None:
    given = tensors(1, 9, S=9)
    lists = torch.full((1, 9, 2, 1), -1).int()
    lists[0, 4:] = 1  # block 1 starts at token 8
    for backend in BACKENDS:
        o, lse, dq, dk, dv = called(
            given, torch.ones(1, 9, 4, 6).double(), block_indices=lists, block_size=8, backend=backend
        )
        assert not o[:, :8].any() and (lse[..., :8] == -math.inf).all() and lse[..., 8].isfinite().all()
        assert not dq.any() and not dk.any() and not dv[:, :8].any() and dv[:, 8].all()


def test_second_derivatives_are_refused() -> None:
    given = {name: x.requires_grad_() for name, x in tensors(1, 9, S=9).items()}
    o = selected_attention(**given, block_indices=drawn(1, 9, 2, 2, blocks=2).abs(), block_size=8)
    (dq,) = torch.autograd.grad(o.sum(), given["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        dq.sum().backward()


def test_nsa_by_token_runs_the_same_branch() -> None:
    inputs = make_inputs(Case(B=2, T=100, D=8, config=SMALL, gate="slc"))
    o, aux = nsa(inputs.q, inputs.k, inputs.v, config=SMALL, gates=inputs.gates, backend="eager", return_aux=True)
    alone, lse = selected_attention(
        inputs.q, inputs.k, inputs.v, aux.block_indices, block_size=8, backend="eager", return_lse=True
    )
    assert torch.equal(o, alone) and torch.equal(lse, aux.lse_slc)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("Hs", [2, 8])
def test_on_a_gpu(Hs: int, dtype: torch.dtype) -> None:
    """Eager errs at most twice as much as the reference in the same dtype, and gives the same bits twice."""
    given, T, S = tensors(2, 700, S=1000, Hq=8), 700, 1000
    do, lists = torch.randn(2, T, 8, 6).to(dtype).cuda(), drawn(2, T, Hs, 5, blocks=-(-S // 64)).cuda()
    given = {name: x.to("cuda", dtype) for name, x in given.items()}
    options = dict(block_indices=lists, block_size=64, q_offset=torch.tensor([0, 300], dtype=torch.int32).cuda())
    exact = called({name: x.double() for name, x in given.items()}, do.double(), backend="reference", **options)
    straight = called(given, do, backend="reference", **options)
    got = called(given, do, backend="eager", **options)
    for mine, plain, truth in zip(got, straight, exact, strict=True):
        error, allowed = ((x.double() - truth).nan_to_num().abs().max() for x in (mine, plain))
        assert error <= 2 * allowed + 4 * torch.finfo(mine.dtype).eps * truth.nan_to_num(neginf=0).abs().max()
    again = called(given, do, backend="eager", **options)
    for x, y in zip(got, again, strict=True):
        assert torch.equal(x, y)
