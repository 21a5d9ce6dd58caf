"""TMA loads of packed sequences, bounded by the sequence's end: rows past it are zeros.

The last tile of a sequence reaches into the next one. Its scores there are masked, but a probability of 0 times a row
of v is NaN where the neighbour has NaN or inf; likewise the products of backward. quack's ragged tensors, with two more
dimensions, are bounded by an offset and a length; loads do not support their shifted base pointer
(``ptr_shift=False``). A sequence may have up to 2**30 tokens, and all together fewer than 2**31 - 1.

Batched sequences have their own dimension and need no bound; nor do packed queries with a group's heads folded in,
whose rows past the end are not stored.
"""

from typing import Optional

import cutlass.cute as cute
from cutlass import Int32
from quack import copy_utils

RANK = 5


def bounded(tensor: Optional[cute.Tensor], cu_seqlens: Optional[cute.Tensor], dim: int = 0) -> Optional[cute.Tensor]:
    """The tensor to make a TMA atom of: for packed sequences a ragged one, which `sequence_of` slices.

    tensor: of three dimensions if ``cu_seqlens`` is given; None stays None. dim: the tokens' dimension.
    """
    if tensor is None or cu_seqlens is None:
        return tensor
    return copy_utils.create_ragged_tensor_for_tma(tensor, ragged_dim=dim, ptr_shift=False)


def bounded_heads(tensor: cute.Tensor, cu_seqlens: Optional[cute.Tensor], dim: int = 0) -> cute.Tensor:
    """`bounded` for [.., .., ((group, key/value heads), batch)]: all heads in one mode, k and v without groups."""
    if cu_seqlens is None:
        return tensor
    (group, heads), (member, head) = tensor.shape[2][0], tensor.stride[2][0]
    shared = isinstance(member, int) and member == 0
    shape, stride = (heads, head) if shared else (group * heads, member)
    layout = cute.make_layout((*tensor.shape[:2], shape), stride=(*tensor.stride[:2], stride))
    return bounded(cute.make_tensor(tensor.iterator, layout), cu_seqlens, dim)


def is_bounded(tensor: cute.Tensor) -> bool:
    """True for a TMA tensor made from the result of `bounded` for packed sequences."""
    return cute.rank(tensor) == RANK


def sequence_of(tensor: cute.Tensor, offset: Int32, length: Int32, dim: int = 0) -> cute.Tensor:
    """Tokens offset .. offset + length - 1 of a `bounded` tensor, counted from 0 in the result."""
    return copy_utils.offset_ragged_tensor(tensor, offset, length, ragged_dim=dim, ptr_shift=False)


def offset_tokens(tensor: cute.Tensor, offset: tuple, length: Int32, dim: int = 0) -> cute.Tensor:
    """`sequence_of`; for a tensor that is not bounded, the tensor from `offset` on in all dimensions."""
    return sequence_of(tensor, offset[dim], length, dim) if is_bounded(tensor) else cute.domain_offset(offset, tensor)
