"""Lists made by kernels: unions and tokens by key block against dense masks, block lists against PyTorch's own."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate

import pytest
import torch
from fa_compile import Worker
from kernel_cases import poison

from fuzz.blocks import each_tensor
from nsa_layer.checks import starts_of_lengths
from nsa_layer.config import NSAConfig
from nsa_layer.kernels.union_lists import key_csr
from nsa_layer.kernels.union_lists.key_csr import pairs_by_block
from nsa_layer.kernels.union_lists.sizes import most_partials, tokens_of_tile, words_of_entry
from nsa_layer.kernels.union_lists.unions import union_lists
from nsa_layer.warm_up.lookup import OnMeta
from nsa_tools.testing.pasteable import Pasteable


@dataclass(frozen=True, repr=False)
class Case(Pasteable):
    """Lists of blocks, of which kernels make others.

    Attributes:
        lengths: packed sequences; one number: a batch of two of that length.
        q_tile: tokens that share a list.
        longest: entries of a work tile of backward at most.
        kind: how lists of tokens are drawn.
        parts: neighbouring lists of a token whose pairs are in one row.
        ahead: position of the first token in its sequence's keys, 3 more in each sequence; None: its place.
    """

    lengths: tuple[int, ...] = (1000,)
    Hkv: int = 2
    G: int = 4
    n: int = 16
    block_size: int = 64
    causal: bool = True
    q_tile: int = 1
    longest: int = 50
    kind: str = "random"
    parts: int = 1
    ahead: int | None = None

    @property
    def packed(self) -> bool:
        return len(self.lengths) > 1

    @property
    def sequences(self) -> tuple[int, ...]:
        return self.lengths if self.packed else self.lengths * 2

    @property
    def offsets(self) -> list[int]:
        """Positions of first tokens."""
        return [0 if self.ahead is None else self.ahead + 3 * i for i in range(len(self.sequences))]

    @property
    def keys(self) -> list[int]:
        """Keys of each sequence: some behind the last token."""
        return [T if self.ahead is None else T + self.ahead + 100 for T in self.sequences]

    @property
    def kv_tile(self) -> int:
        return 64 if self.block_size == 64 else 128

    @property
    def config(self) -> NSAConfig:
        return NSAConfig(block_size=self.block_size, q_tile=self.q_tile, block_counts=self.n)

    @property
    def lists(self) -> list[int]:
        """Lists of each sequence and head."""
        return [-(-T // self.q_tile) for T in self.sequences]


PACK = (300, 0, 1, 128, 2000, 0)
STATIC = [
    dict(G=1, Hkv=3),
    dict(G=2, n=4, block_size=128),
    dict(G=3, n=33, causal=False),
    dict(G=4, kind="equal"),
    dict(G=8, n=1, kind="near"),
    dict(G=16, kind="near"),
    dict(G=160, n=4, block_size=128, causal=False),
    dict(G=1, n=33, block_size=256, kind="near"),
    dict(G=1, q_tile=32, ahead=333),
    dict(G=16, n=5, q_tile=2, kind="near", ahead=0),
    dict(G=3, q_tile=256, ahead=70, causal=False),
    dict(G=1, Hkv=6, parts=3, ahead=64, kind="near"),
    dict(G=1, Hkv=4, parts=4, q_tile=4),
    dict(G=4, block_size=16, kind="near"),
    dict(G=2, block_size=32, q_tile=8, ahead=70),
    dict(G=160, block_size=16, causal=False),
]
LENGTHS = (1, 63, 64, 65, 127, 128, 129, 1000, 4096, 8193)
CASES = [
    *(Case((T,), **STATIC[(i + j) % len(STATIC)]) for i, T in enumerate(LENGTHS) for j in (0, 4, 8, 12)),
    *(Case(PACK, **static) for static in STATIC),
    Case((8193,), Hkv=40, n=1, longest=1),  # more rows than the plan takes in one step
    Case((40_000, 30_000), G=16, kind="near", longest=2048, Hkv=1),
    Case((70_000,), G=1, Hkv=1, longest=2048, causal=False),  # unions too long for one round
]


def draw(case: Case) -> list[torch.Tensor]:
    """Each sequence's lists [L, heads, n]: -1, blocks twice, and with "random" numbers outside of the sequence."""
    generator, lists = torch.Generator().manual_seed(0), []
    for L, S, ahead in zip(case.lists, case.keys, case.offsets, strict=True):
        shape = (L, case.Hkv, case.n)
        own = (torch.arange(L).view(-1, 1, 1) * case.q_tile + ahead) // case.block_size
        blocks = torch.randint(-1, -(-S // case.block_size) + 2, shape, generator=generator)
        if case.kind == "near":
            blocks = (own - torch.randint(0, 2 * case.n, shape, generator=generator)).clamp(min=-1)
            blocks[..., 0] = 0
        elif case.kind == "equal":
            blocks = blocks[:1].expand(shape)
        else:
            blocks = torch.where(torch.rand(shape, generator=generator) < 0.01, 2**31 - 1, blocks)
        lists.append(blocks.int())
    return lists


def chosen(case: Case, b: int, lists: torch.Tensor, step: int = 1) -> torch.Tensor:
    """[T / step, heads, blocks] of a sequence: the last of `step` tokens, which are in one tile, lists the block."""
    T, N = case.sequences[b], -(-case.keys[b] // case.block_size)
    t = torch.arange(step - 1, T + step - 1, step).clamp(max=T - 1)
    lists = lists[t // case.q_tile]
    valid = (lists >= 0) & (lists < N)
    if case.causal:
        valid &= lists * case.block_size <= t.view(-1, 1, 1) + case.offsets[b]
    listed = torch.zeros(len(t), case.Hkv, N + 1, dtype=torch.bool)
    return listed.scatter_(2, torch.where(valid, lists, N).long(), True)[..., :N]


def made(case: Case, lists: list[torch.Tensor]):
    """Both results; memory that the kernels leave alone is poisoned beforehand, and no stride is 1."""
    given = torch.cat(lists) if case.packed else torch.stack(lists)
    given = torch.stack([given, torch.zeros_like(given)], dim=-1)[..., 0]
    device = given.device

    most = max if case.packed else min
    where = dict(keys=most(case.keys), queries=most(case.sequences), q_tile=case.q_tile)
    if case.ahead is not None:
        where |= dict(q_offset=torch.tensor(case.offsets, dtype=torch.int32, device="cpu").to(device))
    unions_at, pairs_at = {}, dict(heads=case.Hkv // case.parts)
    if case.packed:
        of_lengths = dict(cu_seqlens=case.sequences, cu_lists=case.lists)
        where |= {name: starts_of_lengths(lengths, device) for name, lengths in of_lengths.items()}
        tiles, blocks = tiles_of(case), blocks_of(case)
        unions_at |= dict(
            cu_seqlens_k=starts_of_lengths(case.keys, device),
            cu_tiles=starts_of_lengths(tiles, device),
            tiles=sum(tiles) + 1,
        )
        pairs_at |= dict(cu_blocks=starts_of_lengths(blocks, device), blocks=sum(blocks), queries=sum(case.sequences))
    for _ in range(2):
        poison(device)
        where |= dict(block_size=case.block_size, causal=case.causal)
        unions = union_lists(given, **where | unions_at, G=case.G)
        pairs = pairs_by_block(given, **where | pairs_at, cap=case.longest)
    return unions, pairs


def tiles_of(case: Case) -> list[int]:
    return [-(-T * case.G // 128) for T in case.sequences]


def blocks_of(case: Case) -> list[int]:
    return [-(-S // case.block_size) for S in case.keys]


def assert_union(case: Case, b: int, listed: torch.Tensor, found: list[torch.Tensor]) -> None:
    """A sequence's unions: counts [H, M], blocks [H, M, R], bits [H, M, R, W]."""
    T, tile = listed.shape[0], torch.arange(found[0].shape[1])
    shares, N = max(1, 64 // case.block_size), -(-case.keys[b] // 64)
    entries = listed.repeat_interleave(max(1, case.block_size // 64), dim=2)
    entries = pad(entries, N * shares).unflatten(2, (N, shares))
    first, last = tile * 128 // case.G, ((tile * 128 + 127) // case.G).clamp(max=T - 1)
    tokens = first.unsqueeze(1) + torch.arange(tokens_of_tile(case.G))
    seen = entries[tokens.clamp(max=T - 1)] & (tokens <= last.unsqueeze(1)).view(*tokens.shape, 1, 1, 1)
    if case.causal:
        ends = last.unsqueeze(1) + case.offsets[b]
        seen &= (torch.arange(N) * 64 <= ends).view(len(tile), 1, 1, N, 1)
    seen = seen.permute(2, 0, 3, 4, 1)  # [H, M, entries, blocks of an entry, tokens of a tile]
    union = seen.any(-1).any(-1)
    counts, blocks, bits = found
    assert torch.equal(counts, union.sum(-1).int())
    used = torch.arange(blocks.shape[-1]) < counts.unsqueeze(-1)
    assert torch.equal(blocks[used], union.nonzero()[:, -1].int())
    assert bits.shape[-1] == words_of_entry(case.G, case.block_size)
    shifts = torch.arange(bits.shape[-1] // shares * 32)
    words = bits[used].unflatten(-1, (shares, -1)).repeat_interleave(32, -1)
    assert torch.equal((words >> shifts % 32) & 1 == 1, pad(seen[union], len(shifts)))


def pad(x: torch.Tensor, width: int, value: int = 0) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, width - x.shape[-1]), value=value)


def assert_pairs(case: Case, listed: list[torch.Tensor], pairs) -> None:
    """Rows, items and partials, of all sequences."""
    # [rows' heads, blocks, T * parts]
    by_block = [x.unflatten(1, (-1, case.parts)).permute(1, 3, 0, 2).flatten(2) for x in listed]
    if case.packed:
        longest = max(case.lengths) * case.parts
        by_block = [torch.cat([pad(x, longest) for x in by_block], dim=1)]
    counts = torch.cat([x.sum(-1).flatten() for x in by_block])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    assert torch.equal(pairs.tokens[: starts[-1]], torch.cat([x.nonzero()[:, -1] for x in by_block]).int())
    items, row_items, partials = [], [0], 0
    for row, (count, start) in enumerate(zip(counts.tolist(), starts.tolist())):
        pieces = max(1, -(-count // case.longest))
        length = -(-count // pieces)
        ends = [start + min(count, i * length) for i in range(pieces + 1)]
        items += [(row, ends[i], ends[i + 1], partials + i if pieces > 1 else -1) for i in range(pieces)]
        partials += pieces if pieces > 1 else 0
        row_items.append(len(items))
    assert len(items) <= len(pairs.work_tiles)
    assert torch.equal(pairs.work_tiles[: len(items)], torch.tensor(items, dtype=torch.int32))
    assert pairs.row_tiles.tolist() == row_items
    assert partials <= most_partials(int(starts[-1]), case.longest) <= pairs.partials


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_unions_and_tokens_are_those_of_pytorch(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_csr, "CAPACITIES", (1024,))  # the longest cases take two ranges of blocks
    lists = draw(case)
    unions, pairs = (each_tensor(of, torch.Tensor.cpu) for of in made(case, [x.cuda() for x in lists]))
    listed = [chosen(case, b, of) for b, of in enumerate(lists)]
    for b, (first, end) in enumerate(zip(accumulate(tiles_of(case), initial=0), accumulate(tiles_of(case)))):
        if case.sequences[b]:
            assert_union(case, b, listed[b], [x[:, first:end] if case.packed else x[b] for x in unions])
    if case.packed:
        assert not unions[0][:, sum(tiles_of(case)) :].any()
    assert_pairs(case, listed, pairs)


def trace_unions(fields_of_case: dict) -> None:
    """In a compiling worker: everything that `made` launches."""
    case = Case(**fields_of_case)
    with OnMeta():
        made(case, [torch.empty(L, case.Hkv, case.n, dtype=torch.int32, device="cuda") for L in case.lists])


@pytest.mark.parametrize("case", [CASES[0], Case(PACK, G=1, Hkv=6, parts=3, q_tile=4, ahead=9)], ids=str)
def test_kernels_of_unions_are_traced(compiler: Worker, case: Case) -> None:
    compiler.trace(trace_unions, asdict(case))


def test_tokens_of_a_tile() -> None:
    for G in (*range(1, 140), 160, 256, 300):
        tiles = [range(128 * i // G, (128 * i + 127) // G + 1) for i in range(G // math.gcd(128, G))]
        assert (G, tokens_of_tile(G)) == (G, max(map(len, tiles)))
        assert tokens_of_tile(G) <= 32 * words_of_entry(G)


def test_what_is_refused() -> None:
    lists = torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="524288 blocks of 64, got 40000000 tokens"):
        union_lists(lists.expand(1, 40_000_000, 1, 16), G=4, block_size=64, causal=True)
    with pytest.raises(ValueError, match="entries, got 2560000000: pass fewer heads"):
        pairs_by_block(lists.expand(1, 40_000_000, 4, 16), block_size=64, causal=True, cap=64)


tiles = partial(Case, G=2, n=6, q_tile=128, longest=32)
MANY = tiles((70, 700, 5) * 100 + (4000,))
TILES = [
    tiles(),
    tiles(lengths=(1,)),
    tiles(lengths=(63,), G=1),
    tiles(lengths=(5000,), n=16, longest=3),
    tiles(lengths=(5000,), n=7, causal=False, G=8, Hkv=1),
    tiles(block_size=256, q_tile=256),
    tiles(block_size=256, n=3, causal=False),
    tiles(block_size=256, n=3),
    tiles(lengths=(890,), block_size=256, n=16),
    tiles(longest=2),
    tiles(G=1, Hkv=3),
    tiles(PACK),
    tiles(PACK, longest=2),
    tiles(PACK, G=1, Hkv=3),
    tiles(PACK, block_size=128, causal=False),
    tiles(PACK, block_size=256, longest=2),
    MANY,
    tiles((40_000,), n=16),
    tiles((200_000,), n=16, Hkv=1),
    tiles(lengths=(5000,), n=16, longest=2, G=8, Hkv=1),
]


def choice(case: Case) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The listed blocks of each sequence, bool [M, Hkv, blocks], and lists [B, Hkv, M, n], packed [Hkv, all tiles, n]:
    ascending, then -1."""
    listed = [chosen(case, b, lists, case.q_tile) for b, lists in enumerate(draw(case))]
    width, lists = case.config.list_width(max(case.lengths)), []
    for x in listed:
        N = x.shape[-1]
        blocks = torch.arange(N).where(x, N).sort(-1).values[..., :width].transpose(0, 1)
        lists.append(pad(blocks.masked_fill(blocks == N, -1), width, -1).int())
    return listed, torch.cat(lists, 1) if case.packed else torch.stack(lists)


def made_of_tiles(case: Case, lists: torch.Tensor) -> tuple:
    """Forward and backward lists out of the kernels; memory that they leave alone is poisoned beforehand."""
    for _ in range(2):
        poison(lists.device)
        both = both_lists(case, lists)
    return both


def both_lists(case: Case, lists: torch.Tensor) -> tuple:
    from nsa_layer.kernels.block_lists.make import backward_lists, forward_lists

    T, rows = max(case.lengths), {}
    static = dict(block_size=case.block_size, q_tile=case.q_tile, kv_tile=case.kv_tile, causal=case.causal)
    if case.packed:
        tiles = [[-(-T // size) for T in case.lengths] for size in (case.q_tile, case.kv_tile)]
        static |= dict(zip(("cu_tiles", "cu_rows"), (starts_of_lengths(of, lists.device) for of in tiles)))
        rows = dict(rows=sum(tiles[1]))
    counts = (lists >= 0).sum(-1, dtype=torch.int32)
    forward = forward_lists(lists, counts, T, **static)
    return forward, backward_lists(lists, T, (case.G * case.Hkv, case.Hkv), longest=case.longest, **static, **rows)


def key_tiles(case: Case, T: int, listed: torch.Tensor):
    """Counts, and the tiles of keys of each tile of queries, ascending and filled up with 0, in the plainest way."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    N, ratio = -(-T // case.kv_tile), case.block_size // case.kv_tile
    listed = listed.transpose(0, 1).unsqueeze(0).repeat_interleave(ratio, -1)[..., :N]
    if case.causal:
        last = (torch.arange(listed.shape[2]) + 1) * case.q_tile
        listed &= torch.arange(N) * case.kv_tile < last[:, None]
    tiles = torch.arange(N, dtype=torch.int32).where(listed, N).sort(-1).values
    counts, tiles = listed.sum(-1, dtype=torch.int32), tiles.masked_fill(tiles == N, 0)
    return BlockSparseTensorsTorch(counts, tiles, block_size=(case.q_tile, case.kv_tile))


def assert_rows(case: Case, forward, counts: torch.Tensor, tiles: torch.Tensor, b: int) -> None:
    cnt, idx = forward.mask_block_cnt, forward.mask_block_idx
    if case.packed:
        first, last = forward.cu_total_m_blocks[b : b + 2].tolist()
        cnt, idx = cnt[:, first:last], idx[:, first:last]
    else:
        cnt, idx = cnt[b], idx[b]
    assert torch.equal(cnt, counts)
    width = min(idx.shape[-1], tiles.shape[-1])
    used = torch.arange(width) < counts.unsqueeze(-1)
    assert torch.equal(torch.where(used, idx[..., :width], 0), torch.where(used, tiles[..., :width], 0))


def assert_launch(backward, items: torch.Tensor, heads: tuple[int, int]) -> None:
    """Items of nothing stand at the end; the heads that share dk and dv take turns."""
    plan, (Hq, Hkv) = backward.plan, heads
    assert torch.equal(plan[: len(items)], items) and not plan[plan[:, 4] == plan[:, 3]].any()
    launched: dict[tuple[int, int, int], int] = {}
    for b, h, n, _, _, turn, *_ in items.tolist():
        key = b, h * Hkv // Hq, n
        assert turn == launched.get(key, 0)
        launched[key] = turn + 1


def trace_block_lists(fields_of_case: dict) -> None:
    """In a compiling worker: everything that `both_lists` launches."""
    case = Case(**fields_of_case)
    shape = (case.Hkv, sum(map(case.config.num_tiles, case.lengths)), case.config.list_width(max(case.lengths)))
    with OnMeta():
        both_lists(case, torch.empty(shape if case.packed else (2, *shape), dtype=torch.int32, device="cuda"))


@pytest.mark.parametrize("case", [TILES[0], TILES[7], TILES[12]], ids=str)
def test_kernels_of_block_lists_are_traced(compiler: Worker, case: Case) -> None:
    compiler.trace(trace_block_lists, asdict(case))


@pytest.mark.gpu
@pytest.mark.parametrize("case", TILES, ids=lambda case: f"{case}"[:100])
def test_block_lists_are_those_of_pytorch(case: Case) -> None:
    from flash_attn.cute.block_lists import transpose_lists
    from flash_attn.cute.lists.backward_plan import plan_backward

    listed, lists = choice(case)
    forward, backward = (each_tensor(of, torch.Tensor.cpu) for of in made_of_tiles(case, lists.cuda()))
    Hq, Hkv = case.G * case.Hkv, case.Hkv
    planned = Hq > Hkv
    assert (backward.plan is not None) == planned
    items = backward.plan[backward.plan[:, 4] > backward.plan[:, 3]] if planned else None
    for b, T in enumerate(case.sequences):
        if T == 0:
            continue
        one = key_tiles(case, T, listed[b])
        assert_rows(case, forward, one.mask_block_cnt[0], one.mask_block_idx[0], b)
        N = -(-T // case.kv_tile)
        tensors = transpose_lists(one, N)
        sizes = dict(num_heads=Hq, num_heads_kv=Hkv, num_q_blocks=len(listed[b]), longest=case.longest)
        expected = plan_backward(tensors, **sizes)
        rows = int(backward.cu_total_n_blocks[b])
        assert int(backward.cu_total_n_blocks[b + 1]) - rows == N
        starts = backward.cu_block_idx_offsets[:, rows : rows + N]
        counts = expected.mask_block_cnt[0]
        assert torch.equal(backward.mask_block_cnt[:, rows : rows + N], counts)
        ours, theirs = backward.mask_block_idx, expected.mask_block_idx
        used = torch.arange(theirs.shape[-1]) < counts.unsqueeze(-1)
        at_entries = torch.where(used, starts.unsqueeze(-1) + torch.arange(theirs.shape[-1]), 0)
        assert torch.equal(torch.where(used, ours[at_entries], 0), torch.where(used, theirs[0], 0))
        if planned:
            own = items[items[:, 0] == b]
            theirs = expected.plan[expected.plan[:, 4] > expected.plan[:, 3]]
            assert torch.equal(own[:, 1:6], theirs[:, 1:6])
            place = (own[:, 6].long() & 0xFFFFFFFF) | (own[:, 7].long() << 32)
            assert torch.equal(place, starts[own[:, 1].long() * starts.shape[0] // Hq, own[:, 2].long()])
    if planned:
        assert_launch(backward, items, (Hq, Hkv))
