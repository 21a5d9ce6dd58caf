"""Lists of the caller's own: in `nsa` in place of a choice, and in `selected_attention` alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from layer_calls import no_waits, starts_of
from stub_kernels import LAUNCHED, stubbed_layer
from torch._subclasses.fake_tensor import FakeTensorMode

from nsa_layer import MemoryPolicy, NSAConfig, nsa, selected, selected_attention, support
from nsa_layer.selected import TILES
from nsa_tools.measure.timing import capture
from nsa_tools.testing import cases
from nsa_tools.testing.cases import make_inputs, run
from nsa_tools.testing.pasteable import Pasteable

Tensor = torch.Tensor
SMALL = NSAConfig(block_size=8, block_counts=4, q_tile=1, window_size=8)
BACKENDS = ["eager", "reference"]


@dataclass(frozen=True, repr=False)
class Case(Pasteable):
    """A call.

    Attributes:
        lengths: (queries, keys) of each sequence; of a batch of two if there is one.
        by_head: a list for each query head.
        q_offset: "end", the queries are the last ones; a number for all; "own", a tensor with one for each sequence.
    """

    lengths: tuple[tuple[int, int], ...] = ((300, 300),)
    G: int = 4
    Hkv: int = 2
    D: int = 128
    Dv: int | None = None
    n: int = 5
    by_head: bool = False
    q_tile: int = 1
    block_size: int = 64
    causal: bool = True
    q_offset: str | int = "end"
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0

    @property
    def packed(self) -> bool:
        return len(self.lengths) > 1

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        return self.lengths if self.packed else self.lengths * 2

    @property
    def offsets(self) -> list[int]:
        """Positions of first queries."""
        if isinstance(self.q_offset, int):
            return [self.q_offset] * len(self.sequences)
        own = self.q_offset == "own"
        return [(S - T) * i // len(self.sequences) if own else S - T for i, (T, S) in enumerate(self.sequences)]


def drawn(case: Case, device: str = "cpu") -> tuple[dict[str, Any], Tensor]:
    """The arguments of a call, and do. Lists in any order, with blocks named twice, and no stride of 1; every seventh
    is empty."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(tokens: int, heads: int, D: int) -> Tensor:
        lead = (tokens,) if case.packed else (2, tokens)
        return torch.randn(*lead, heads, D, generator=generator, dtype=torch.float64).to(device, case.dtype)

    of_q, of_k = ([pair[side] for pair in case.lengths] for side in (0, 1))
    Hq, Dv, lists = case.G * case.Hkv, case.Dv or case.D, []
    given: dict[str, Any] = dict(q=normal(sum(of_q), Hq, case.D), k=normal(sum(of_k), case.Hkv, case.D))
    given["v"] = normal(sum(of_k), case.Hkv, Dv)
    for T, S in case.sequences:
        shape = (-(-T // case.q_tile), Hq if case.by_head else case.Hkv, case.n)
        blocks = torch.randint(-1, -(-S // case.block_size), shape, generator=generator)
        blocks[::7] = -1
        lists.append(blocks.int())
    together = torch.cat(lists) if case.packed else torch.stack(lists)
    wide = torch.stack([together, together], dim=-1).transpose(-2, -3).contiguous().transpose(-2, -3).to(device)
    given |= dict(block_indices=wide[..., 0], block_size=case.block_size, causal=case.causal)
    if case.q_offset == "own":
        given["q_offset"] = torch.tensor(case.offsets, dtype=torch.int32).to(device)
    elif case.q_offset != "end":
        given["q_offset"] = case.q_offset
    if case.packed:
        given |= dict(cu_seqlens=starts_of(of_q), cu_seqlens_k=starts_of(of_k))
    return given, normal(sum(of_q), Hq, Dv)


def called(given: dict[str, Any], do: Tensor, backend: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    leaves = {name: given[name].detach().to(dtype or do.dtype).requires_grad_() for name in "qkv"}
    o, lse = selected_attention(**given | leaves, backend=backend, return_lse=True)
    assert not lse.requires_grad
    grads = torch.autograd.grad(o, list(leaves.values()), do.to(o.dtype))
    return dict(zip(("o", "lse", "dq", "dk", "dv"), (o.detach(), lse, *grads), strict=True))


def assert_right(case: Case, backend: str = "cute", device: str = "cuda") -> None:
    """Twice the error of the reference in the same dtype at most, and the same bits twice."""
    given, do = drawn(case, device)
    exact, rough = called(given, do, "reference", torch.float64), called(given, do, "reference")
    got = called(given, do, backend)
    assert got["lse"].isneginf().equal(exact["lse"].isneginf()), f"{case}: lse"
    for name, x in got.items():
        assert x.isfinite().all() or name == "lse", f"{case}: {name}"
        truth = exact[name].nan_to_num(neginf=0)
        error, allowed = ((y.double().nan_to_num(neginf=0) - truth).abs().max() for y in (x, rough[name]))
        least = 4 * torch.finfo(x.dtype if name == "lse" else case.dtype).eps * truth.abs().max()
        assert error <= 2 * allowed + least, f"{case}: {name} errs by {error}, the reference by {allowed}"
    for name, x in called(given, do, backend).items():
        assert x.equal(got[name]), f"{case}: other bits of {name}"


FP64 = Case(((21, 50),), G=2, D=8, Dv=6, n=3, block_size=8, dtype=torch.float64)
MIDDLE = ((5, 20), (0, 3), (30, 30), (1, 9))
ONE_EACH = dict(q_tile=1), dict(q_tile=1, by_head=True)
LISTED = [*ONE_EACH, dict(q_tile=8), dict(q_tile=64, by_head=True), dict(q_tile=2)]


def by_hand(q: Tensor, k: Tensor, v: Tensor, lists: Tensor, first: int, case: Case) -> tuple[Tensor, Tensor]:
    """o [T, Hq, Dv] and the LSE [T, Hq] of one sequence, query by query."""
    o, lse = torch.zeros(*q.shape[:2], v.shape[-1], dtype=q.dtype), torch.full(q.shape[:2], -math.inf, dtype=q.dtype)
    for t in range(len(q)):
        for h in range(q.shape[1]):
            own = set(lists[t // case.q_tile, h * lists.shape[1] // q.shape[1]].tolist()) - {-1}
            seen = [s for s in range(len(k)) if s // case.block_size in own and (s <= first + t or not case.causal)]
            if seen:
                kv = h * k.shape[1] // q.shape[1]
                s = k[seen, kv] @ q[t, h] * 8**-0.5
                lse[t, h], o[t, h] = s.logsumexp(0), s.softmax(0) @ v[seen, kv]
    return o, lse


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("listed", LISTED, ids=str)
def test_by_hand(backend: str, causal: bool, listed: dict) -> None:
    """Queries in the middle and at the end of longer contexts, with lists for tiles and for query heads."""
    for where in (dict(), dict(q_offset=11), dict(q_offset="own"), dict(lengths=MIDDLE), dict(lengths=((9, 9),))):
        case = replace(FP64, causal=causal, **listed, **where)
        given, do = drawn(case)
        got, (of_q, of_k) = called(given, do, backend), zip(*case.lengths)
        tiles = [-(-T // case.q_tile) for T in of_q]
        parts = {"q": of_q, "k": of_k, "v": of_k, "block_indices": tiles}
        each = (given[name].split(list(n)) if case.packed else given[name].unbind() for name, n in parts.items())
        found = [by_hand(*own, first, case) for *own, first in zip(*each, case.offsets)]
        o, lse = (torch.cat(x) if case.packed else torch.stack(x) for x in zip(*found))
        torch.testing.assert_close((got["o"], got["lse"]), (o, lse.mT))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [((70, 90),), ((5, 20), (0, 3), (30, 30), (1, 9))], ids=["batch", "packed"])
@pytest.mark.parametrize("listed", ONE_EACH, ids=str)
def test_eager_is_the_reference(causal: bool, lengths: tuple[tuple[int, int], ...], listed: dict) -> None:
    case = replace(FP64, lengths=lengths, causal=causal, n=5, **listed)
    for dtype in (torch.float32, torch.bfloat16):
        assert_right(replace(case, dtype=dtype), "eager", "cpu")
    given, do = drawn(case)
    torch.testing.assert_close(called(given, do, "eager"), called(given, do, "reference"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("by_head", [False, True])
def test_eager_on_a_gpu(by_head: bool, dtype: torch.dtype) -> None:
    case = Case(((700, 1000),), D=8, Dv=6, by_head=by_head, q_offset="own", dtype=dtype)
    assert_right(case, "eager")


def test_the_number_of_lists_tells_the_tile_of_packed_sequences() -> None:
    """The number of lists tells their tile for any lengths, or lengths are looked at."""
    told, generator = 0, torch.Generator().manual_seed(0)
    for sequences, most in ((1, 2000), (3, 300), (40, 90)):
        for tile in TILES:
            lengths = [*torch.randint(0, most, (sequences,), generator=generator).tolist(), 1]
            lists = torch.zeros(sum(-(-T // tile) for T in lengths), 2, 3, dtype=torch.int32)
            want = selected._tile_of(lists, lengths, packed=True)
            got = selected._tile_of_any(lists, sum(lengths), len(lengths))
            assert got in (want, None), (lengths, tile)
            told += got is not None
    assert told >= len(TILES), "whole sequences are much longer than tiles"


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_keys(backend: str) -> None:
    given, _ = drawn(replace(FP64, lengths=((9, 9),)))
    given["block_indices"] = torch.tensor([-1] * 4 + [1] * 5).int()[None, :, None, None].expand(2, 9, 2, 1)
    got = called(given, torch.ones(2, 9, 4, 6).double(), backend)  # block 1 starts at token 8, and is seen from there
    assert (
        not got["o"][:, :8].any() and (got["lse"][..., :8] == -math.inf).all() and got["lse"][..., 8].isfinite().all()
    )
    assert not any(got[name].any() for name in ("dq", "dk")) and not got["dv"][:, :8].any() and got["dv"][:, 8].all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("config", [SMALL, SMALL.replace(q_tile=16), NSAConfig.seed(block_size=8, q_tile=8)], ids=str)
@pytest.mark.parametrize("lengths", [None, (33, 0, 1, 66)])
def test_the_selected_branch_of_nsa(backend: str, config: NSAConfig, lengths: tuple[int, ...] | None) -> None:
    """Nothing is forced; the lists are those of `Aux` again, for each query head too, and give a choice's own bits."""
    case = cases.Case(B=2, T=100, D=8, dtype=torch.float64, config=config, lengths=lengths, gate="slc")
    inputs = make_inputs(case)
    chosen = run(backend, inputs)
    for lists in (chosen.aux.block_indices, torch.cat([chosen.aux.block_indices.flip(-1)] * 2, -2)[..., :4, :3]):
        got = run(backend, inputs, block_indices=lists)
        assert torch.equal(got.aux.block_indices, lists)
        alone = dict(block_indices=lists, block_size=8, backend=backend, cu_seqlens=inputs.cu_seqlens, return_lse=True)
        o, lse = selected_attention(inputs.q, inputs.k, inputs.v, **alone)
        torch.testing.assert_close((got.o, got.aux.lse_slc), (o, lse))
        if backend == "eager" and config.by_token:
            assert got.o.equal(o) and got.aux.lse_slc.equal(lse)
        if lists is chosen.aux.block_indices:
            assert all(x.equal(chosen.tensors()[name]) for name, x in got.tensors().items())


@pytest.mark.parametrize("arch", support.ARCHITECTURES)
@pytest.mark.parametrize("backend", [None, "cute"])
def test_lists_that_the_kernels_do_not_take(arch: int, backend: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused by `nsa` and by `selected_attention`, before anything is computed."""
    monkeypatch.setattr(support, "device_arch", lambda index=None: arch)
    with FakeTensorMode():
        q, k = (torch.empty(1, 128, H, 64, dtype=torch.bfloat16, device="cuda") for H in (4, 2))
        lists = torch.empty(1, 128, 2, 3, dtype=torch.int32, device="cuda")
        of_nsa = dict(block_indices=lists, config=NSAConfig(block_size=8, q_tile=1))
        for call, options in ((nsa, of_nsa), (selected_attention, dict(block_indices=lists, block_size=8))):
            with pytest.raises(NotImplementedError, match=f"sm_{arch}: the kernels do not support block_size below"):
                call(q, k, k, **options, backend=backend)


def test_second_derivatives_are_refused() -> None:
    given, _ = drawn(FP64)
    given["q"].requires_grad_()
    (dq,) = torch.autograd.grad(selected_attention(**given).sum(), given["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        dq.sum().backward()


PACK = ((100, 100), (0, 70), (129, 500), (1, 1), (64, 64), (260, 1000))
STATIC = [
    Case(G=16, q_offset="own"),
    Case(G=4, by_head=True, q_offset="own"),
    Case(G=1, q_tile=16, block_size=128, D=64, dtype=torch.float16, causal=False),
    Case(G=3, q_tile=32, q_offset="own"),
    Case(G=8, q_tile=256, block_size=192, q_offset=7),
    Case(G=2, by_head=True, q_tile=4, D=64),
    Case(G=4, n=9, block_size=16),
]
TOKENS = (1, 63, 64, 65, 127, 128, 129, 1000)
LONG = [Case(((T, T + 77),), G=G, Hkv=1, n=16, q_offset="own") for T, G in ((4096, 16), (8193, 2))]


@pytest.mark.gpu
@pytest.mark.parametrize("static", STATIC, ids=str)
def test_kernels(static: Case) -> None:
    more = 0 if static.q_offset == "end" else 90
    for T in TOKENS:
        assert_right(replace(static, lengths=((T, T + more),), seed=T))
    assert_right(replace(static, lengths=((200, 1000),)))
    # With an offset of 7 the last queries are behind the last key.
    assert_right(replace(static, lengths=((300, 300),) if static.q_offset == 7 else PACK))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [replace(STATIC[0], lengths=((200, 330),)), replace(STATIC[1], lengths=PACK)], ids=str)
def test_kernels_as_blackwell_has_them(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_attn.cute.multiply import form

    monkeypatch.setattr(form, "FORCED", True)
    assert_right(case)


@pytest.mark.gpu
@pytest.mark.sweep
@pytest.mark.parametrize("case", LONG, ids=str)
def test_kernels_at_length(case: Case) -> None:
    assert_right(case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [replace(STATIC[i], lengths=PACK) for i in (1, 3)], ids=str)
def test_capture(case: Case) -> None:
    """A graph replays the call for other numbers; nothing waits for the GPU."""
    given, do = drawn(case, "cuda")
    called(given, do, "cute")
    with no_waits():
        called(given, do, "cute")
    graph, got = capture(lambda: called(given, do, "cute"), warm_ups=3)
    other, _ = drawn(replace(case, seed=1), "cuda")
    for name in ("q", "k", "v", "block_indices", "q_offset"):
        given[name].copy_(other[name])
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    for name, x in called(given, do, "cute").items():
        assert x.equal(got[name]), name


@pytest.mark.gpu
def test_later_tokens_change_no_bit() -> None:
    case = replace(STATIC[0], lengths=((700, 900),))
    (given, do), (other, _) = (drawn(replace(case, seed=seed), "cuda") for seed in (0, 1))
    o = called(given, do, "cute")["o"]
    for t in (100, 517, 698):
        changed = dict(given)
        for name in ("q", "block_indices"):
            changed[name] = torch.cat([given[name][:, : t + 1], other[name][:, t + 1 :]], 1)
        for b, first in enumerate(case.offsets):
            for name in "kv":
                x = torch.cat([given[name][b, : first + t + 1], 8 * other[name][b, first + t + 1 :]])
                again = selected_attention(**changed | {name: torch.stack([x, x])}, backend="cute")
                assert o[b, : t + 1].equal(again[b, : t + 1]), (t, b, name)


@pytest.mark.gpu
@pytest.mark.parametrize("by_head, q_tile", [(False, 64), (True, 256)])
def test_the_selected_branch_of_nsa_on_the_kernels(by_head: bool, q_tile: int) -> None:
    """It is `selected_attention`, bit for bit."""
    given, do = drawn(Case(by_head=by_head, q_tile=q_tile), "cuda")
    alone = called(given, do, "cute")
    gates = torch.tensor([0.0, 1.0, 0.0], device="cuda").repeat(2, 300, 8, 1)
    leaves = [given[name].detach().requires_grad_() for name in "qkv"]
    options = dict(config=NSAConfig(q_tile=q_tile), gates=gates, block_indices=given["block_indices"])
    for memory in (MemoryPolicy(), MemoryPolicy(budget=0)):  # all heads at once, and in groups
        o = nsa(*leaves, **options, memory=memory, backend="cute")
        assert o.equal(alone["o"])
        for x, name in zip(torch.autograd.grad(o, leaves, do), ("dq", "dk", "dv"), strict=True):
            torch.testing.assert_close(x, alone[name], rtol=2**-7, atol=2**-7)


@pytest.fixture
def stubbed() -> Iterator[None]:
    with stubbed_layer():
        LAUNCHED.clear()
        yield


KERNELS = [
    "union_lists",
    "_flash_attn_fwd",
    *("union_lists", "_compiled", "token_pairs", "chunk_sums", "row_starts", "token_pairs", "_compiled"),
]


@pytest.mark.parametrize("case", [STATIC[0], STATIC[1], replace(STATIC[3], lengths=PACK)], ids=str)
def test_kernels_are_launched(case: Case, stubbed: None) -> None:
    """Their arguments have the shapes that they are compiled for."""
    given, do = drawn(case)
    got = called(given, do, "cute")
    assert [name for (name, *_), _ in LAUNCHED] == KERNELS
    assert [got[name].shape for name in ("dq", "dk", "dv")] == [given[name].shape for name in "qkv"]


@pytest.mark.parametrize("Hs", [2, 8])
@pytest.mark.parametrize("q_tile", [1, 32, 256])
@pytest.mark.parametrize("memory, groups", [(MemoryPolicy(), 1), (MemoryPolicy(budget=0), 2)], ids=["whole", "groups"])
def test_the_layer_takes_lists(Hs: int, q_tile: int, memory: MemoryPolicy, groups: int, stubbed: None) -> None:
    """All heads at once, and in groups of one key/value head."""
    config = NSAConfig(block_size=64, q_tile=q_tile)
    q, k = (torch.randn(1, 300, H, 64, dtype=torch.bfloat16, requires_grad=True) for H in (8, 2))
    given = dict(config=config, block_indices=torch.zeros(1, config.num_tiles(300), Hs, 5, dtype=torch.int32))
    o, aux = nsa(q, k, k, **given, memory=memory, backend="cute", return_aux=True)
    o.sum().backward()
    names = [name for (name, *_), _ in LAUNCHED]
    assert aux.block_indices.shape == given["block_indices"].shape
    assert names.count("token_pairs") == 2 * groups and names.count("union_lists") >= 2 * groups
