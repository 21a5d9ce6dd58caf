"""The choice of blocks by token compiles for Hopper everywhere, and chooses what its definition in fp64 does."""

# What runs in a worker is imported there, so nothing up here may ask for the kernels.
from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, product

import pytest
import torch
from fa_compile import Worker, shared_worker

from nsa_layer import NSAConfig
from nsa_tools.testing.choices import forced_blocks

SMALL = NSAConfig(q_tile=1, block_size=8, block_counts=7, window_size=8)
OVERLAPPING = SMALL.replace(compress_size=16, compress_stride=4)
PAPER = NSAConfig(q_tile=1, compress_size=32, compress_stride=16, block_size=64)

Tensor = torch.Tensor
Stretches = list[tuple[int, int]]  # (first, end) of some queries of each sequence


@dataclass(frozen=True)
class Case:
    """A call, its tensors drawn from the seed."""

    T: int = 300
    B: int = 1
    Hkv: int = 2
    G: int = 4
    D: int = 64
    dtype: torch.dtype = torch.bfloat16
    causal: bool = True
    config: NSAConfig = SMALL
    lengths: tuple[int, ...] | None = None
    integers: bool = False
    scale: float = 0.3
    seed: int = 0

    def tensors(self, device: str = "cuda") -> list[tuple[Tensor, Tensor, Tensor]]:
        """q, k_cmp and the log-sum-exp of each sequence: [L, Hq, D], [Tc, Hkv, D], [Hq, L]."""
        generator, found = torch.Generator(device).manual_seed(self.seed), []
        for L in self.lengths or (self.T,) * self.B:
            q, k = (
                torch.randint(-2, 3, (n, H, self.D), generator=generator, device=device).to(self.dtype)
                if self.integers
                else torch.randn(n, H, self.D, generator=generator, device=device).to(self.dtype)
                for n, H in ((L, self.Hkv * self.G), (self.config.compressed_length(L), self.Hkv))
            )
            found.append((q, k, log_sum_exp(q, k, self)))
        return found

    def joined(self, sequences: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, ...]:
        if self.lengths is None:
            return tuple(torch.stack(x) for x in zip(*sequences))
        q, k, lse = zip(*sequences)
        return torch.cat(q), torch.cat(k), torch.cat(lse, dim=1)

    def rounding(self, q: Tensor, k: Tensor) -> float:
        """The relative error that rounding may make in an importance."""
        size = self.scale * q.float().norm(dim=-1).max() * (k.float().norm(dim=-1).max() if len(k) else 0)
        return 16 * torch.finfo(torch.float32).eps * (1 + float(size))


def scores_of(q: Tensor, k: Tensor, case: Case) -> Tensor:
    """Scaled scores in fp64, [Hkv, G, L, Tc], -inf where the key is not visible."""
    q = q.double().unflatten(1, (case.Hkv, case.G))
    scores = torch.einsum("thgd,jhd->hgtj", q, k.double()) * case.scale
    if case.causal:
        t, j = torch.arange(len(q), device=q.device)[:, None], torch.arange(len(k), device=q.device)
        scores = scores.masked_fill(j * case.config.stride + case.config.offset > t, -torch.inf)
    return scores


def log_sum_exp(q: Tensor, k: Tensor, case: Case) -> Tensor:
    return scores_of(q, k, case).logsumexp(-1).flatten(0, 1).float()


