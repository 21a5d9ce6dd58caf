"""What block lists a call has to bring before anything is launched."""

import torch


def _gradient_needed(tensors) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def require_lists_for_gradient(forward, backward, *inputs) -> None:
    """Refuse a gradient whose backward would not walk the blocks that forward walked.

    A direction without lists runs dense: the gradient would be one of another function, and
    nothing would say so. Inference needs no backward lists.

    Raises:
        ValueError: lists for one direction only, and one of `inputs` needs a gradient.
    """
    if (forward is None) == (backward is None) or not _gradient_needed(inputs):
        return
    given, missing = (
        ("block_sparse_tensors", "block_sparse_tensors_bwd")
        if backward is None
        else ("block_sparse_tensors_bwd", "block_sparse_tensors")
    )
    raise ValueError(
        f"{missing} is None while {given} is given and a gradient is needed: forward and backward "
        f"would attend to different blocks. Pass both (backward lists are the transpose: query "
        f"blocks for each key block), or call under torch.no_grad()."
    )
