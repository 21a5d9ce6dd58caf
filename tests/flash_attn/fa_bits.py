"""Attention with a block list for each token: the lists, their unions with bits as kernels take them, and what is seen.

Everything follows from one table of blocks that tokens list, so the union is not what defines the right result.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.lists.query_bits import words_for
from nsa_tools.testing.pasteable import Pasteable

BLOCK, ROWS = 64, 128
NEVER_READ = 1 << 29


@dataclass(frozen=True, repr=False)
class TokenCase(Pasteable):
    """One call; lengths: (queries, keys) of each sequence. With a form they are packed.

    by_head: a list for each query head.
    block: keys that are listed together: those of an entry, or half or a quarter of them.
    """

    lengths: tuple[tuple[int, int], ...] = ((300, 300),)
    G: int = 16
    D: int = 128
    Hkv: int = 2
    causal: bool = True
    n: int = 4
    block: int = BLOCK
    form: str | None = None  # "padded", "compact", "stacked", "ragged"
    dtype: torch.dtype = torch.bfloat16
    by_head: bool = False
    seed: int = 0

    @property
    def rows(self) -> int:
        """Rows of a token in a tile."""
        return 1 if self.by_head else self.G

    @property
    def list_heads(self) -> int:
        return self.Hkv * self.G // self.rows

    @property
    def blocks(self) -> list[int]:
        """Entries of a list of all keys, of each sequence."""
        return [-(-keys // BLOCK) for _, keys in self.lengths]

    @property
    def parts(self) -> int:
        """Listed blocks of an entry."""
        return BLOCK // self.block

    @property
    def tiles(self) -> list[int]:
        return [-(-queries * self.rows // ROWS) for queries, _ in self.lengths]

    @property
    def starts(self) -> tuple[list[int], list[int]]:
        """cu_seqlens of queries and keys."""
        return tuple([0, *accumulate(pair[side] for pair in self.lengths)] for side in (0, 1))


def listed_blocks(case: TokenCase, device: str) -> list[torch.Tensor]:
    """Lists of each sequence, bool [list heads, queries, blocks]: random ones, up to n for a token, none for some."""
    generator = torch.Generator().manual_seed(case.seed)
    tables = []
    for T, S in case.lengths:
        N = -(-S // case.block)
        score = torch.rand(case.list_heads, T, N, generator=generator)
        if case.causal:
            own = (torch.arange(T) + S - T) // case.block
            score[:, torch.arange(N) > own[:, None]] = -1
        best, at = score.topk(min(case.n, N), dim=-1)
        kept = (best >= 0) & (torch.rand(best.shape, generator=generator) > 0.15)
        tables.append(torch.zeros(case.list_heads, T, N, dtype=torch.bool).scatter_(2, at, kept).to(device))
    return tables


def visible(case: TokenCase, table: torch.Tensor, keys: int) -> torch.Tensor:
    """bool [list heads, queries, keys] of one sequence."""
    queries = table.shape[1]
    seen = table.repeat_interleave(case.block, -1)[..., :keys]
    if case.causal:
        at = torch.arange(queries, device=table.device)[:, None] + keys - queries
        seen = seen & (torch.arange(keys, device=table.device) <= at)
    return seen


def union(case: TokenCase, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Counts [H, tiles], blocks [H, tiles, N] and bits [H, tiles, N, words] of one sequence's tiles."""
    device = table.device
    table = torch.nn.functional.pad(table, (0, -table.shape[2] % case.parts)).unflatten(2, (-1, case.parts))
    H, T, N, parts = table.shape
    tiles, words = -(-T * case.rows // ROWS), words_for(case.rows)
    first = torch.arange(tiles, device=device) * ROWS // case.rows
    last = ((torch.arange(tiles, device=device) + 1) * ROWS - 1) // case.rows
    bits = torch.zeros(H, tiles, N, parts, words, dtype=torch.int64, device=device)
    for j in range(int((last - first).max()) + 1):
        token = first + j
        there = (token <= last) & (token < T)
        bits[..., j // 32] |= (table[:, token.clamp(max=T - 1)] & there[:, None, None]).long() << j % 32
    bits = bits.flatten(3)
    chosen = (bits != 0).any(-1)
    order = chosen.byte().sort(dim=-1, descending=True, stable=True).indices
    past = torch.arange(N, device=device) >= chosen.sum(-1, keepdim=True)
    bits = bits.gather(2, order[..., None].expand_as(bits)).masked_fill(past[..., None], -1)
    bits = torch.where(bits >= 1 << 31, bits - (1 << 32), bits)
    return chosen.sum(-1).int(), order.masked_fill(past, NEVER_READ).int(), bits.int()


def union_lists(case: TokenCase, tables: list[torch.Tensor]) -> BlockSparseTensorsTorch:
    """The union of all sequences, in the case's form."""
    device, most = tables[0].device, max(case.blocks)
    parts = [union(case, table) for table in tables if table.shape[1]]
    if case.form == "stacked":
        widths = [tiles * N for tiles, N in zip(case.tiles, case.blocks, strict=True)]
        return BlockSparseTensorsTorch(
            torch.cat([counts for counts, _, _ in parts], 1),
            torch.cat([blocks.flatten(1) for _, blocks, _ in parts], 1),
            mask_block_bits=torch.cat([bits.flatten(1, 2) for _, _, bits in parts], 1),
            cu_total_m_blocks=_before(case.tiles, device), cu_block_idx_offsets=_before(widths, device),
        )  # fmt: skip
    tiles = max(case.tiles) if case.form in (None, "padded") else None
    wide = [[_padded(t, d, tiles, most) for d, t in enumerate(part)] for part in parts]
    if tiles is not None:
        empty = [torch.zeros_like(t) for t in wide[0]]
        filled = iter(wide)
        every = [next(filled) if table.shape[1] else empty for table in tables]
        counts, blocks, bits = (torch.stack(of) for of in zip(*every, strict=True))
        return BlockSparseTensorsTorch(counts, blocks, mask_block_bits=bits, block_size=(ROWS, BLOCK))
    counts, blocks, bits = (torch.cat(of, 1) for of in zip(*wide, strict=True))
    lists = BlockSparseTensorsTorch(counts, blocks, mask_block_bits=bits, cu_total_m_blocks=_before(case.tiles, device))
    if case.form == "compact":
        return lists
    kept = torch.arange(most, device=device) < counts[..., None]
    starts = (counts.flatten().cumsum(0) - counts.flatten()).view(counts.shape)
    return lists._replace(mask_block_idx=blocks[kept], mask_block_bits=bits[kept], cu_block_idx_offsets=starts)


def _before(numbers: list[int], device: Any) -> torch.Tensor:
    return torch.tensor([0, *accumulate(numbers)], dtype=torch.int32, device=device)


def _padded(tensor: torch.Tensor, dims: int, tiles: int | None, width: int) -> torch.Tensor:
    """Rows of `width` entries, and `tiles` of them. dims: of a tile's entries, as counts have none."""
    more = (0 if tiles is None else tiles - tensor.shape[1],)
    sides = [0, more[0]] if dims == 0 else [0, width - tensor.shape[2], 0, more[0]]
    return torch.nn.functional.pad(tensor, [0, 0] * (dims == 2) + sides, value=NEVER_READ if dims else 0)


def dense(
    case: TokenCase, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """o [T, Hq, D] and lse [Hq, T] of one sequence: what the tokens list, with products in `dtype`."""
    q, k, v = (x.to(dtype) for x in (q, k, v))
    o, lse = torch.zeros_like(q), torch.full(q.shape[1::-1], -torch.inf, dtype=torch.float64, device=q.device)
    seen = visible(case, table, len(k))
    for head in range(q.shape[1] if len(q) and len(k) else 0):
        of, listed, wider = head // case.G, seen[head // case.rows], torch.promote_types(dtype, torch.float32)
        scores = (q[:, head] @ k[:, of].mT).to(wider) * case.D**-0.5
        scores = scores.masked_fill(~listed, -torch.inf)
        lse[head] = scores.double().logsumexp(-1)
        p = torch.where(listed, scores.softmax(-1), 0)
        o[:, head] = p.to(dtype) @ v[:, of]
    return o, lse
