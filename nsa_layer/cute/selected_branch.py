"""The selected branch: tiles and passes of its attention calls, and the block lists and masks that make them sparse."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flash_attn.cute.block_lists import transpose_lists
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.bwd_dkdv_sm90.spec import KeyPairs
from flash_attn.cute.bwd_sm90 import two_pass
from flash_attn.cute.lists.backward_plan import plan_backward
from flash_attn.cute.lists.formats import cu_total_blocks
from nsa_layer.call_spec import CallSpec
from nsa_layer.config import NSAConfig, takes_unions
from nsa_layer.cute.branch_options import position_options, token_options
from nsa_layer.cute.mask_mods import causal_mask, selected_mask
from nsa_layer.cute.packing import Packing
from nsa_layer.cute.token_unions import Extents, key_pairs, query_lists
from nsa_layer.cute.torch_block_lists import (
    KV_TILE,
    block_bitmap,
    choices_of_sequences,
    joined_rows,
    selected_lists,
)
from nsa_layer.kernels.block_lists import make as list_kernels
from nsa_layer.kernels.launch import are_aligned
from nsa_layer.kernels.union_lists.sizes import KEYS
from nsa_layer.support import device_arch, hopper_kv_tile, kernel_family


def forward_tile(device: torch.device, block_size: int = KV_TILE) -> tuple[int, int]:
    """(queries, keys) of a list entry in forward.

    Blackwell's kernel works on two tiles of 128 queries at once; Hopper's takes tiles of 64 keys too.
    """
    if not _on_hopper(device):
        return 256, KV_TILE
    return 128, hopper_kv_tile(block_size)


def backward_tile(device: torch.device, block_size: int = KV_TILE) -> tuple[int, int]:
    """(queries, keys) of a list entry in backward: on Hopper blocks of 64 keys have tiles of their own too.

    A tile of 128 keys adds half as much to dq, but reads a bitmap for the blocks that are not listed: half as fast.
    """
    return 128, hopper_kv_tile(block_size) if _on_hopper(device) else KV_TILE


def use_split_dq(q: torch.Tensor, v: torch.Tensor, spec: CallSpec) -> bool:
    """True if backward computes dq in a pass of its own, over forward's lists: on Hopper, where that is faster.

    It always is in deterministic mode, so that lists need no order of adds to dq.
    """
    if not _on_hopper(q.device):
        return False
    config = spec.config
    tiles = (tile(q.device, config.block_size) for tile in (forward_tile, backward_tile))
    sizes = ((math.lcm(config.q_tile, tile_q), kv_tile) for tile_q, kv_tile in tiles)
    forward, backward = (BlockSparseTensorsTorch(None, None, block_size=size) for size in sizes)
    return two_pass.takes(
        None, arch=90, q=q, v=v, forward=forward, backward=backward, deterministic=config.deterministic
    )


def takes_pages(config: NSAConfig, k_cache: torch.Tensor, v_cache: torch.Tensor, *, listed: bool) -> bool:
    """True if the branch reads keys on pages, [pages, page, Hkv, D]; listed: of the caller's lists."""
    aligned = k_cache.shape[1] % KEYS == 0 and are_aligned(k_cache) and are_aligned(v_cache)
    return aligned and takes_unions(config, listed=listed) and _on_hopper(k_cache.device)


def _on_hopper(device: torch.device) -> bool:
    return kernel_family(device_arch(device.index)) == 90


@dataclass(frozen=True)
class Sparsity:
    """Sparsity of an attention call: the block lists, the mask inside of tiles, and the tensors that it reads.

    pack_gqa: the lists are those of tiles of packed heads.
    q_offset: of causal queries that are a stretch of a longer context.
    """

    tensors: BlockSparseTensorsTorch
    causal: bool = False
    pack_gqa: bool | None = None
    mask_mod: Callable | None = None
    aux_tensors: tuple[torch.Tensor, ...] = ()
    q_offset: torch.Tensor | None = None

    def options(self) -> dict:
        """The keyword arguments that the kernels take."""
        options: dict = dict(block_sparse_tensors=self.tensors, causal=self.causal) | position_options(self.q_offset)
        if self.pack_gqa is not None:
            options["pack_gqa"] = self.pack_gqa
        if self.mask_mod is not None:
            options |= dict(mask_mod=self.mask_mod, aux_tensors=list(self.aux_tensors) or None)
        return options


