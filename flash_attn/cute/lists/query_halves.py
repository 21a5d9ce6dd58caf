"""Lists of an odd number of 64 queries for SM100, whose tiles have 128: which blocks either half of a tile lists.

A tile of queries walks the union of its halves' lists, and every entry of the union says which of them list it: 4 *
block + halves, with bit 0 for queries 0 .. 63 of the tile and bit 1 for 64 .. 127. In forward that joins two rows of
lists; in backward, where a row is a key block, two entries. The kernels hide an entry's scores from the half that does
not list it (`half_tiles`).

The union is ragged (`formats`), of padded lists too. Making it takes time and memory in proportion to the room that the
lists have, and never waits for the device. Where heads are packed into a forward tile and it lies within a block,
nothing is joined: see `packs`.

PyTorch only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch

from flash_attn.cute.lists.csr import is_packed
from flash_attn.cute.lists.own_rows import ListedEntries, own_rows

HALF = 64  # queries
TILE = 2 * HALF
BLOCK_BITS = 29  # of a block's number in an entry, beside two bits for the halves
SM100 = (10, 11)  # arch // 10

OptionalTensor = torch.Tensor | None


def has_halves(arch: int, lists: Any) -> bool:
    """True if a tile of 128 queries on `arch` may hold queries of two blocks of `lists` (or None).

    True of every size that 128 does not divide: those that 64 does not divide either are refused by that number.
    """
    if arch // 10 not in SM100 or lists is None or lists.block_size is None:
        return False
    return lists.block_size[0] > 0 and lists.block_size[0] % TILE != 0


def packs(lists: Any, heads: int) -> bool:
    """True if tiles of `heads` packed query heads lie within blocks of `lists`: 128 rows, 128 / heads queries."""
    return lists.block_size[0] * heads % TILE == 0


def block_tiles(block_q: int, tile_q: int) -> int | Fraction:
    """Tiles of `tile_q` rows in a block of one head; a fraction of one, where heads are packed."""
    tiles = Fraction(block_q, tile_q)
    return int(tiles) if tiles.denominator == 1 else tiles


def whole_tiles(heads: int, tiles: int | Fraction) -> tuple[int, int]:
    """(heads, tiles) to divide a tile's number by; `heads` times a fraction at once."""
    return (heads, tiles) if isinstance(tiles, int) else (1, int(heads * tiles))


def forward_config(config: Any, *, tile_q: int, packed: bool, asked: bool) -> Any:
    """The normalised lists of a forward call (`NormalizedBlockSparseConfig`) as SM100 walks them.

    Args:
        tile_q: rows of a CTA. packed: they are of packed heads, and lie within a block.
        asked: see `merged_forward`.
    """
    from flash_attn.cute.block_sparsity import get_block_sparse_broadcast_pattern

    lists = config.tensors
    if packed:
        return config._replace(q_subtile_factor=block_tiles(lists.block_size[0], tile_q))
    lists = merged_forward(lists, asked=asked)
    pattern = get_block_sparse_broadcast_pattern(lists)
    return config._replace(tensors=lists, broadcast_pattern=pattern, q_subtile_factor=1)


def backward_lists(lists: Any, *, asked: bool, ordered: bool, spt: bool, groups: int) -> Any:
    """The normalised lists of a backward call as SM100 walks them; see `merged_backward`.

    Args:
        spt: what to take for ``lists.spt`` where the lists do not say, which they need not.
        groups: CTAs, or pairs of them, that a key block's tiles are dealt out to.
    """
    spt = spt if lists.spt is None else bool(lists.spt)
    return merged_backward(lists, asked=asked, ordered=ordered, spt=spt, groups=groups)


