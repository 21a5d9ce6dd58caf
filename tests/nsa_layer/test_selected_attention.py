"""Lists of the caller's own: in `nsa` in place of a choice, and in `selected_attention` alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from layer_calls import no_waits
from stub_kernels import LAUNCHED, stubbed_layer

from fuzz.oracle import dense
from nsa_layer import MemoryPolicy, NSAConfig, nsa, selected_attention
from nsa_layer.call import Call
from nsa_layer.checks import Q_TILES, check_selected, starts_of_lengths, tile_of_lists, tile_of_packed_lists
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
        given |= dict(cu_seqlens=starts_of_lengths(of_q), cu_seqlens_k=starts_of_lengths(of_k))
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


def seen(case: Case, lists: Tensor, b: int) -> Tensor:
    """The keys that each query of a sequence sees, bool [Hq, T, S]; lists: of the sequence's tiles."""
    T, S = case.sequences[b]
    listed = (lists[..., None] == torch.arange(S) // case.block_size).any(-2)
    listed = listed.movedim(1, 0).repeat_interleave(case.q_tile, 1)[:, :T]
    listed = listed.repeat_interleave(case.G * case.Hkv // len(listed), 0)
    return listed & (torch.arange(S) <= case.offsets[b] + torch.arange(T)[:, None]) if case.causal else listed


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("listed", LISTED, ids=str)
def test_dense_attention_under_its_mask(backend: str, causal: bool, listed: dict) -> None:
    """Queries in the middle and at the end of longer contexts, with lists for tiles and for query heads; some are
    empty, and their rows and gradients 0."""
    for where in (dict(), dict(q_offset=11), dict(q_offset="own"), dict(lengths=MIDDLE), dict(lengths=((9, 9),))):
        case = replace(FP64, causal=causal, **listed, **where)
        given, do = drawn(case)
        tiles = [-(-T // case.q_tile) for T, _ in case.lengths]
        lists = given["block_indices"].split(tiles) if case.packed else given["block_indices"]
        masks = [seen(case, own, b) for b, own in enumerate(lists)]
        lengths = case.lengths if case.packed else None
        want = dense([given[name] for name in "qkv"], do, masks.__getitem__, torch.float64, lengths=lengths)
        torch.testing.assert_close(called(given, do, backend), want)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [((70, 90),), MIDDLE], ids=["batch", "packed"])
@pytest.mark.parametrize("listed", ONE_EACH, ids=str)
def test_eager(causal: bool, lengths: tuple[tuple[int, int], ...], listed: dict) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert_right(replace(FP64, lengths=lengths, causal=causal, n=5, dtype=dtype, **listed), "eager", "cpu")


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
        for tile in Q_TILES:
            lengths = [*torch.randint(0, most, (sequences,), generator=generator).tolist(), 1]
            count = sum(-(-T // tile) for T in lengths)
            got = tile_of_packed_lists(count, sum(lengths), len(lengths))
            assert got in (tile_of_lists(count, lengths), None), (lengths, tile)
            told += got is not None
    assert told >= len(Q_TILES), "whole sequences are much longer than tiles"


@pytest.mark.parametrize("lists, tile", [(12, 1), (6, 4)])  # of queries, or of tiles that the lengths tell
def test_starts_are_read_once(lists: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at those on a GPU waits for it."""
    looks, look = [], Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda x: looks.append(x) or look(x))
    q, k, starts = torch.zeros(12, 2, 8), torch.zeros(12, 1, 8), starts_of_lengths((1, 1, 1, 1, 8))
    call = Call(q, k, k, cu_seqlens=starts, block_indices=torch.zeros(lists, 1, 1, dtype=torch.int32))
    static = dict(block_size=8, softmax_scale=None, causal=True, deterministic=False)
    assert check_selected(call, **static).config.q_tile == tile and len(looks) == 1


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


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_a_call_of_nsa_with_that_branch_alone(backend: str) -> None:
    """Tiles need not fit blocks where nothing is chosen by them."""
    given, _ = drawn(Case(((50, 50),), q_tile=16, block_size=24, n=2, D=8, dtype=torch.float64))
    config = NSAConfig(branches=("selected",), block_size=given.pop("block_size"), q_tile=16)
    o, aux = nsa(**given, config=config, backend=backend, return_aux=True)
    alone = selected_attention(**given, block_size=24, backend=backend, return_lse=True)
    assert o.equal(alone[0]) and aux.lse_slc.equal(alone[1])
    with pytest.raises(ValueError, match="q_tile must be a multiple or a divisor of block_size"):
        config.replace(branches=("compressed", "selected"))


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
    from flash_attn.cute.mma import form

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


KERNELS = [
    "union_lists",
    "_flash_attn_fwd",
    *("union_lists", "_compiled", "token_pairs", "chunk_sums", "row_starts", "token_pairs", "_compiled"),
]


@pytest.mark.parametrize("case", [STATIC[0], STATIC[1], replace(STATIC[3], lengths=PACK)], ids=str)
def test_kernels_are_launched_once(case: Case) -> None:
    given, do = drawn(case)
    with stubbed_layer():
        LAUNCHED.clear()
        called(given, do, "cute")
    assert [name for (name, *_), _ in LAUNCHED] == KERNELS
