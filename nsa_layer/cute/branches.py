"""The three attention calls: what each asks of the fork's kernels, its forward, and the lists of the selected one.

Shapes are those of one batch of equal length, [B, T, H, D], or of packed sequences, [total, H, D]. Every forward
returns (o, lse); lse is [B, Hq, T], packed [Hq, total], natural, -inf for empty rows. Backward, where the three calls
share what stands around them, is `shared_backward`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nsa_layer.call_spec import CallSpec
from nsa_layer.config import NSAConfig
from nsa_layer.cute.packing import Packing
from nsa_layer.cute.torch_block_lists import (
    KV_TILE,
    BlockLists,
    block_bitmap,
    choices_of_sequences,
    joined_rows,
    selected_lists,
)
from nsa_layer.fork import require_patched
from nsa_layer.support import device_arch, kernel_family

require_patched()

from flash_attn.cute import interface, two_pass_backward  # noqa: E402
from flash_attn.cute.backward_plan import RIGHT_TO_LEFT, plan_backward  # noqa: E402
from flash_attn.cute.block_lists import transpose_lists  # noqa: E402
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch  # noqa: E402
from flash_attn.cute.own_device import on_own_device  # noqa: E402, F401
from flash_attn.cute.packed_lists import cu_total_blocks  # noqa: E402
from flash_attn.cute.write_order import compute_dq_write_order  # noqa: E402
from nsa_layer.cute.mask_mods import causal_mask, selected_mask  # noqa: E402
from nsa_layer.kernels.k2q_csr import make_lists as list_kernels  # noqa: E402

Pair = tuple[torch.Tensor, torch.Tensor]


def forward_tile(device: torch.device, block_size: int = KV_TILE) -> tuple[int, int]:
    """(queries, keys) of a list entry in forward.

    Blackwell's kernel works on two tiles of 128 queries at once; Hopper's takes tiles of 64 keys too.
    """
    if not _on_hopper(device):
        return 256, KV_TILE
    return 128, 64 if block_size == 64 else KV_TILE


def backward_tile(device: torch.device, block_size: int = KV_TILE) -> tuple[int, int]:
    """(queries, keys) of a list entry in backward: on Hopper blocks of 64 keys have tiles of their own too.

    A tile of 128 keys adds half as much to dq, but reads a bitmap for the blocks that are not listed: half as fast.
    """
    return 128, 64 if block_size == 64 and _on_hopper(device) else KV_TILE


def takes_two_passes(q: torch.Tensor, v: torch.Tensor, spec: CallSpec) -> bool:
    """Whether the selected branch's backward takes two passes: dk and dv over lists of keys, dq over forward's."""
    if not _on_hopper(q.device):
        return False
    config = spec.config
    tiles = (tile(q.device, config.block_size) for tile in (forward_tile, backward_tile))
    sizes = ((math.lcm(config.q_tile, tile_q), kv_tile) for tile_q, kv_tile in tiles)
    forward, backward = (BlockSparseTensorsTorch(None, None, block_size=size) for size in sizes)
    return two_pass_backward.takes(
        None, arch=90, q=q, v=v, forward=forward, backward=backward, deterministic=config.deterministic
    )


def _on_hopper(device: torch.device) -> bool:
    return kernel_family(device_arch(device.index)) == 90


@dataclass(frozen=True)
class Sparsity:
    """What makes a kernel call sparse: the tiles, the mask inside them, and what a mask_mod reads."""

    tensors: BlockSparseTensorsTorch
    causal: bool = False
    mask_mod: Callable | None = None
    aux_tensors: tuple[torch.Tensor, ...] = ()

    def options(self) -> dict:
        """The keyword arguments that the kernels take."""
        options: dict = dict(block_sparse_tensors=self.tensors, causal=self.causal)
        if self.mask_mod is not None:
            options |= dict(mask_mod=self.mask_mod, aux_tensors=list(self.aux_tensors) or None)
        return options


def compressed_forward(
    q: torch.Tensor, k_cmp: torch.Tensor, v_cmp: torch.Tensor, *, spec: CallSpec, packing: Packing | None
) -> Pair:
    """q [B, T, Hq, D] over k_cmp [B, Tc, Hkv, D], v_cmp [B, Tc, Hkv, Dv] under the compressed-causal mask."""
    if k_cmp.shape[-3] == 0:
        return _nothing_seen(q, v_cmp.shape[-1])
    return forward(q, k_cmp, v_cmp, spec, compressed_options(spec, packing))


def compressed_options(spec: CallSpec, packing: Packing | None) -> dict:
    """What the compressed branch asks of attention, forward and backward."""
    options: dict = {}
    if packing is not None:
        lengths = dict(max_seqlen_q=packing.longest, max_seqlen_k=packing.longest_blocks)
        options = dict(cu_seqlens_q=packing.cu_seqlens, cu_seqlens_k=packing.cu_blocks, **lengths)
    if spec.causal:
        options |= dict(causal=True, compress_factor=spec.config.stride, compress_offset=spec.config.offset)
    return options


def selected_sparsity(
    block_indices: torch.Tensor,
    T: int,
    heads: tuple[int, int],
    *,
    spec: CallSpec,
    tile: tuple[int, int],
    backward: bool,
    ordered: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    block_counts: torch.Tensor | None = None,
) -> Sparsity:
    """How T queries see the tokens of the listed blocks.

    Args:
        block_indices: [B, Hkv, M, n]; packed [Hkv, tiles of all sequences, n], with ``cu_seqlens``.
        heads: (Hq, Hkv).
        block_counts: [B, Hkv, M]; packed [Hkv, tiles of all sequences]: how many blocks are listed, if that is known.
        tile: as in `forward_tile` and `backward_tile`.
        ordered: backward lists say in which order dq is added to, for one deterministic pass.
    """
    config, causal, device = spec.config, spec.causal, block_indices.device
    tile_q, kv_tile = math.lcm(config.q_tile, tile[0]), tile[1]
    # Tiles with nothing but listed blocks in them, all of them listed for every query, need no mask but the causal one.
    exact = tile_q == config.q_tile and config.block_size % kv_tile == 0
    # Blackwell's forward masks every tile where it is causal by itself: there a mask_mod leaves full tiles alone.
    hopper = _on_hopper(device)
    plain = exact and (hopper or not causal)
    if block_indices.is_cuda and kernels_make_lists(config, tile, block_indices.shape[-1], device, ordered=ordered):
        static = dict(
            block_size=config.block_size, q_tile=tile_q, kv_tile=kv_tile, causal=causal, cu_seqlens=cu_seqlens
        )
        if not backward:
            return Sparsity(list_kernels.forward_lists(block_indices, block_counts, T, **static), causal)
        static |= dict(lengths=spec.lengths, deterministic=ordered)
        return Sparsity(list_kernels.backward_lists(block_indices, T, heads, **static), causal)
    sequences = [(block_indices, T)]
    if spec.lengths is not None:
        sequences = list(choices_of_sequences(block_indices, spec.lengths, config=config))
    options = dict(config=config, causal=causal, tile_q=tile_q, kv_tile=kv_tile, split=not (plain and hopper))
    lists = [selected_lists(chosen, tokens, **options) for chosen, tokens in sequences]
    if backward:
        tensors = _backward_tensors(lists, [tokens for _, tokens in sequences], heads, ordered, cu_seqlens)
    else:
        tensors = _joined([_tensors(part) for part in lists], cu_seqlens)
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


def kernels_make_lists(
    config: NSAConfig, tile: tuple[int, int], width: int, device: torch.device, *, ordered: bool = False
) -> bool:
    """Whether `kernels.k2q_csr` makes the lists of `width` blocks: on Hopper, for tiles without a mask."""
    exact = config.q_tile % tile[0] == 0 and config.block_size % tile[1] == 0
    fits = list_kernels.takes(width, config.block_size, tile[1], deterministic=ordered)
    return exact and fits and _on_hopper(device)


def _tensors(lists: BlockLists) -> BlockSparseTensorsTorch:
    fields = (lists.mask_cnt, lists.mask_idx, lists.full_cnt, lists.full_idx)
    return BlockSparseTensorsTorch(*fields, block_size=lists.block_size)


def _backward_tensors(
    lists: list[BlockLists],
    lengths: list[int],
    heads: tuple[int, int],
    ordered: bool,
    cu_seqlens: torch.Tensor | None,
) -> BlockSparseTensorsTorch:
    """Forward lists of a batch, or of each sequence, as backward takes them: transposed, and in an order or a plan."""
    parts = []
    for forward, tokens in zip(lists, lengths, strict=True):
        rows = forward.mask_cnt.shape[2]
        tensors = transpose_lists(_tensors(forward), -(-tokens // forward.block_size[1]), width=rows)
        if cu_seqlens is None:
            return _planned(tensors, forward, heads, ordered)
        if ordered:
            listed = forward.mask_idx.numel()
            order = compute_dq_write_order(*_tensors(forward)[:4], *tensors[:4], spt=True, listed=listed)
            tensors = tensors._replace(dq_write_order=order[0], dq_write_order_full=order[1], spt=True)
        parts.append(tensors)
    return _joined(parts, cu_seqlens, backward=True)


def _planned(
    tensors: BlockSparseTensorsTorch, forward: BlockLists, heads: tuple[int, int], ordered: bool
) -> BlockSparseTensorsTorch:
    """On Hopper, lists with a plan: a key block that every query chooses is work for many CTAs, not for one."""
    (Hq, Hkv), (rows, width) = heads, forward.mask_idx.shape[2:]
    # A key/value head of its own for each query head is written once, by one CTA: nothing can be shared.
    if not _on_hopper(forward.mask_idx.device) or (Hq == Hkv and not ordered):
        return tensors
    order = dict(deterministic=True, schedule=RIGHT_TO_LEFT) if ordered else {}
    shape = dict(num_heads=Hq, num_heads_kv=Hkv, num_q_blocks=rows)
    # A row's mask and full tiles together are no more than either list has room for.
    return plan_backward(tensors, listed=rows * width, **shape, **order)


def _joined(
    parts: list[BlockSparseTensorsTorch], cu_seqlens: torch.Tensor | None, *, backward: bool = False
) -> BlockSparseTensorsTorch:
    """The rows of all packed sequences, one after the other; a batch as it is."""
    if cu_seqlens is None:
        return parts[0]
    rows = ("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx")
    rows += ("dq_write_order", "dq_write_order_full")
    joined = parts[0]._replace(**{name: joined_rows([getattr(part, name) for part in parts]) for name in rows})
    starts = cu_total_blocks(cu_seqlens, joined.block_size[backward])
    return joined._replace(**{"cu_total_n_blocks" if backward else "cu_total_m_blocks": starts})


def selected_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    spec: CallSpec,
    sparsity: Sparsity,
    packing: Packing | None = None,
) -> Pair:
    """q [B, T, Hq, D] over the tokens of the listed blocks of k, v."""
    return forward(q, k, v, spec, selected_options(sparsity, packing))


def selected_options(sparsity: Sparsity, packing: Packing | None) -> dict:
    """What the selected branch asks of attention, in the direction that the lists are for."""
    return sparsity.options() | _packing_options(packing)


def dq_options(sparsity: Sparsity, packing: Packing | None) -> dict:
    """What the selected branch asks of the dq pass, with the lists of forward."""
    options = selected_options(sparsity, packing)
    options.pop("max_seqlen_k", None)
    return options | dict(lists=options.pop("block_sparse_tensors"))


def window_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, spec: CallSpec, packing: Packing | None
) -> Pair:
    """Sliding window of ``config.window_size`` tokens."""
    return forward(q, k, v, spec, window_options(spec, packing))


def window_options(spec: CallSpec, packing: Packing | None) -> dict:
    """What the window asks of attention, forward and backward."""
    reach = spec.config.window_size - 1
    window = dict(window_size_left=reach, window_size_right=0 if spec.causal else reach)
    return window | _packing_options(packing)


def _packing_options(packing: Packing | None) -> dict:
    """Where packed sequences start, as the kernels take it; {} for a batch."""
    if packing is None:
        return {}
    starts, longest = packing.cu_seqlens, packing.longest
    return dict(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=longest, max_seqlen_k=longest)


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: CallSpec, options: dict) -> Pair:
    """A branch's attention, with what it asks for."""
    o, lse, *_ = interface._flash_attn_fwd(q, k, v, softmax_scale=spec.softmax_scale, return_lse=True, **options)
    return o, lse


def _nothing_seen(q: torch.Tensor, Dv: int) -> Pair:
    lse = q.new_full(q.shape[:-1], float("-inf"), dtype=torch.float32)
    return q.new_zeros(*q.shape[:-1], Dv), lse.mT.contiguous()
