"""The selected branch: the block lists of its attention calls, and the options that these take."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.bwd_dkdv_sm90.spec import KeyPairs
from flash_attn.cute.bwd_sm90 import two_pass
from nsa_layer.call_spec import CallSpec
from nsa_layer.config import NSAConfig
from nsa_layer.cute.branch_options import position_options, token_options
from nsa_layer.cute.packing import Packing
from nsa_layer.cute.token_unions import Extents, key_pairs, query_lists
from nsa_layer.kernels.block_lists import make as list_kernels
from nsa_layer.kernels.launch import are_aligned
from nsa_layer.kernels.union_lists.sizes import KEYS
from nsa_layer.support import device_arch, hopper_kv_tile, kernel_family, reads_unions


def use_split_dq(q: torch.Tensor, v: torch.Tensor, spec: CallSpec) -> bool:
    """True if backward of lists of key tiles computes dq in a pass of its own, over forward's lists, where that is
    faster; always in deterministic mode, so that lists need no order of adds to dq."""
    config = spec.config
    lists = BlockSparseTensorsTorch(None, None, block_size=(config.q_tile, hopper_kv_tile(config.block_size)))
    return two_pass.takes(None, arch=90, q=q, v=v, forward=lists, backward=lists, deterministic=config.deterministic)


def takes_pages(config: NSAConfig, k_cache: torch.Tensor, v_cache: torch.Tensor, *, listed: bool) -> bool:
    """True if the branch reads keys on pages, [pages, page, Hkv, D]; listed: of the caller's lists."""
    aligned = k_cache.shape[1] % KEYS == 0 and are_aligned(k_cache) and are_aligned(v_cache)
    return aligned and reads_unions(config, listed=listed) and _on_hopper(k_cache.device)


def _on_hopper(device: torch.device) -> bool:
    return kernel_family(device_arch(device.index)) == 90


@dataclass(frozen=True)
class Sparsity:
    """Block lists of an attention call.

    pack_gqa: the lists are those of tiles of packed heads.
    q_offset: of causal queries that are a stretch of a longer context.
    """

    tensors: BlockSparseTensorsTorch
    causal: bool
    pack_gqa: bool | None = None
    q_offset: torch.Tensor | None = None

    def options(self) -> dict:
        """The keyword arguments that the kernels take."""
        options: dict = dict(block_sparse_tensors=self.tensors, causal=self.causal) | position_options(self.q_offset)
        return options if self.pack_gqa is None else options | dict(pack_gqa=self.pack_gqa)


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
    """Lists of T queries that attend to the tokens of the listed blocks.

    Args:
        block_indices: int32 [B, Hkv, M, n]; packed [Hkv, tiles of all sequences, n]. Where unions are read
            [B, M, Hkv, n], packed [tiles, Hkv, n], which have no lists by key tile: `token_pairs`.
        T: tokens of a sequence, packed of all.
        heads: (Hq, Hkv).
        backward: lists by key tile, not by query tile.
        block_counts: int32 [B, Hkv, M]; packed [Hkv, tiles of all sequences]: listed blocks; forward lists of key
            tiles need them.
        S: tokens of keys, like T; None: T.
        q_offset: int32 [B], packed [sequences]: position of the first query among the keys, where unions are read.

    Raises:
        NotImplementedError: q_offset where unions are not read.
    """
    config, causal = spec.config, spec.causal
    if reads_unions(spec.config, listed=spec.listed):
        Hs, extents = block_indices.shape[-2], Extents.of_layer(T, T if S is None else S, spec, packing, q_offset)
        lists = query_lists(block_indices, heads[0] // Hs, extents)
        return Sparsity(lists, causal, pack_gqa=Hs == heads[1], q_offset=extents.q_offset)
    if q_offset is not None:
        raise NotImplementedError(f"q_offset with q_tile={config.q_tile} on the kernels: tiles below 128 queries alone")
    size = config.block_size
    static = dict(block_size=size, q_tile=config.q_tile, kv_tile=hopper_kv_tile(size), causal=causal)
    if packing is not None:
        T, static = packing.longest, static | dict(cu_tiles=packing.cu_tiles, cu_rows=packing.cu_kv_tiles)
    if not backward:
        return Sparsity(list_kernels.forward_lists(block_indices, block_counts, T, **static), causal)
    rows = None if packing is None else packing.total_kv_tiles
    return Sparsity(list_kernels.backward_lists(block_indices, T, heads, rows=rows, **static), causal)


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


def selected_options(sparsity: Sparsity, packing: Packing | None) -> dict:
    """Options of the selected branch's call, in the direction that the lists are for."""
    return sparsity.options() | token_options(packing)


def dq_options(sparsity: Sparsity, packing: Packing | None) -> dict:
    """Options of the selected branch's dq pass, over the lists of forward, and of `forward_unions`."""
    options = selected_options(sparsity, packing)
    for name in ("max_seqlen_k", "pack_gqa"):
        options.pop(name, None)
    return options | dict(lists=options.pop("block_sparse_tensors"))