def importances(q: Tensor, k: Tensor, lse: Tensor, case: Case) -> Tensor:
    """Importances of all blocks in fp64: [L, Hkv, blocks]."""
    config, L = case.config, len(q)
    scores = scores_of(q, k, case)
    p = torch.where(scores > -torch.inf, (scores - lse.double().unflatten(0, scores.shape[:2])[..., None]).exp(), 0)
    p = p.sum(1).transpose(0, 1)
    block = torch.arange(config.num_blocks(L), device=q.device)[:, None] * config.block_size
    key = torch.arange(len(k), device=q.device) * config.stride
    overlap = torch.minimum(key + config.span, block + config.block_size) - torch.maximum(key, block)
    return p @ (overlap.clamp(min=0) // config.stride).double().T


def exact_lists(q: Tensor, k: Tensor, lse: Tensor, case: Case, width: int) -> tuple[Tensor, Tensor]:
    """(lists [L, Hkv, n], importances [L, Hkv, blocks], those of forced blocks inf, of no candidates -inf)."""
    config, L = case.config, len(q)
    padded, n, blocks = importances(q, k, lse, case), config.block_counts, config.num_blocks(L)
    if not case.causal:
        padded[..., L // config.block_size :] = -torch.inf
    t, block = torch.arange(L, device=q.device)[:, None], torch.arange(blocks, device=q.device)
    if case.causal:
        end = block * config.block_size if config.chooses_own else (block + 1) * config.block_size - 1
        padded.masked_fill_((end > t)[:, None], -torch.inf)
    forced = torch.zeros(blocks, blocks, dtype=torch.bool)
    for own, row in enumerate(forced):
        row[forced_blocks(range(own, own + 1), blocks, config, causal=case.causal)] = True
    padded.masked_fill_(forced.to(q.device)[t[:, 0] // config.block_size][:, None], torch.inf)
    value, order = padded.sort(dim=-1, descending=True, stable=True)
    taken = (value > -torch.inf) & (torch.arange(blocks, device=q.device) < n)
    lists = torch.where(taken, order, blocks).sort(-1).values[..., :width]
    return lists.masked_fill(lists == blocks, -1).int(), padded


def assert_lists(case: Case, got: Tensor, sequences: list[tuple[Tensor, ...]]) -> None:
    """The lists are exact ones but for blocks whose importance is within rounding of the last one's that is in."""
    config = case.config
    width = config.list_width(max(case.lengths or (case.T,)))
    parts = got.split(case.lengths) if case.lengths else got
    assert got.dtype == torch.int32 and got.shape[-1] == width, f"{got.shape}: {case!r}"
    for number, ((q, k, lse), given) in enumerate(zip(sequences, parts)):
        if not len(q):
            continue
        exact, value = exact_lists(q, k, lse, case, width)
        exact = torch.nn.functional.pad(exact, (0, width - exact.shape[-1]), value=-1)
        assert given.shape == exact.shape, f"{given.shape} for {exact.shape}: {case!r}"
        wrong = given != exact
        if not wrong.any():
            continue
        assert torch.equal((given >= 0).sum(-1), (exact >= 0).sum(-1)), f"lengths, sequence {number}: {case!r}"
        later, earlier = given[..., 1:], given[..., :-1]
        assert ((later > earlier) | (later < 0)).all(), f"order, sequence {number}: {case!r}"
        assert (given < value.shape[-1]).all(), f"range, sequence {number}: {case!r}"
        blocks = torch.arange(value.shape[-1] + 1, device=q.device)
        is_in, should = (torch.zeros(*value.shape[:2], len(blocks), dtype=torch.bool, device=q.device) for _ in "ab")
        is_in.scatter_(2, torch.where(given < 0, len(blocks) - 1, given).long(), True)
        should.scatter_(2, torch.where(exact < 0, len(blocks) - 1, exact).long(), True)
        differ = (is_in != should)[..., :-1]
        last = torch.where(should[..., :-1], value, torch.inf).amin(-1, keepdim=True)
        allowed = case.rounding(q, k) * last + 1e-30
        bad = differ & ~((value - last).abs() <= allowed)
        assert not bad.any(), (
            f"{int(bad.any(-1).sum())} lists of {bad[..., 0].numel()} differ in sequence {number}, first at (token, "
            f"head) {(at := tuple(bad.any(-1).nonzero()[0].tolist()))}: got {given[at].tolist()}, expected "
            f"{exact[at].tolist()}, by {((value - last).abs() / last)[bad].max().item():.2e}: {case!r}"
        )
        assert not case.integers or case.G > 1, f"{int(differ.any(-1).sum())} lists differ: {case!r}"


def kernel_lists(case: Case, tensors: tuple[Tensor, ...]) -> Tensor:
    from nsa_layer.kernels.select_by_token.kernel import token_topk

    choice = dict(config=case.config, causal=case.causal, softmax_scale=case.scale)
    if case.lengths is not None:
        keys = map(case.config.compressed_length, case.lengths)
        for name, counts in (("cu_seqlens", case.lengths), ("cu_blocks", keys)):
            choice[name] = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=tensors[0].device)
        choice["lengths"] = case.lengths
    return token_topk(*tensors, **choice)


def stretch_lists(case: Case, tensors: tuple[Tensor, ...], stretches: Stretches) -> Tensor:
    """Lists of the queries ``first .. end - 1`` of each sequence, with all its keys."""
    from nsa_layer.kernels.select_by_token.kernel import token_topk

    (q, k, lse), device = tensors, tensors[0].device
    if case.lengths is None:
        q, lse = (
            torch.stack([x.narrow(dim, first, end - first) for x, (first, end) in zip(batch.unbind(), stretches)])
            for batch, dim in ((q, 0), (lse, 1))
        )
        where = dict(max_seqlen_k=case.T)
    else:
        q, lse = (
            torch.cat([x.narrow(dim, first, end - first) for x, (first, end) in zip(parts, stretches)], dim)
            for parts, dim in ((q.split(case.lengths), 0), (lse.split(case.lengths, dim=1), 1))
        )
        lengths = tuple(end - first for first, end in stretches)
        counts = dict(cu_seqlens=lengths, cu_blocks=map(case.config.compressed_length, case.lengths))
        counts["cu_seqlens_k"] = case.lengths
        where = {
            name: torch.tensor([0, *accumulate(x)], dtype=torch.int32, device=device) for name, x in counts.items()
        }
        where |= dict(lengths=lengths, max_seqlen_k=max(case.lengths))
    where["q_offset"] = torch.tensor([first for first, _ in stretches], dtype=torch.int32, device=device)
    return token_topk(q, k, lse, config=case.config, causal=case.causal, softmax_scale=case.scale, **where)


def trace_case(name: str) -> tuple[int, ...]:
    """For the architecture of a worker; the shape that comes back."""
    case = VARIANTS[name]
    q, k, lse = case.joined([fake(case, L) for L in case.lengths or (case.T,) * case.B])
    if name in STRETCHES:
        return tuple(stretch_lists(case, (q, k, lse), STRETCHES[name][0]).shape)
    return tuple(kernel_lists(case, (q, k, lse)).shape)


def fake(case: Case, L: int) -> tuple[Tensor, ...]:
    Hq, Tc = case.Hkv * case.G, case.config.compressed_length(L)
    shapes = ((L, Hq, case.D), (Tc, case.Hkv, case.D), (Hq, L))
    dtypes = (case.dtype, case.dtype, torch.float32)
    return tuple(torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in zip(shapes, dtypes))


VARIANTS = {
    "default": Case(T=1024, B=2),
    "128": Case(T=1024, D=128, dtype=torch.float16),
    "blocks of 64": Case(T=8193, D=128, config=NSAConfig(q_tile=1)),
    "paper": Case(T=4096, D=128, config=PAPER, G=16),
    "paper, two heads": Case(T=1000, D=64, config=PAPER, G=2, B=2),
    "blocks of two keys": Case(T=1000, config=SMALL.replace(compress_size=4)),
    "blocks of three keys": Case(T=1000, config=SMALL.replace(block_size=12, compress_size=12, compress_stride=4)),
    "keys of two blocks": Case(T=1000, config=SMALL.replace(compress_size=16, compress_stride=8)),
    "early keys": Case(T=1000, config=SMALL.replace(compress_offset=0)),
    "late keys": Case(T=1000, config=SMALL.replace(compress_offset=40)),
    "not causal": Case(T=1000, causal=False),
    "not causal, unforced": Case(T=1000, causal=False, config=SMALL.replace(init_blocks=0, local_blocks=0)),
    "paper, not causal": Case(T=2000, causal=False, config=PAPER),
    "unforced": Case(T=1000, config=SMALL.replace(init_blocks=0, local_blocks=0)),
    "unforced, overlapping": Case(T=1000, config=OVERLAPPING.replace(init_blocks=0, local_blocks=0)),
    "forced only": Case(T=300, config=SMALL.replace(block_counts=2)),
    "first and local": Case(T=1000, config=SMALL.replace(init_blocks=2, local_blocks=3, block_counts=9)),
    "first alone": Case(T=1000, config=OVERLAPPING.replace(init_blocks=3, local_blocks=0)),
    "local alone": Case(T=1000, config=SMALL.replace(init_blocks=0, local_blocks=4)),
    "too many forced": Case(T=300, config=SMALL.replace(init_blocks=4, local_blocks=5)),
    "first behind, not causal": Case(T=1000, causal=False, config=SMALL.replace(init_blocks=4, local_blocks=1)),
    "too many, not causal": Case(
        T=300, causal=False, config=SMALL.replace(init_blocks=4, local_blocks=3, block_counts=5)
    ),
    "packed, unforced": Case(
        lengths=(1024, 0, 1, 16, 0, 688, 2304), config=SMALL.replace(init_blocks=0, local_blocks=0)
    ),
    "paper, unforced": Case(T=4000, D=128, config=PAPER.replace(init_blocks=0, local_blocks=0), G=16),
    "paper, InfLLM's": Case(T=9000, D=128, config=PAPER.replace(local_blocks=8), G=16),
    "one candidate": Case(T=1000, config=SMALL.replace(block_counts=4)),
    "33 blocks": Case(T=1000, config=SMALL.replace(block_counts=33)),
    "64 blocks": Case(T=2000, config=SMALL.replace(block_counts=64), G=2),
    "64 blocks, one head": Case(T=2000, config=SMALL.replace(block_counts=64), G=1),
    "packed": Case(lengths=(1024, 0, 1, 16, 0, 688, *(16 * i for i in range(40)), 2304)),
    "packed, overlapping, three heads": Case(lengths=(0, 528, 32, 1040, 0, 7), G=3, config=OVERLAPPING),
    "packed, not causal": Case(lengths=(512, 16, 2048), causal=False),
    "wide scores": Case(T=2000, scale=3.0),
}  # fmt: skip
for G in (1, 2, 3, 5, 6, 7, 8, 12, 16, 32, 40, 64, 128):
    VARIANTS[f"{G} heads"] = Case(T=600, G=G, Hkv=2)

STRETCHES = {  # of variants
    "paper, two heads": [[(0, 417), (0, 417)], [(583, 1000), (311, 728)], [(999, 1000), (64, 65)]],
    "packed, overlapping, three heads": [
        [(0, 0), (0, 528), (0, 31), (0, 500), (0, 0), (0, 7)],
        [(0, 0), (5, 300), (31, 32), (500, 1039), (0, 0), (7, 7)],
    ],
    "paper, not causal": [[(0, 1000)], [(1000, 1999)], [(1999, 2000)]],
    "packed, not causal": [[(100, 512), (15, 16), (0, 2047)], [(0, 100), (0, 0), (2047, 2048)]],
    "keys of two blocks": [[(200, 300)]],
    "late keys": [[(7, 1000)]],
    "unforced": [[(130, 500)]],
    "first and local": [[(3, 700)], [(999, 1000)]],
}

TRACED = ["default", "paper", "paper, two heads", "packed, overlapping, three heads", "not causal", "40 heads"]
TRACED += ["unforced", "first alone", "local alone", "too many, not causal"]


@pytest.mark.parametrize("name", TRACED)
def test_kernels_are_traced(name: str, compiler: Worker) -> None:
    case = VARIANTS[name]
    width = case.config.list_width(max(case.lengths or (case.T,)))
    tokens = (sum(case.lengths),) if case.lengths else (case.B, case.T)
    if name in STRETCHES:
        sizes = [end - first for first, end in STRETCHES[name][0]]
        tokens = (sum(sizes),) if case.lengths else (case.B, sizes[0])
    assert compiler.trace(trace_case, name) == (*tokens, case.Hkv, width)


def stack_and_order(name: str) -> tuple[list[int], bool]:
    """Stack frames of a variant's kernel, and whether its products wait for one another; in a worker."""
    from fa_cubin import cubins, frames, serialized

    [code] = cubins(lambda: trace_case(name))
    return frames(code), serialized(code)


@pytest.mark.xdist_group("sm_90")
def test_registers_suffice() -> None:
    """For two warpgroups of 176 and 80 in each of two CTAs."""
    assert shared_worker("sm_90").run(stack_and_order, "blocks of 64") == ([0], False)


@pytest.mark.gpu
@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name: str) -> None:
    for seed, integers in ((0, False), (1, False), (2, True)):
        case = replace(VARIANTS[name], seed=seed, integers=integers)
        sequences = case.tensors()
        tensors = case.joined(sequences)
        got = kernel_lists(case, tensors)
        assert_lists(case, got, sequences)
        assert torch.equal(kernel_lists(case, tensors), got), f"other bits: {case!r}"


@pytest.mark.gpu
@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("G", [1, 4, 16])
@pytest.mark.parametrize("D, dtype", [(64, torch.float16), (128, torch.bfloat16)])
def test_lengths(G: int, D: int, dtype: torch.dtype) -> None:
    configs = (NSAConfig(q_tile=1), PAPER)
    for T, config, causal in product((1, 63, 64, 65, 127, 128, 129, 1000, 4096, 8193), configs, (True, False)):
        case = Case(T=T, G=G, D=D, dtype=dtype, config=config, causal=causal)
        sequences = case.tensors()
        assert_lists(case, kernel_lists(case, case.joined(sequences)), sequences)


@pytest.mark.gpu
@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize(
    "name", ["blocks of 64", "paper", "paper, two heads", "packed, overlapping, three heads", "1 heads"]
)
def test_products_by_warp(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As SM100 makes them: both forms choose alike."""
    from flash_attn.cute.multiply import form

    monkeypatch.setattr(form, "FORCED", True)
    test_variants(name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["default", "paper", "unforced", "early keys", "16 heads"])
def test_later_tokens_and_the_place_in_a_tile_change_nothing(name: str) -> None:
    """Lists of a prefix, bit for bit; the prefix ends anywhere in a tile."""
    case = VARIANTS[name]
    q, k, lse = case.joined(case.tensors())
    whole = kernel_lists(case, (q, k, lse))
    for T in (case.T - 1, case.T // 2 + 3, 77):
        Tc = case.config.compressed_length(T)
        part = kernel_lists(case, (q[:, :T], k[:, :Tc], lse[..., :T]))
        n = part.shape[-1]
        assert torch.equal(part, whole[:, :T, :, :n]) and (whole[:, :T, :, n:] < 0).all(), f"{T}: {case!r}"
        changed = [x.clone() for x in (q, k)]
        changed[0][:, T:] = 9
        seen = (T - 1 - case.config.offset) // case.config.stride + 1
        changed[1][:, max(seen, 0) :] = float("nan")
        assert torch.equal(kernel_lists(case, (*changed, lse))[:, :T], whole[:, :T]), f"{T}: {case!r}"


@pytest.mark.gpu
@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("name", STRETCHES)
def test_a_stretch_of_queries_has_the_lists_of_the_whole(name: str) -> None:
    case = VARIANTS[name]
    tensors = case.joined(case.tensors())
    whole = kernel_lists(case, tensors)
    whole = whole.split(case.lengths) if case.lengths else whole.unbind()
    for stretches in STRETCHES[name]:
        got = stretch_lists(case, tensors, stretches)
        parts = [x[first:end] for x, (first, end) in zip(whole, stretches)]
        expected = torch.cat(parts) if case.lengths else torch.stack(parts)
        assert torch.equal(got, expected), f"{stretches}: {case!r}"


@pytest.mark.gpu
def test_scores_that_rise_and_that_all_tie() -> None:
    """Streams in which every block is better than all before, none is, and all are equal, also to 0."""
    for config, G in product((SMALL, PAPER, NSAConfig(q_tile=1, block_size=16)), (1, 4, 16)):
        case = Case(T=4000, G=G, config=config)
        q, k, _ = case.tensors()[0]
        slope = torch.linspace(-1, 1, len(k), device=q.device).to(case.dtype)[:, None, None]
        q = torch.ones_like(q)
        for keys in (slope.expand_as(k), -slope.expand_as(k), torch.ones_like(k), 20 * (slope > 0.999).expand_as(k)):
            keys = keys.to(case.dtype).contiguous()
            sequences = [(q, keys, log_sum_exp(q, keys, case))]
            assert_lists(case, kernel_lists(case, case.joined(sequences)), sequences)


@pytest.mark.gpu
def test_strided_inputs() -> None:
    case = VARIANTS["default"]
    q, k, lse = case.joined(case.tensors())
    whole = kernel_lists(case, (q, k, lse))
    part = kernel_lists(case, (q[:, :, case.G :], k[:, :, 1:], lse[:, case.G :]))
    assert torch.equal(part, whole[:, :, 1:])


@pytest.mark.gpu
@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_any_numbers_give_lists(value: float) -> None:
    """With NaN, inf or numbers near the largest, lists are ascending, in range and of the right length."""
    case = Case(T=4096)
    q, k, lse = case.joined(case.tensors())
    proper = kernel_lists(case, (q, k, lse))
    for which in range(3):
        tensors = [q, k, lse]
        tensors[which] = tensors[which].clone()
        tensors[which][:, 3::90] = value
        got = kernel_lists(case, tuple(tensors))
        assert torch.equal(got >= 0, proper >= 0)
        assert (got < case.config.num_blocks(case.T)).all() and (got >= -1).all()
        assert ((got[..., 1:] > got[..., :-1]) | (got[..., 1:] < 0)).all()