def merged_forward(lists: Any, *, asked: bool) -> Any:
    """Forward lists of tiles of 128 queries, as the module's docstring has them.

    Args:
        lists: padded or ragged, of blocks of an odd number of 64 queries, expanded to the batches and heads of a call.
        asked: whether there is a mask_mod. Without one mask and full blocks are the same to a kernel, and what comes
            out are full blocks; with one, a block that one half lists as a mask block and the other as a full one is
            in both lists.

    Returns:
        Ragged lists with cu_total_m_blocks. Heads, and sequences of padded lists, that shared their lists still do.
    """
    own = own_rows(lists, "cu_total_m_blocks")
    factor, (heads, rows, kinds) = lists.block_size[0] // HALF, own.sizes(asked)
    if is_packed(lists):
        before = _cumulated((lists.cu_total_m_blocks.long().diff() * factor + 1) // 2)
        rows = (rows * factor + before.shape[0] - 1) // 2
    else:
        tiles = (rows // own.sequences * factor + 1) // 2
        before, rows = own.rows_before(lists, tiles), own.sequences * tiles
    entry = own.entries(asked)
    tile, halves = _tiles_of(own.block.index_select(0, entry.row), factor)
    row = tile + before.index_select(0, own.sequence.index_select(0, entry.row))
    union = _union(halves, replace(entry, row=row, sizes=(heads, rows, kinds)))
    mask, full = union.lists[0], union.lists[-1] if kinds == 2 or not asked else None
    if not asked:
        mask = torch.zeros_like(full[0]), full[1]
    return _in_place_of(lists, union, mask, full)._replace(cu_total_m_blocks=before.int())


def merged_backward(lists: Any, *, asked: bool, ordered: bool = False, spt: bool = False, groups: int = 1) -> Any:
    """Backward lists whose entries are tiles of 128 queries, as the module's docstring has them.

    Args:
        lists, asked: as in `merged_forward`; without a mask_mod what comes out are mask blocks.
        ordered: also make semaphore values. Those of `lists` count entries that there are no longer.
        spt: key blocks are launched from the last to the first.
        groups: CTAs, or pairs of them, that add for a key block. Where there are several, and full lists too,
            semaphore values are what `turn_of_add` takes.

    Returns:
        Ragged lists with cu_total_n_blocks.
    """
    own = own_rows(lists, "cu_total_n_blocks")
    sizes = own.sizes(asked)
    before = lists.cu_total_n_blocks if is_packed(lists) else own.rows_before(lists, sizes[1] // own.sequences)
    entry = own.entries(asked)
    tile, halves = _tiles_of(entry.block, lists.block_size[0] // HALF)
    union = _union(halves, replace(entry, block=tile), reverse=ordered and spt)
    full = union.lists[1] if sizes[2] == 2 else None
    merged = _in_place_of(lists, union, union.lists[0], full)._replace(cu_total_n_blocks=before.int())
    if not ordered:
        return merged
    twice = full is not None and groups > 1
    locks = _locks(union, own.sequence, own.sequences, twice=twice)
    return merged._replace(dq_write_order=locks, dq_write_order_full=None if full is None else locks, spt=spt)


def turn_of_add(lock: Any, group: Any, release: Any) -> tuple[Any, Any]:
    """The turn of a CTA of a key block at a tile of queries that the block may be listed for twice.

    A block that is mask block to one half and full block to the other has two entries for one tile. Every CTA walks
    both, and makes both adds before the next CTA of the block makes its first: none waits for one launched later.

    Args:
        lock: the entry's semaphore value, 4 * entries of earlier key blocks + 2 * (the second of two) + (one of two).
        group: the CTA's place among those of its key block, in the order of their adds.
        release: by how much the CTA raises the tile's semaphore with an add: 1, or more where it stands for CTAs
            that are never launched too.

    Returns:
        (before, turn): the add waits for before * CTAs of a key block + turn. Numbers, or the kernel's values.
    """
    return lock >> 2, group * (1 + (lock & 1)) + (lock >> 1 & 1) * release


@dataclass(frozen=True)
class _Union:
    """Entries of halves, those of the same row, kind and tile joined.

    Attributes:
        entries: int32 [E + 1]: 4 * block + halves, row by row, and in a row kind by kind.
        lists: for each kind its counts, int32 [H, rows], and the places where its rows start in `entries`, int64.
        line: int64 [E + 1], (head * rows + row) * kinds + kind; rows count from the last one if `reverse`.
        used: bool [E + 1].
    """

    entries: torch.Tensor
    lists: list[tuple[torch.Tensor, torch.Tensor]]
    line: torch.Tensor
    used: torch.Tensor
    sizes: tuple[int, int, int]
    reverse: bool


def _union(halves: torch.Tensor, of: ListedEntries, *, reverse: bool = False) -> _Union:
    """Joins entries by a sort of what tells them apart, with the halves as its last two bits."""
    heads, rows, kinds = of.sizes
    lines = heads * rows * kinds
    if lines >= 1 << 61 - BLOCK_BITS:
        raise ValueError(f"{heads} heads of {rows} rows of lists are too many to join")
    row = rows - 1 - of.row if reverse else of.row
    line = (of.head * rows + row) * kinds + of.kind
    key = ((line << BLOCK_BITS | of.block) << 2) | halves
    end = lines << BLOCK_BITS + 2
    key = torch.where(of.listed, key, end).flatten().sort().values
    last = key.numel()
    beside = torch.nn.functional.pad(key, (1, 1), value=-1)
    before, after = beside.narrow(0, 0, last), beside.narrow(0, 2, last)
    new = (before >> 2 != key >> 2) & (key < end)
    both = key | torch.where(after >> 2 == key >> 2, after & 3, 0)
    place = _cumulated(new)  # of the first entry at or after each one
    joined = torch.full((last + 1,), end, device=key.device)
    joined = joined.scatter_(0, torch.where(new, place.narrow(0, 0, last), last), torch.where(new, both, end))
    used = joined < end
    entries = torch.where(used, joined & ((1 << BLOCK_BITS + 2) - 1), 0).int()
    starts = torch.arange(lines + 1, device=key.device) << BLOCK_BITS + 2
    starts = place.index_select(0, torch.searchsorted(key, starts))
    counts, starts = (t.view(heads, rows, kinds) for t in (starts.diff().int(), starts.narrow(0, 0, lines)))
    if reverse:
        counts, starts = counts.flip(1), starts.flip(1)
    lists = [
        tuple(t.select(2, kind).clone(memory_format=torch.contiguous_format) for t in (counts, starts))
        for kind in range(kinds)
    ]
    return _Union(entries, lists, joined >> BLOCK_BITS + 2, used, of.sizes, reverse)


def _locks(union: _Union, sequence: torch.Tensor, sequences: int, *, twice: bool) -> torch.Tensor:
    """int32 [E + 1]: for each entry how many entries add to its tile of queries first; `twice`: for `turn_of_add`."""
    heads, rows, kinds = union.sizes
    head, row = union.line // (rows * kinds), union.line // kinds % rows
    row = (rows - 1 - row if union.reverse else row).clamp(0, rows - 1)
    of = head * sequences + sequence.index_select(0, row)
    key = torch.where(union.used, of << BLOCK_BITS | (union.entries >> 2), heads * sequences << BLOCK_BITS)
    ordered, source = key.sort(stable=True)
    lock = torch.arange(key.numel(), device=key.device) - torch.searchsorted(ordered, ordered)
    if twice:
        place = torch.stack([ordered, (union.line // kinds).index_select(0, source)])
        same = torch.nn.functional.pad((place.diff() == 0).all(0), (1, 1))  # as the entry before each one
        second, first = same.narrow(0, 0, key.numel()).long(), same.narrow(0, 1, key.numel()).long()
        lock = 4 * (lock - second) + 2 * second + (first + second)
    locks = torch.zeros_like(union.entries).scatter_(0, source, lock.int())
    return torch.where(union.used, locks, 0)


def _tiles_of(block: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tiles that a block of `factor` halves lies in, and which halves of them are its: [(factor + 1) / 2, E]."""
    first = block * factor
    tile = first // 2 + torch.arange((factor + 1) // 2, device=block.device).view(-1, 1)
    low, high = ((2 * tile + half >= first) & (2 * tile + half < first + factor) for half in (0, 1))
    return tile, low + 2 * high.long()


def _in_place_of(lists: Any, union: _Union, mask: tuple[torch.Tensor, ...], full: tuple[torch.Tensor, ...] | None):
    """`lists` with the union's in their place, for as many heads."""
    heads = lists.mask_block_cnt.shape[0 if is_packed(lists) else 1]
    (counts, starts), (full_counts, full_starts) = (
        (None, None) if kind is None else tuple(t.expand(heads, -1) for t in kind) for kind in (mask, full)
    )
    return lists._replace(
        mask_block_cnt=counts,
        mask_block_idx=union.entries,
        full_block_cnt=full_counts,
        full_block_idx=None if full is None else union.entries,
        cu_block_idx_offsets=starts,
        cu_full_block_idx_offsets=full_starts,
        block_size=(TILE, lists.block_size[1]),
        dq_write_order=None,
        dq_write_order_full=None,
        spt=None,
    )


def _cumulated(numbers: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(numbers.cumsum(0), (1, 0))
