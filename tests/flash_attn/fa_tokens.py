"""Attention with a block list for each token: the lists, as unions with bits and as pairs by key block, and the oracle.

Everything follows from one table of blocks that tokens list, so neither unions nor pairs define the right result.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from typing import Any

import pytest
import torch

from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.lists.query_bits import words_for
from fuzz.attention import Inputs, Tensors
from fuzz.blocks import each_tensor, lists_of_rows
from fuzz.case import Attention as Case
from fuzz.oracle import dense

BLOCK, ROWS = 64, 128
TOKENS = (1, 63, 64, 65, 127, 129, 1000, 4096, 8193)
PACK = ((0, 0), (1, 1), (129, 129), (500, 700), (63, 63), (64, 200))


@dataclass(frozen=True, kw_only=True, repr=False)
class TokenCase(Case):
    """A call whose tokens have lists of their own, which the call alone knows nothing of.

    Attributes:
        n: blocks of a list at most. near: every token lists block 0 and its own.
        keys: of a block: of unions those of an entry, or half or a quarter of them.
        cap: tokens of a work tile by key block at most. start: rows that packed sequences' row sums begin at.
        add: on top of what gradients hold.
    """

    n: int = 4
    near: bool = False
    keys: int = BLOCK
    cap: int = 4096
    start: int = 64
    add: bool = False

    @property
    def rows(self) -> int:
        """Rows of a token in a tile."""
        return self.Hq // self.list_heads

    @property
    def by_head(self) -> bool:
        """True if each query head has a list."""
        return self.list_heads > self.Hkv

    @property
    def starts(self) -> tuple[list[int], list[int]]:
        """cu_seqlens of queries and keys."""
        return tuple([0, *accumulate(pair[side] for pair in self.lengths)] for side in (0, 1))


def tokens(
    *lengths: tuple[int, int], G: int = 16, Hkv: int = 2, form: str | None = None, by_head: bool = False, **more: Any
) -> TokenCase:
    """A case of sequences of these queries and keys, packed where there is a form: one of FORMS, of unions."""
    ((T_q, T_k), *_) = lengths = lengths or ((300, 300),)
    sizes = dict(packed=lengths, form=form) if form else dict(T_q=T_q, T_k=T_k, B=len(lengths))
    heads = dict(Hq=G * Hkv, Hkv=Hkv, list_heads=G * Hkv if by_head else Hkv)
    return TokenCase(**sizes, **heads, **dict(D=128, causal=True) | more)


def by_length(G: int, T: int) -> TokenCase:
    """One sequence, with fewer heads and longer lists where it is long."""
    return tokens((T, T), G=G, Hkv=1 if T > 4000 else 2, n=16 if T > 4000 else 4, seed=T)


def both_ways(cases: list[Any]) -> Any:
    """Parametrize (use_mma_sync, case): by wgmma, and by mma.sync as in SM100's kernels, which Hopper runs as well.

    By mma.sync without lists by head, and at head dimensions 64 and 128.
    """
    ways = [(False, case) for case in cases]
    ways += [(True, case) for case in cases if not case.by_head and case.D in (64, 128)]
    return pytest.mark.parametrize(("use_mma_sync", "case"), ways, indirect=["use_mma_sync"], ids=str)


def listed_blocks(case: TokenCase, device: str = "cuda") -> list[torch.Tensor]:
    """Lists of each sequence, bool [list heads, queries, blocks]: random ones, up to n for a token, none for some."""
    generator = torch.Generator().manual_seed(case.seed)
    tables = []
    for T, S in case.lengths:
        N = -(-S // case.keys)
        score = torch.rand(case.list_heads, T, N, generator=generator)
        own = (torch.arange(T)[:, None] + S - T) // case.keys
        if case.causal:
            score[:, torch.arange(N) > own] = -1
        best, at = score.topk(min(case.n, N), dim=-1)
        kept = (best >= 0) & (torch.rand(best.shape, generator=generator) > 0.15)
        table = torch.zeros(score.shape, dtype=torch.bool).scatter_(2, at, kept)
        table |= case.near & ((torch.arange(N) == own) | (torch.arange(N) == 0))
        tables.append(table.to(device))
    return tables


def visible(case: TokenCase, table: torch.Tensor, keys: int) -> torch.Tensor:
    """bool [list heads, queries, keys] of one sequence."""
    queries = table.shape[1]
    seen = table.repeat_interleave(case.keys, -1)[..., :keys]
    if case.causal:
        at = torch.arange(queries, device=table.device)[:, None] + keys - queries
        seen = seen & (torch.arange(keys, device=table.device) <= at)
    return seen


def reference(case: TokenCase, x: Inputs, tables: list[torch.Tensor], dtype: torch.dtype) -> Tensors:
    """`dense` of a call, head by head, which takes less memory."""
    heads = []
    for head in range(case.Hq):
        q, do = (t[..., head : head + 1, :] for t in (x.q, x.do))
        k, v = (t[..., (of := head // (case.Hq // case.Hkv)) : of + 1, :] for t in (x.k, x.v))

        def seen(b: int, head: int = head) -> torch.Tensor:
            return visible(case, tables[b][head // case.rows][None], case.lengths[b][1])

        heads.append(dense((q, k, v), do, seen, dtype, lengths=case.packed or None))
    found = {name: torch.cat([of[name] for of in heads], -2) for name in ("o", "lse", "dq")}
    for name in ("dk", "dv"):
        found[name] = torch.cat([of[name] for of in heads], -2).double().unflatten(-2, (case.Hkv, -1)).sum(-2)
    return found


def union(case: TokenCase, table: torch.Tensor) -> Iterator[list[tuple[int, list[int]]]]:
    """The blocks that any token of a tile lists, each with its bits, of one sequence's tiles [head, tile]."""
    parts, words = BLOCK // case.keys, words_for(case.rows)  # listed blocks of an entry, and words of one's bits
    (H, T, N), weights = table.shape, (1 << torch.arange(32)).view(32, 1, 1)
    table = torch.nn.functional.pad(table.cpu(), (0, -N % parts)).unflatten(2, (-1, parts)).long()
    for head, tile in product(range(H), range(-(-T * case.rows // ROWS))):
        tokens = table[head, tile * ROWS // case.rows : ((tile + 1) * ROWS - 1) // case.rows + 1]
        of_words = torch.nn.functional.pad(tokens, (0, 0, 0, 0, 0, 32 * words - len(tokens))).unflatten(0, (words, 32))
        bits = (of_words * weights).sum(1).permute(1, 2, 0).flatten(1)
        bits = torch.where(bits >= 1 << 31, bits - (1 << 32), bits)
        listed = bits.any(1).nonzero().flatten()
        yield list(zip(listed.tolist(), bits[listed].tolist()))


def union_lists(case: TokenCase, tables: list[torch.Tensor]) -> BlockSparseTensorsTorch:
    """The union of all sequences, in the case's form."""
    H, across = case.list_heads, [-(-keys // BLOCK) for _, keys in case.lengths]
    by_sequence = [list(union(case, table)) for table in tables]
    rows = [[own[h * len(own) // H : (h + 1) * len(own) // H] for own in by_sequence] for h in range(H)]
    size = dict(block_size=(ROWS, BLOCK)) if case.form == "padded" else {}

    def formed(value: Callable[[tuple[int, list[int]]], int]) -> BlockSparseTensorsTorch:
        values = [[[[*map(value, tile)] for tile in own] for own in head] for head in rows]
        return lists_of_rows({"mask": values}, case.form, across, "cu_total_m_blocks", width=max(across), **size)

    words = BLOCK // case.keys * words_for(case.rows)
    bits = [formed(lambda entry, w=w: entry[1][w]).mask_block_idx for w in range(words)]
    lists = formed(lambda entry: entry[0])._replace(mask_block_bits=torch.stack(bits, -1))
    return each_tensor(lists, lambda t: t.to(tables[0].device))


def key_pairs(case: TokenCase, tables: list[torch.Tensor]) -> Any:
    """`KeyPairs`: rows as work tiles of at most `cap` tokens; what lies past the last is never read."""
    from flash_attn.cute.bwd_dkdv.spec import KeyPairs

    by_block = [table.unflatten(0, (case.Hkv, -1)).permute(0, 3, 2, 1).flatten(2) for table in tables]
    heads = [[of[h] for h in range(case.Hkv)] for of in by_block]
    ordered = zip(*heads) if case.packed else heads  # packed: all sequences of a head
    by_row = [row.nonzero().flatten() for of in ordered for own in of for row in own]
    work_tiles, row_tiles, partials = [], [0], 0
    for row, (begin, end) in enumerate(pairwise(accumulate(map(len, by_row), initial=0))):
        splits = max(1, -(-(end - begin) // case.cap))
        length = -(-(end - begin) // splits)
        for i in range(splits):
            split = min(begin + i * length, end), min(begin + (i + 1) * length, end)
            work_tiles.append((row, *split, partials + i if splits > 1 else -1))
        partials += splits if splits > 1 else 0
        row_tiles.append(len(work_tiles))
    work_tiles += [(1 << 30,) * 4] * 3
    device = tables[0].device
    work_tiles, row_tiles = (torch.tensor(x, dtype=torch.int32, device=device) for x in (work_tiles, row_tiles))
    before = [0, *accumulate(table.shape[2] for table in tables)]
    blocks = torch.tensor(before, dtype=torch.int32, device=device) if case.packed else None
    return KeyPairs(torch.cat(by_row).int(), work_tiles, row_tiles, partials, case.keys, blocks, case.by_head)
