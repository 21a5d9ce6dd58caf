"""How many multiprocessors a persistent kernel's grid is built for, without needing a GPU to compile."""

import os
from functools import lru_cache

from cutlass.utils import HardwareInfo

from flash_attn.cute.cute_dsl_utils import get_num_sms_for_selection


def target_sm_count() -> int:
    """Multiprocessors of the compilation target.

    The count is a constant of the compiled grid and bounds it; a kernel compiled for another count
    is slower, never wrong. So a stated target (FLASH_ATTENTION_NUM_SMS, as for tile selection)
    wins over the device at hand, and only without one is the driver asked.
    """
    if os.getenv("FLASH_ATTENTION_NUM_SMS") is None:
        return _device_sm_count()
    # The override ignores both arguments; calling it keeps one parser and one error message.
    return get_num_sms_for_selection(device_index=0, arch=0)


@lru_cache(maxsize=None)
def _device_sm_count() -> int:
    """What the driver says; asked once, for calls of backward ask too."""
    return HardwareInfo().get_device_multiprocessor_count()
