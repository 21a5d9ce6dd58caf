"""Forward lists with a bit per token: a tile of packed heads has the union of its tokens' own lists.

With `BlockSparseTensorsTorch.mask_block_bits` each token has block lists of its own. The query heads of a key/value
head are packed: row r of a sequence is token r // G and head r % G, and list i belongs to the `BIT_ROWS` rows from
BIT_ROWS * i on. Its entries are mask blocks of `BIT_KEYS` keys that any of its tokens lists. Bit j % 32 of word j // 32
says that token BIT_ROWS * i // G + j lists the block: 1 word for G >= 4, 2 for G = 2 and 3, 4 for G = 1. Lists per
query head have G = 1. Two or four times as many words, up to 4, are bits per half or quarter of a block: those of the
first part, then the next. Causal and window mask further keys.

    counts [B, Hkv, tiles], entries [B, Hkv, tiles, n], bits [B, Hkv, tiles, n, words]

Packed sequences may have the other forms of `formats`; cu_total_m_blocks then counts tiles of rows. Readers are SM90
forward, `fwd_unions` and the dq pass; everything else refuses such lists.
"""

from dataclasses import replace
from math import gcd
from typing import Any

import torch

from flash_attn.cute.lists.tiling import BIT_ROWS, STEP

BIT_KEYS = STEP // 2  # keys of a block
WORDS = (1, 2, 4)  # possible numbers of words per entry


def words_for(heads: int) -> int:
    """Least number of words per entry with `heads` query heads per key/value head."""
    tokens = (heads - gcd(BIT_ROWS, heads) + BIT_ROWS - 1) // heads + 1  # in a tile, at most
    return next(n for n in WORDS if tokens <= 32 * n)


def has_bits(lists: Any) -> bool:
    """True if `lists` (or None) have `mask_block_bits`."""
    return getattr(lists, "mask_block_bits", None) is not None


def refuse_bits(what: str, *lists: Any) -> None:
    """Refuse lists with bits; `what` names the reader that does not support them."""
    if any(map(has_bits, lists)):
        raise NotImplementedError(f"mask_block_bits: lists with a bit for each token are not read by {what}")


def of_rows(lists: Any, heads: Any, group: int, pack_gqa: bool) -> tuple[Any, bool]:
    """Check a forward call's lists with bits: (lists with block_size, whether heads are packed).

    heads: `ListHeads` of the lists. group: query heads per key/value head.
    """
    group = rows_of_token(heads, group)
    bits, idx = lists.mask_block_bits, lists.mask_block_idx
    name = "block_sparse_tensors.mask_block_bits"
    if lists.block_size not in (None, (BIT_ROWS, BIT_KEYS)):
        raise ValueError(
            f"block_size is {lists.block_size}: {name} belongs to lists of ({BIT_ROWS} rows of packed heads, "
            f"{BIT_KEYS} keys)"
        )
    if lists.full_block_cnt is not None or lists.full_block_idx is not None:
        raise ValueError(f"full_block_cnt and full_block_idx must be None with {name}: every entry is a mask block")
    if group > 1 and not pack_gqa:
        raise ValueError(f"{name} of lists for each key/value head needs packed heads: pack_gqa is {pack_gqa}")
    if bits.dtype != torch.int32 or bits.shape[:-1] != idx.shape or bits.shape[-1] not in WORDS:
        raise ValueError(
            f"{name} is {bits.dtype} {tuple(bits.shape)}, expected int32 of mask_block_idx's shape {tuple(idx.shape)} "
            f"and a dimension of 1, 2 or 4 words"
        )
    if bits.shape[-1] < words_for(group):
        raise ValueError(
            f"{name} has {bits.shape[-1]} words an entry, but {BIT_ROWS} rows of {group} packed heads need "
            f"{words_for(group)}"
        )
    if bits.device != idx.device:
        raise ValueError(f"{name} is on {bits.device}, mask_block_idx on {idx.device}")
    return lists._replace(block_size=(BIT_ROWS, BIT_KEYS)), group > 1


def rows_of_token(heads: Any, group: int) -> int:
    """Rows per token in a tile: `group` if its query heads share a list, else 1. heads: `ListHeads`."""
    return group if heads.packable else 1


def forward_config(lists: Any, *, group: int, seqlen_q: int | None, packed: Any, **given: Any) -> Any:
    """`normalize_block_sparse_config` for lists with bits, whose rows are query * group + head."""
    from flash_attn.cute.block_sparsity import get_block_sparse_broadcast_pattern, normalize_block_sparse_config

    if packed is not None and packed.longest[0] is not None:
        packed = replace(packed, longest=(packed.longest[0] * group, packed.longest[1]))
    rows = None if seqlen_q is None else seqlen_q * group
    config = normalize_block_sparse_config(lists, seqlen_q=rows, packed=packed, **given)
    if config.tensors.mask_block_bits is None:
        idx, bits = config.tensors.mask_block_idx, lists.mask_block_bits
        if bits.stride(-1) != 1:
            bits = bits.contiguous()
        tensors = config.tensors._replace(mask_block_bits=bits.expand(*idx.shape, -1))
        config = config._replace(tensors=tensors)
    return config._replace(broadcast_pattern=get_block_sparse_broadcast_pattern(config.tensors))


def words(lists: Any, list_parts: int) -> int:
    """Words of bits per entry that SM90 forward reads; 0 without bits.

    list_parts: result of `tiling.forward_parts`.
    """
    if not has_bits(lists):
        return 0
    if not list_parts:
        raise NotImplementedError(
            "mask_block_bits: SM90 forward reads them where q, k and v have head dimension 64, 96 or 128, without "
            "score_mod, softcap or compress_factor"
        )
    return lists.mask_block_bits.shape[-1]


def block_sums(q: torch.Tensor, heads: int, blocks: int) -> torch.Tensor:
    """An uninitialised tensor for `fwd_sm90.block_sums`; blocks: most blocks of 64 keys that a token lists."""
    rows, group = q.shape[:-2].numel(), q.shape[-2] // heads
    sums = torch.empty(rows, heads, blocks * group, dtype=torch.float32, device=q.device)
    sums.__leading_dim__, sums.__assumed_align__ = 2, 4
    return sums


def check_pages(page_size: int) -> None:
    """Raise NotImplementedError if a block of a list with bits may straddle two pages of `page_size` keys."""
    if page_size % BIT_KEYS:
        raise NotImplementedError(
            f"mask_block_bits: SM90 forward reads lists over pages of a multiple of {BIT_KEYS} keys, got {page_size}"
        )