def selected_sparsity(
    block_indices: torch.Tensor,
    T: int,
    heads: tuple[int, int],
    *,
    spec: CallSpec,
    backward: bool,
    packing: Packing | None = None,
    block_counts: torch.Tensor | None = None,
    S: int | None = None,
    q_offset: torch.Tensor | None = None,
) -> Sparsity:
    """Lists and mask of T queries that attend to the tokens of the listed blocks.

    Args:
        block_indices: int32 [B, Hkv, M, n]; packed [Hkv, tiles of all sequences, n]. Where unions are taken
            [B, M, Hkv, n], packed [tiles, Hkv, n], which have no lists by key tile: `token_pairs`.
        T: tokens of a sequence, packed of all.
        heads: (Hq, Hkv).
        backward: lists by key tile, not by query tile.
        block_counts: int32 [B, Hkv, M]; packed [Hkv, tiles of all sequences]: listed blocks; kernels that make forward
            lists need them.
        S: tokens of keys, like T; None: T.
        q_offset: int32 [B], packed [sequences]: position of the first query among the keys, where unions are taken.

    Raises:
        NotImplementedError: q_offset where unions are not taken.
    """
    config, causal, device = spec.config, spec.causal, block_indices.device
    if spec.by_union:
        Hs, extents = block_indices.shape[-2], Extents.of_layer(T, T if S is None else S, spec, packing, q_offset)
        lists = query_lists(block_indices, heads[0] // Hs, extents)
        return Sparsity(lists, causal, pack_gqa=Hs == heads[1], q_offset=extents.q_offset)
    if q_offset is not None:
        raise NotImplementedError(f"q_offset with q_tile={config.q_tile} on the kernels: tiles below 128 queries alone")
    tile = (backward_tile if backward else forward_tile)(device, config.block_size)
    tile_q, kv_tile = math.lcm(config.q_tile, tile[0]), tile[1]
    # Tiles of listed blocks alone, the same for every query, need no mask but the causal one.
    exact = tile_q == config.q_tile and config.block_size % kv_tile == 0
    # Blackwell's forward masks every tile where it is causal by itself: there a mask_mod leaves full tiles alone.
    hopper = _on_hopper(device)
    plain = exact and (hopper or not causal)
    if block_indices.is_cuda and exact and hopper:
        static = dict(block_size=config.block_size, q_tile=tile_q, kv_tile=kv_tile, causal=causal)
        if packing is not None:
            T, static = packing.longest, static | dict(cu_tiles=packing.cu_tiles, cu_rows=packing.cu_kv_tiles)
        if not backward:
            return Sparsity(list_kernels.forward_lists(block_indices, block_counts, T, **static), causal)
        rows = None if packing is None else packing.total_kv_tiles
        return Sparsity(list_kernels.backward_lists(block_indices, T, heads, rows=rows, **static), causal)
    sequences = [(block_indices, T)]
    cu_seqlens = None
    if packing is not None:
        cu_seqlens = packing.cu_seqlens
        sequences = list(choices_of_sequences(block_indices, spec.lengths, config=config))
    options = dict(config=config, causal=causal, tile_q=tile_q, kv_tile=kv_tile, split=not (plain and hopper))
    lists = [selected_lists(chosen, tokens, **options) for chosen, tokens in sequences]
    if backward:
        tensors = _backward_tensors(lists, [tokens for _, tokens in sequences], heads, cu_seqlens)
    else:
        tensors = _joined(lists, cu_seqlens)
    if plain:
        return Sparsity(tensors, causal)
    if exact and causal:
        return Sparsity(tensors, mask_mod=causal_mask())
    bitmaps = [block_bitmap(chosen, tokens, config=config, tile_q=tile_q) for chosen, tokens in sequences]
    aux: tuple[torch.Tensor, ...] = (bitmaps[0],)
    if cu_seqlens is not None:
        aux = joined_rows(bitmaps)[None], cu_total_blocks(cu_seqlens, tile_q) * (tile_q // config.q_tile)
    mask = selected_mask(config.block_size, config.q_tile, heads[0] // heads[1], causal, cu_seqlens is not None)
    return Sparsity(tensors, mask_mod=mask, aux_tensors=aux)


def token_pairs(
    block_indices: torch.Tensor,
    T: int,
    heads: tuple[int, int],
    *,
    S: int,
    spec: CallSpec,
    packing: Packing | None,
    q_offset: torch.Tensor | None,
) -> KeyPairs:
    """The tokens that list each block, for the kernel of dk and dv; arguments as for `selected_sparsity`."""
    return key_pairs(block_indices, heads, Extents.of_layer(T, S, spec, packing, q_offset))


def _backward_tensors(
    lists: list[BlockSparseTensorsTorch],
    lengths: list[int],
    heads: tuple[int, int],
    cu_seqlens: torch.Tensor | None,
) -> BlockSparseTensorsTorch:
    """Forward lists of a batch, or of each sequence, as backward takes them: transposed.

    On Hopper a batch with GQA has a plan: a key block that every query chooses is work for many CTAs, not for one.
    """
    parts = [
        transpose_lists(forward, -(-tokens // forward.block_size[1]), width=forward.mask_block_cnt.shape[2])
        for forward, tokens in zip(lists, lengths, strict=True)
    ]
    (Hq, Hkv), (rows, width) = heads, lists[0].mask_block_idx.shape[2:]
    if cu_seqlens is not None or Hq == Hkv or not _on_hopper(parts[0].mask_block_idx.device):
        return _joined(parts, cu_seqlens, backward=True)
    # A row's mask and full tiles together are no more than either list has room for.
    return plan_backward(parts[0], listed=rows * width, num_heads=Hq, num_heads_kv=Hkv, num_q_blocks=rows)


def _joined(
    parts: list[BlockSparseTensorsTorch], cu_seqlens: torch.Tensor | None, *, backward: bool = False
) -> BlockSparseTensorsTorch:
    """The rows of all packed sequences, one after the other; a batch as it is."""
    if cu_seqlens is None:
        return parts[0]
    rows = ("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx")
    joined = parts[0]._replace(**{name: joined_rows([getattr(part, name) for part in parts]) for name in rows})
    starts = cu_total_blocks(cu_seqlens, joined.block_size[backward])
    return joined._replace(**{"cu_total_n_blocks" if backward else "cu_total_m_blocks": starts})


def selected_options(sparsity: Sparsity, packing: Packing | None) -> dict:
    """Options of the selected branch's call, in the direction that the lists are for."""
    return sparsity.options() | token_options(packing)


def dq_options(sparsity: Sparsity, packing: Packing | None) -> dict:
    """Options of the selected branch's dq pass, over the lists of forward, and of `forward_unions`."""
    options = selected_options(sparsity, packing)
    for name in ("max_seqlen_k", "pack_gqa"):
        options.pop(name, None)
    return options | dict(lists=options.pop("block_sparse_tensors"))
