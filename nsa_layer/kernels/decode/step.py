"""A step on caches for few queries, in one launch or two; `supports` says for which calls.

No number on the device is read by the host: grids follow from shapes, and so does the workspace.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from flash_attn.cute.runtime.own_device import target_sm_count
from nsa_layer.call import COMPRESSED_CACHES, TOKEN_CACHES, Call
from nsa_layer.config import BRANCHES
from nsa_layer.kernels.decode.compressed import CompressedDecode
from nsa_layer.kernels.decode.index import MOST_INDEX_ROWS, IndexDecode
from nsa_layer.kernels.decode.selected import SelectedDecode
from nsa_layer.kernels.decode.spec import (
    KEYS,
    MOST_OF_CLUSTER,
    MOST_QUERIES,
    RESIDENT,
    ROWS,
    WARP,
    WARPS,
    DecodeSpec,
    OutputTensors,
    StepTensors,
)
from nsa_layer.kernels.gating.forward import readable_gates, readable_weight
from nsa_layer.kernels.launch import launch
from nsa_layer.support import KERNEL_DTYPES, MOST_BLOCKS, WIDEST_IN_DECODE

Tensor = torch.Tensor
MOST_SPLITS = 48
EACH = (1, 2, 4)  # blocks in one thread
# After `CompressedDecode`, the last launch does not read these; v_cmp_scale it does: a factor of the branch's sums.
WITHOUT_COMPRESSED = {
    name: None for name in StepTensors._fields if ("cmp" in name or "compress" in name) and name != "v_cmp_scale"
}
APART = 2  # with this many times as many warps, compressed keys are worth a launch of their own
OVERHEAD = 3  # steps that take as long as a CTA's prologue and epilogue


def supports(call: Call) -> bool:
    """True if `decode_step` computes such a call."""
    cache, config = call.cache, call.config
    new = [x for x in (call.q, *call[1:3], *call[9:13]) if x is not None]
    caches = cache.named((*TOKEN_CACHES, *COMPRESSED_CACHES)).values()
    if not 0 < call.longest <= MOST_QUERIES or call.block_indices is not None:
        return False
    if not config.by_token or config.block_size % KEYS or config.block_counts > MOST_BLOCKS:
        return False
    if call.q.dtype not in KERNEL_DTYPES or not (_has_scores if config.rule == "index" else _has_compressed)(call):
        return False
    if max(call.q.shape[-1], cache.v_cache.shape[-1]) > WIDEST_IN_DECODE:
        return False
    if call.k is None and (call.k_cmp is not None or call.v_cmp is not None):
        return False
    if not all(map(_is_aligned, (*caches, *new))):
        return False
    return not _is_ragged(call) or (call.k_cmp is None and call.v_cmp is None)


def _has_compressed(call: Call) -> bool:
    """True if the call computes all branches, with compressed keys and values in caches of the same slots."""
    k_cmp, v_cmp = call.cache.k_cmp_cache, call.cache.v_cmp_cache
    if call.config.branches != BRANCHES or k_cmp is None or v_cmp is None:
        return False
    return k_cmp.shape[:2] == v_cmp.shape[:2]


def _has_scores(call: Call) -> bool:
    """True if the call has no compressed branch, and at most `MOST_INDEX_ROWS` queries for each index key."""
    sharing = call.cache.k_cache.shape[2] // call.cache.k_index_cache.shape[2]
    return "compressed" not in call.config.branches and call.longest * sharing <= MOST_INDEX_ROWS


@torch.no_grad()
def decode_step(call: Call, *, lists: Tensor | None = None) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Compute a decode step, appending to the caches in place; returns o and the branches' log-sum-exps.

    Args:
        lists: int32 [B, most queries of a sequence, Hkv, width of lists], written: the blocks that each token lists.
    """
    q, cache, B, T = call.q, call.cache, call.B, call.longest
    cu_seqlens_q = call.cu_seqlens if _is_ragged(call) else None

    def rows(x: Tensor | None) -> Tensor | None:
        """[B, T, ...] or [1, total, ...]"""
        if x is None or not call.packed:
            return x
        return x.unsqueeze(0) if cu_seqlens_q is not None else x.unflatten(0, (B, -1))

    kernel, (cmp, slc, warps) = _kernel_spec(call, T), _splits(call, T)
    Hkv, R = cache.k_cache.shape[2], kernel.rows
    capacity, by_index = cache.capacity, kernel.by_index
    if by_index:
        compressed_capacity = capacity
        scores = q.new_empty(B, Hkv, T, -(-call.config.num_blocks(capacity) // 4) * 4, dtype=torch.int32)
    else:
        compressed_capacity = cache.k_cmp_cache.shape[1]
        if cache.cmp_page_table is not None:
            compressed_capacity *= cache.cmp_page_table.shape[1]
        length = max(1, -(-call.config.compressed_length(capacity) // kernel.keys)) * kernel.keys
        scores = q.new_empty(B, Hkv, R, length, dtype=torch.float32)
    stats, acc = (
        q.new_empty(B, Hkv, R, cmp, n, dtype=torch.float32) if cmp else None for n in (2, kernel.columns_of_sums)
    )
    valid = torch.empty(B, Hkv, dtype=torch.int32, device=q.device)
    query, o = rows(q), q.new_empty(*q.shape[:-1], kernel.Dv)
    lead = query.shape[:2]
    lses = [torch.empty(lead[0], q.shape[-2], lead[1], dtype=torch.float32, device=q.device) for _ in range(3)]
    step = StepTensors(
        query, cache.k_cache, cache.v_cache, rows(call.k), rows(call.v), cache.k_win_cache, cache.v_win_cache,
        rows(call.k_win), rows(call.v_win), cache.k_cmp_cache, cache.v_cmp_cache, rows(call.k_cmp), rows(call.v_cmp),
        cache.page_table, cache.cmp_page_table, cache.cache_batch_idx, cu_seqlens_q, cache.cache_seqlens,
        cache.k_scale, cache.v_scale, cache.k_win_scale, cache.v_win_scale, cache.k_cmp_scale, cache.v_cmp_scale,
        readable_weight(call.compress_k_weight), readable_weight(call.compress_v_weight), scores, stats, acc, valid,
    )  # fmt: skip
    sizes, scale = (capacity, compressed_capacity), float(call.spec.softmax_scale)
    if by_index:
        Hi, Di = cache.k_index_cache.shape[2:]
        of_index = rows(call.q_index), cache.k_index_cache, rows(call.k_index), cache.k_index_scale
        of_slots = cache.page_table, cache.cache_batch_idx, cu_seqlens_q, cache.cache_seqlens
        splits_blocks = cache.page_table is not None and cache.k_cache.shape[1] % kernel.block_size != 0
        static = (replace(kernel, D=Di), Hkv // Hi, splits_blocks)
        launch("decode_index", IndexDecode, static, *of_index, *of_slots, scores, valid, capacity)
    elif cmp:
        launch("decode_compressed", CompressedDecode, (kernel,), *step, *sizes, scale)
        step = step._replace(**WITHOUT_COMPRESSED)
    gates = readable_weight(call.gate_weight), rows(readable_gates(call.gates))
    out = OutputTensors(lists, *gates, rows(o), *lses)
    static = (kernel, warps, _each(call, slc * warps))
    launch("decode_selected", SelectedDecode, static, *step, *out, *sizes, slc, scale)
    if call.packed:
        lses = [lse.movedim(1, 0).flatten(1) for lse in lses]
    return o, tuple(lses)


def _is_ragged(call: Call) -> bool:
    """True if packed sequences may have different numbers of queries."""
    return call.packed and (call.spec.lengths is None or len(set(call.spec.lengths)) > 1)


def _is_aligned(x: Tensor) -> bool:
    """True if rows are of whole 16 bytes, at multiples of these."""
    step = 16 // x.element_size()
    return x.stride(-1) == 1 and not any(n % step for n in (*x.stride()[:-1], x.storage_offset(), x.shape[-1]))


def _each(call: Call, warps: int) -> int:
    """Blocks of a thread in a round of the selection, which `warps` warps share: enough for one round, up to 4."""
    blocks = call.config.num_blocks(call.cache.capacity)
    return next((each for each in EACH if blocks <= warps * WARP * each), EACH[-1])


def _kernel_spec(call: Call, T: int) -> DecodeSpec:
    config = call.config
    return DecodeSpec(
        D=call.q.shape[-1], Dv=call.cache.v_cache.shape[-1], G=call.q_heads_per_list, T=T, span=config.span,
        stride=config.stride, offset=config.offset, block_size=config.block_size, n=config.block_counts,
        window=config.window_size * config.computes("window"),
        init=config.init_blocks, local=config.local_blocks, appends=call.k is not None,
        by_index=config.rule == "index", columns=config.of_branches(range(3)), keys=_keys_of_step(call),
    )  # fmt: skip


def _keys_of_step(call: Call) -> int:
    """Keys of a warp's step: 16, or 32 in FP8, as many bytes in flight, if there are more row tiles than
    multiprocessors; with several queries 16, since 32 take too many registers."""
    pairs = call.cache.in_fp8 and call.config.block_size % (2 * KEYS) == 0 and call.longest == 1
    return 2 * KEYS if pairs and _token_units(call) > _slots() // RESIDENT else KEYS


def _token_units(call: Call) -> int:
    """Row tiles of the selected branch: up to 16 query heads of one token and key/value head each."""
    Hkv = call.cache.k_cache.shape[2]
    return call.B * Hkv * call.longest * -(-call.q.shape[-2] // Hkv // ROWS)


def _splits(call: Call, T: int) -> tuple[int, int, int]:
    """Split-KV sizes: CTAs that share a row's compressed keys (0: the second launch reads them), CTAs that share the
    rest, and warps of a CTA."""
    config, Hkv = call.config, call.cache.k_cache.shape[2]
    G, units, step = call.q.shape[-2] // Hkv, call.B * Hkv, _keys_of_step(call)
    keys = config.compressed_length(call.cache.capacity), config.block_counts * config.block_size
    length, listed = (-(-count // step) for count in keys)  # in a warp's steps
    rows, units = units * -(-T * G // ROWS), _token_units(call)  # tiles of 16 rows: of all tokens, of one token
    if config.rule == "index":
        return 0, _num_splits(call, listed, units, WARPS, MOST_OF_CLUSTER, clusters=True), WARPS
    cmp = _num_splits(call, length, rows, WARPS, MOST_SPLITS, clusters=False)
    warps = WARPS if units > _slots() // RESIDENT else RESIDENT * WARPS
    slc = _num_splits(call, listed, units, warps, MOST_OF_CLUSTER, clusters=True)
    # A token's selection needs the compressed branch of all heads of its group, in one cluster or of an earlier launch.
    if G > ROWS or rows != units or cmp * WARPS > APART * slc * warps:
        return cmp, slc, warps
    few = _num_splits(call, listed, units, WARPS, MOST_OF_CLUSTER, clusters=True)
    # The second launch's CTAs begin beside the first one's if there are slots for all.
    return (cmp, few, WARPS) if cmp * rows + few * units <= _slots() else (0, slc, warps)


def _num_splits(call: Call, steps: int, units: int, warps: int, most: int, clusters: bool) -> int:
    """CTAs, of `warps` warps each, that share the steps of each of `units` row tiles."""
    steps = -(-steps // warps)
    most = max(1, min(steps, most))
    slots = _slots() * WARPS // warps
    return min(call.cache.num_splits, most) if call.cache.num_splits else _fastest(most, steps, units, slots, clusters)


@lru_cache(maxsize=1024)
def _fastest(most: int, steps: int, units: int, slots: int, clusters: bool) -> int:
    """The number of splits with which all CTAs, `slots` of them at once, take least time."""

    def time(n: int) -> float:
        # A cluster's CTAs need neighbouring slots, so some slots stay empty.
        at_once = slots * 3 // 4 if clusters and n > 2 else slots
        return -(-units * n // at_once) * (-(-steps // n) + OVERHEAD)

    return min(range(1, most + 1), key=time)


def _slots() -> int:
    """CTAs of `WARPS` warps that the GPU runs at once."""
    return target_sm_count() * RESIDENT
