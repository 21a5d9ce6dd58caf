"""What a planned CTA of SM100 backward works on and waits for: the kernel's own functions as programs for the CPU.

`planned_walk` runs them. Importing this imports the DSL, which looks at the architecture once a process.
"""

from __future__ import annotations

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from flash_attn.cute import block_sparse_utils
from flash_attn.cute.block_sparsity import BlockSparseTensors
from flash_attn.cute.flash_bwd_sm100 import FlashAttentionBackwardSm100
from flash_attn.cute.list_rows import find_row, with_halves
from flash_attn.cute.planned_tiles import PlannedArguments, PlannedScheduler
from flash_attn.cute.tile_scheduler import TileSchedulerArguments

TILE = 128


@cute.jit
def launched_tiles(
    plan: cute.Tensor,
    cu_seqlens: cute.Tensor | None,
    seqused: cute.Tensor | None,
    out: cute.Tensor,
    tiles: Int32,
    subtiles: cutlass.Constexpr[int],
    pair: cutlass.Constexpr[int],
) -> None:
    """out: [key tile, head, sequence, whether there is work] of each CTA of the grid, in the order of their launch.

    tiles: of a sequence, where none has a length of its own. pair: CTAs of a cluster.
    """
    arguments = TileSchedulerArguments(
        tiles, 1, 1, 1, Int32(0), 1, 1, Int32(0), tile_shape_mn=(TILE, TILE), cluster_shape_mn=(pair, 1),
        mCuSeqlensQ=cu_seqlens, mSeqUsedQ=seqused,
    )  # fmt: skip
    params = PlannedScheduler.to_underlying_arguments(PlannedArguments(arguments, plan, subtiles))
    grid, _, _ = PlannedScheduler.get_grid_shape(params)
    for cta in cutlass.range(grid):
        work = PlannedScheduler(params, cta).get_current_work()
        tile, head, sequence, _ = work.tile_idx
        out[cta, 0], out[cta, 1], out[cta, 2], out[cta, 3] = tile, head, sequence, Int32(work.is_valid_tile)


@cute.jit
def adds(
    mask_cnt: cute.Tensor, mask_idx: cute.Tensor, full_cnt: cute.Tensor | None, full_idx: cute.Tensor | None,
    before: cute.Tensor | None, starts: cute.Tensor | None, full_starts: cute.Tensor | None,
    locks: cute.Tensor, full_locks: cute.Tensor | None, out: cute.Tensor,
    sequence: Int32, head: Int32, tile: Int32, seqlen_k: Int32, m_block_max: Int32, release: Int32,
    query_tiles: cutlass.Constexpr[int], subtiles: cutlass.Constexpr[int], pair: cutlass.Constexpr[int],
    halves: cutlass.Constexpr[bool],
) -> None:  # fmt: skip
    """out: [query tile, lock value] of each of the adds to dq of the CTAs of a key tile, in their order; -1 behind.

    release: by how much each of them raises its semaphore.
    """
    lists = with_halves(
        BlockSparseTensors(
            mask_cnt, mask_idx, full_cnt, full_idx, cu_total_n_blocks=before, cu_block_idx_offsets=starts,
            cu_full_block_idx_offsets=full_starts, dq_write_order=locks, dq_write_order_full=full_locks,
        ),
        halves,
    )  # fmt: skip
    kernel = SimpleNamespace(
        spt=True, use_block_sparsity=True, q_subtile_factor=query_tiles, kv_subtile_factor=subtiles,
        cta_group_size=pair, tile_n=TILE, list_halves=halves,
    )  # fmt: skip
    row = tile // subtiles
    masks, mask, fulls, full, count = block_sparse_utils.get_block_sparse_iteration_info_bwd(
        lists, sequence, head, row, q_subtile_factor=query_tiles, m_block_max=m_block_max
    )
    listed = find_row(lists, lists.cu_total_n_blocks, sequence, head, row, Int32(0))
    order, order_full = listed.entries(locks), None
    if cutlass.const_expr(full_locks is not None):
        order_full = listed.entries(full_locks, full=True)
    for place in cutlass.range(count):
        m_block, _ = block_sparse_utils.get_m_block_from_iter_bwd(
            place, masks, mask, fulls, full, q_subtile_factor=query_tiles, m_block_max=m_block_max
        )
        out[place, 0] = m_block
        out[place, 1] = FlashAttentionBackwardSm100._dq_semaphore_lock_value(
            kernel, place, masks, order, order_full, lists, Window(), Keys(seqlen_k), m_block, tile // pair, release
        )


class Keys:
    """Stands for a SeqlenInfoQK."""

    def __init__(self, seqlen_k: Int32) -> None:
        self.seqlen_k = seqlen_k


class Window:
    """Stands for a BlockInfo, whose answer lists make no use of."""

    def get_n_block_max_for_m_block(self, seqlen: Keys, m_block: Int32) -> Int32:
        return Int32(0)
