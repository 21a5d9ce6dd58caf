"""The semaphore of a CTA of SM100 backward that has nothing to add, as a program for the CPU.

Importing this imports the DSL, which looks at the architecture once a process.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from flash_attn.cute.lists import rows as list_rows

NOT_YET = -1000  # of a flag, where somebody would have waited


class Flags:
    """Stands for `barrier`, of threads that run one after the other."""

    @staticmethod
    @cute.jit
    def wait_eq(flags: cute.Pointer, thread: Int32, flag: Int32, value: Int32) -> None:
        own = cute.make_tensor(flags + flag, cute.make_layout(1))
        if thread == 0 and own[0] != value:
            own[0] = Int32(NOT_YET)

    @staticmethod
    @cute.jit
    def arrive_inc(flags: cute.Pointer, thread: Int32, flag: Int32, value: Int32) -> None:
        own = cute.make_tensor(flags + flag, cute.make_layout(1))
        if thread == 0:
            own[0] = own[0] + value


@cute.jit
def pass_semaphore(
    semaphore: cute.Tensor,
    tile: Int32,
    head: Int32,
    batch: Int32,
    group: cutlass.Constexpr[int],
    flags: cutlass.Constexpr[int],
) -> None:
    for thread in cutlass.range(256):
        list_rows.pass_semaphore(semaphore, thread, tile, head, batch, group, flags)
