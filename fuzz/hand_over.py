"""Kernels that hand data over in shared memory, rightly or wrongly: does a race checker know one from the other?

One warp brings blocks of numbers into two stages, two warps add them up; an mbarrier for each stage says that it is
full, another that it is empty, and the steps are a loop at run time, as where attention's backward gets log-sum-exps
and row sums. A right kernel that is reported, as the wrong one is, says that the checker does not follow this way of
handing over; a wrong one that is not, that it does not see it at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from quack import copy_utils

from nsa_layer.kernels.launch import OPTIONS, fake_stream, fake_tensor

WARP = 32
READERS = 2 * WARP
WIDTH = 128  # numbers of a block
STAGES = 2
BLOCKS = 6
BULK, TENSOR, STORES = "bulk", "tensor", "stores"
LANES, SYNC, SHUFFLE, BARRIER = "lanes", "sync", "shuffle", "barrier"
OF_READERS = 1  # the barrier's number
EMPTY = STAGES  # where the barriers of empty stages begin


@dataclass(frozen=True)
class HandOver:
    """One way to hand over.

    Attributes:
        copy: "bulk" (``cp.async.bulk``), "tensor" (``cp.async.bulk.tensor``), or "stores" of the warp's own lanes.
        right: readers wait before they read; else only after it, which is a race.
        named: all warps also meet at a barrier of the CTA between the copy and the reads of each step.
        freed: who says that a stage is empty: each of the reading "lanes", or one lane of each warp, after a "sync" of
            the warp, after a "shuffle" to which every lane brings what it read, or after a "barrier" of all readers,
            as in backward.
    """

    copy: str
    right: bool = True
    named: bool = False
    freed: str = LANES

    @property
    def tag(self) -> str:
        """A part of the kernel's name that no other control has: the DSL names kernels for their fields."""
        return f"copy{self.copy}_right{self.right}_named{self.named}_freed{self.freed}_"

    @cute.jit
    def __call__(self, mX: cute.Tensor, mSums: cute.Tensor, blocks: Int32, stream: cuda.CUstream):
        """mX [blocks * WIDTH] fp32 -> mSums [READERS]: of the numbers that each reader adds up."""
        atom, source = None, mX
        if const_expr(self.copy == TENSOR):
            stage = cute.make_layout((WIDTH,))
            atom, source = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), mX, stage, (WIDTH,))
        self.kernel(atom, source, mSums, blocks).launch(grid=[1, 1, 1], block=[WARP + READERS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, atom: cute.CopyAtom | None, mX: cute.Tensor, mSums: cute.Tensor, blocks: Int32):
        tidx, _, _ = cute.arch.thread_idx()
        smem = cutlass.utils.SmemAllocator()
        sX = smem.allocate_tensor(Float32, cute.make_layout((WIDTH, STAGES)), byte_alignment=128)
        barriers = smem.allocate_array(Int64, 2 * STAGES)
        if tidx == 0:
            for stage in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(barriers + stage, WARP if const_expr(self.copy == STORES) else 1)
                cute.arch.mbarrier_init(
                    barriers + EMPTY + stage, READERS if const_expr(self.freed == LANES) else READERS // WARP
                )
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if tidx < WARP:
            self.bring(atom, mX, sX, barriers, blocks, tidx)
        else:
            self.add_up(mSums, sX, barriers, blocks, tidx - WARP)

    @cute.jit
    def bring(
        self,
        atom: cute.CopyAtom | None,
        mX: cute.Tensor,
        sX: cute.Tensor,
        barriers: cute.Pointer,
        blocks: Int32,
        lane: Int32,
    ):
        gX = cute.local_tile(mX, (WIDTH,), (None,))
        if const_expr(self.copy == BULK):
            copy = copy_utils.cpasync_bulk_get_copy_fn(gX, sX)  # as backward does
        if const_expr(self.copy == TENSOR):
            copy, _, _ = copy_utils.tma_get_copy_fn(atom, 0, cute.make_layout(1), gX, sX)
        for block in cutlass.range(blocks, unroll=1):
            stage, turn = block % STAGES, block // STAGES
            full = barriers + stage
            cute.arch.mbarrier_wait(barriers + EMPTY + stage, (turn + 1) % 2)
            if const_expr(self.copy == STORES):
                for i in cutlass.range_constexpr(WIDTH // WARP):
                    sX[i * WARP + lane, stage] = gX[i * WARP + lane, block]
                cute.arch.mbarrier_arrive(full)
            else:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, WIDTH * 4)
                copy(block, stage, tma_bar_ptr=full)
            if const_expr(self.named):
                cute.arch.mbarrier_wait(full, turn % 2)
                cute.arch.sync_threads()

    @cute.jit
    def add_up(self, mSums: cute.Tensor, sX: cute.Tensor, barriers: cute.Pointer, blocks: Int32, reader: Int32):
        total = Float32(0.0)
        for block in cutlass.range(blocks, unroll=1):
            stage, turn = block % STAGES, block // STAGES
            if const_expr(self.right):
                cute.arch.mbarrier_wait(barriers + stage, turn % 2)
            if const_expr(self.named):
                cute.arch.sync_threads()
            for i in cutlass.range_constexpr(WIDTH // READERS):
                total += sX[i * READERS + reader, stage]
            if const_expr(not self.right):  # late: after it, so that the turns still come out even
                cute.arch.mbarrier_wait(barriers + stage, turn % 2)
            self.free(barriers + EMPTY + stage, total, reader)
        mSums[reader] = total

    @cute.jit
    def free(self, empty: cute.Pointer, total: Float32, reader: Int32):
        """Of numbers from 0 on; a release that asks for the sum of all lanes cannot come before their reads."""
        if const_expr(self.freed == LANES):
            cute.arch.mbarrier_arrive(empty)
        elif const_expr(self.freed == SYNC):
            cute.arch.sync_warp()
            if reader % WARP == 0:
                cute.arch.mbarrier_arrive(empty)
        elif const_expr(self.freed == BARRIER):
            cute.arch.barrier(barrier_id=OF_READERS, number_of_threads=READERS)
            if reader % WARP == 0:
                cute.arch.mbarrier_arrive(empty)
        else:
            of_warp = cute.arch.warp_reduction_sum(total)
            if reader % WARP == 0 and of_warp >= 0.0:
                cute.arch.mbarrier_arrive(empty)


CONTROLS = {
    "stores": HandOver(STORES),
    "stores, read too early": HandOver(STORES, right=False),
    "bulk copy": HandOver(BULK),
    "bulk copy, read too early": HandOver(BULK, right=False),
    "bulk copy, and a barrier of the CTA": HandOver(BULK, named=True),
    "bulk copy, freed by one lane after a sync": HandOver(BULK, freed=SYNC),
    "bulk copy, freed by one lane after a shuffle": HandOver(BULK, freed=SHUFFLE),
    "bulk copy, freed by one lane after a barrier": HandOver(BULK, freed=BARRIER),
    "tensor copy": HandOver(TENSOR),
    "tensor copy, read too early": HandOver(TENSOR, right=False),
}


def compiled(control: HandOver) -> object:
    """The kernel, for any number of blocks; needs no GPU."""
    tensors = [fake_tensor(torch.float32, shape, align=128) for shape in ((cute.sym_int(),), (READERS,))]
    return cute.compile(control, *tensors, Int32(1), fake_stream(), options=OPTIONS)


def run(name: str) -> None:
    """Launch a control, by name, on the GPU; AssertionError if a right one's sums are wrong."""
    x = torch.arange(BLOCKS * WIDTH, dtype=torch.float32, device="cuda")
    sums = torch.full((READERS,), float("nan"), device="cuda")
    compiled(CONTROLS[name])(x, sums, BLOCKS)
    torch.cuda.synchronize()
    assert not CONTROLS[name].right or sums.equal(x.view(-1, READERS).sum(0)), f"{name}: other sums, {sums.tolist()}"
