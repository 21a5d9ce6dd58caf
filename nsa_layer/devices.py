"""The device that a command is asked to work on."""

from __future__ import annotations

import torch


def usable_device(name: str) -> torch.device:
    """The device of this name, such as "cpu" or "cuda:0", after asking PyTorch for it; nothing is allocated on a GPU.

    Raises:
        ValueError: PyTorch knows no such device, or there is none here.
    """
    try:
        device = torch.device(name)
        if device.type == "cuda":
            torch.cuda.get_device_properties(device)
        else:
            torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device must be one that PyTorch can use here, got {name!r}: {reason}") from error
    return device
