"""What block lists a call has to bring before anything is launched."""

import torch

from flash_attn.cute.call_options import edges


def _gradient_needed(tensors) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def require_lists_for_gradient(forward, backward, *inputs, mask_mod, causal, window_size):
    """Refuse a gradient whose backward cannot walk the blocks that forward walked.

    A direction without lists runs dense, under the call's mask. Lists of the other direction may say the same as a
    mask_mod, causal or a window, and are taken at their word. Without any of them the gradient would be one of another
    function. Inference needs no backward lists.

    Returns:
        (left, right) of the window, causal or not, that such lists of one direction have to list all of, for
        `validate_call`; None where there is nothing to compare: under a mask_mod nobody but the kernel can say.

    Raises:
        ValueError: lists for one direction only, no mask, and one of `inputs` needs a gradient.
    """
    if (forward is None) == (backward is None) or not _gradient_needed(inputs):
        return None
    if mask_mod is not None:
        return None
    window = edges(causal, window_size)
    if window != (None, None):
        return window
    given, missing = (
        ("block_sparse_tensors", "block_sparse_tensors_bwd")
        if backward is None
        else ("block_sparse_tensors_bwd", "block_sparse_tensors")
    )
    raise ValueError(
        f"{missing} is None while {given} is given, nothing is masked and a gradient is needed: forward and backward "
        f"would attend to different blocks. Pass both (backward lists are the transpose: query blocks for each key "
        f"block), or the mask that the lists stand for (mask_mod, causal or window_size), or call under "
        f"torch.no_grad()."
    )
