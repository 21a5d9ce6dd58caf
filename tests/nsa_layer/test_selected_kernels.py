"""`selected_attention` on the kernels: lists of any kind against the reference, captures, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from stub_kernels import LAUNCHED, stubbed_layer

from nsa_layer import MemoryPolicy, NSAConfig, nsa, selected_attention
from nsa_tools.testing.pasteable import Pasteable

Tensor = torch.Tensor


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


def drawn(case: Case, device: str) -> tuple[dict[str, Any], Tensor]:
    """The arguments of a call, and do. Lists have no stride of 1; every seventh is empty."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(tokens: int, heads: int) -> Tensor:
        lead = (tokens,) if case.packed else (2, tokens)
        return torch.randn(*lead, heads, case.D, generator=generator).to(device, case.dtype)

    def starts(counts: list[int]) -> Tensor:
        return torch.tensor([*accumulate(counts, initial=0)], dtype=torch.int32)

    of_q, of_k = ([pair[side] for pair in case.lengths] for side in (0, 1))
    Hq = case.G * case.Hkv
    given: dict[str, Any] = dict(q=normal(sum(of_q), Hq), k=normal(sum(of_k), case.Hkv), v=normal(sum(of_k), case.Hkv))
    lists, offsets = [], []
    for i, (T, S) in enumerate(case.sequences):
        shape = (-(-T // case.q_tile), Hq if case.by_head else case.Hkv, case.n)
        blocks = torch.randint(-1, -(-S // case.block_size), shape, generator=generator)
        blocks[::7] = -1
        lists.append(blocks.int())
        offsets.append((S - T) * i // len(case.sequences))
    together = torch.cat(lists) if case.packed else torch.stack(lists)
    wide = torch.stack([together, together], dim=-1).transpose(-2, -3).contiguous().transpose(-2, -3).to(device)
    given |= dict(block_indices=wide[..., 0], block_size=case.block_size, causal=case.causal)
    if case.q_offset == "own":
        given["q_offset"] = torch.tensor(offsets, dtype=torch.int32).to(device)
    elif case.q_offset != "end":
        given["q_offset"] = case.q_offset
    if case.packed:
        given |= dict(cu_seqlens=starts(of_q), cu_seqlens_k=starts(of_k))
    return given, torch.randn(given["q"].shape, generator=generator).to(device, case.dtype)


def called(given: dict[str, Any], do: Tensor, backend: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    leaves = {name: given[name].detach().to(dtype or do.dtype).requires_grad_() for name in "qkv"}
    o, lse = selected_attention(**given | leaves, backend=backend, return_lse=True)
    grads = torch.autograd.grad(o, list(leaves.values()), do.to(o.dtype))
    return dict(zip(("o", "lse", "dq", "dk", "dv"), (o.detach(), lse, *grads), strict=True))


def assert_right(case: Case) -> None:
    """Twice the error of the reference in the same dtype at most, and the same bits twice."""
    given, do = drawn(case, "cuda")
    exact, rough = called(given, do, "reference", torch.float64), called(given, do, "reference")
    got = called(given, do, "cute")
    assert got["lse"].isneginf().equal(exact["lse"].isneginf()), f"{case}: lse"
    for name, x in got.items():
        truth = exact[name].nan_to_num(neginf=0)
        error, allowed = ((y.double().nan_to_num(neginf=0) - truth).abs().max() for y in (x, rough[name]))
        least = 4 * torch.finfo(torch.float32 if name == "lse" else case.dtype).eps * truth.abs().max()
        assert x.isfinite().all() or name == "lse", f"{case}: {name}"
        assert error <= 2 * allowed + least, f"{case}: {name} errs by {error}, the reference by {allowed}"
    for name, x in called(given, do, "cute").items():
        assert x.equal(got[name]), f"{case}: other bits of {name}"


@pytest.mark.gpu
@pytest.mark.parametrize("static", STATIC, ids=str)
def test_numbers(static: Case) -> None:
    more = 0 if static.q_offset == "end" else 90
    for T in TOKENS:
        assert_right(replace(static, lengths=((T, T + more),), seed=T))
    assert_right(replace(static, lengths=((200, 1000),)))
    if static.q_offset == 7:  # the last queries are behind the last key
        assert_right(replace(static, lengths=((300, 300),)))


@pytest.mark.gpu
@pytest.mark.parametrize("static", [case for case in STATIC if case.q_offset != 7], ids=str)
def test_packed_numbers(static: Case) -> None:
    assert_right(replace(static, lengths=PACK))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [replace(STATIC[0], lengths=((200, 330),)), replace(STATIC[1], lengths=PACK)], ids=str)
def test_numbers_as_blackwell_has_them(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_attn.cute.multiply import form

    monkeypatch.setattr(form, "FORCED", True)
    assert_right(case)


@pytest.mark.gpu
@pytest.mark.sweep
@pytest.mark.parametrize("case", LONG, ids=str)
def test_long_numbers(case: Case) -> None:
    assert_right(case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [replace(STATIC[i], lengths=PACK) for i in (1, 3)], ids=str)
def test_capture(case: Case) -> None:
    """A graph replays the call for other numbers; nothing waits for the GPU."""
    given, do = drawn(case, "cuda")
    called(given, do, "cute")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda.set_sync_debug_mode("error")
        try:
            called(given, do, "cute")
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            got = called(given, do, "cute")
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
    given, do = drawn(case, "cuda")
    o = called(given, do, "cute")["o"]
    other, _ = drawn(replace(case, seed=1), "cuda")
    for t in (100, 517, 698):
        changed = dict(given)
        for name in ("q", "block_indices"):
            changed[name] = torch.cat([given[name][:, : t + 1], other[name][:, t + 1 :]], 1)
        for b, first in enumerate(given["q_offset"].tolist()):
            for name in "kv":
                x = torch.cat([given[name][b, : first + t + 1], 8 * other[name][b, first + t + 1 :]])
                again = selected_attention(**changed | {name: torch.stack([x, x])}, backend="cute")
                assert o[b, : t + 1].equal(again[b, : t + 1]), (t, b, name)


@pytest.fixture
def stubbed() -> Iterator[None]:
    with stubbed_layer():
        yield


KERNELS = [
    "union_lists",
    "_flash_attn_fwd",
    *("union_lists", "_compiled", "token_pairs", "chunk_sums", "row_starts", "token_pairs", "_compiled"),
]


@pytest.mark.parametrize("case", [STATIC[0], STATIC[1], replace(STATIC[3], lengths=PACK)], ids=str)
def test_kernels_are_launched(case: Case, stubbed: None) -> None:
    """Their arguments have the shapes that they are compiled for."""
    given, do = drawn(case, "cpu")
    LAUNCHED.clear()
    got = called(given, do, "cute")
    assert [name for (name, *_), _ in LAUNCHED] == KERNELS
    assert [got[name].shape for name in ("dq", "dk", "dv")] == [given[name].shape for name in "qkv"]


@pytest.mark.parametrize("Hs", [2, 8])
@pytest.mark.parametrize("q_tile", [1, 32, 256])
def test_the_layer_takes_lists(Hs: int, q_tile: int, stubbed: None) -> None:
    """All heads at once, and in groups of one key/value head."""
    config = NSAConfig(block_size=64, q_tile=q_tile)
    q, k = (torch.randn(1, 300, H, 64, dtype=torch.bfloat16, requires_grad=True) for H in (8, 2))
    lists = torch.zeros(1, config.num_tiles(300), Hs, 5, dtype=torch.int32)
    for memory, groups in ((MemoryPolicy(), 1), (MemoryPolicy(budget=0), 2)):
        LAUNCHED.clear()
        given = dict(config=config, block_indices=lists, memory=memory)
        o, aux = nsa(q, k, k, **given, backend="cute", return_aux=True)
        o.sum().backward()
        names = [name for (name, *_), _ in LAUNCHED]
        assert aux.block_indices.shape == lists.shape
        assert names.count("token_pairs") == 2 * groups and names.count("union_lists") >= 2 * groups


@pytest.mark.gpu
@pytest.mark.parametrize("Hs, q_tile", [(2, 64), (8, 256)])
def test_lists_of_the_layer(Hs: int, q_tile: int) -> None:
    """The selected branch of `nsa` is `selected_attention`, bit for bit."""
    case = replace(STATIC[0], G=4, lengths=((300, 300),), by_head=Hs == 8, q_tile=q_tile, q_offset="end")
    given, do = drawn(case, "cuda")
    alone = called(given, do, "cute")
    gates = torch.zeros(2, 300, 8, 3, device="cuda")
    gates[..., 1] = 1
    leaves = [given[name].detach().requires_grad_() for name in "qkv"]
    options = dict(config=NSAConfig(q_tile=q_tile), gates=gates, block_indices=given["block_indices"])
    o = nsa(*leaves, **options, backend="cute")
    assert o.equal(alone["o"])
    for x, name in zip(torch.autograd.grad(o, leaves, do), ("dq", "dk", "dv"), strict=True):
        torch.testing.assert_close(x, alone[name], rtol=2**-7, atol=2**-7)
