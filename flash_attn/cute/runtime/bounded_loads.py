"""TMA loads of packed sequences that end with the sequence: what lies past it is filled with zeros.

A tile at the end of a sequence reaches into the next one. Its scores there are masked, but a probability of 0 times a
row of v is NaN where the neighbour holds NaN or inf; so are the products of backward. quack's ragged tensors, of two
more dimensions, end where an offset and a length say; loads do not allow their shifted base pointer
(``ptr_shift=False``). A sequence may have up to 2**30 tokens, all together fewer than 2**31 - 1.

A batch's sequences have a dimension of their own and need no bound; nor do packed queries with the heads of a group
folded in: rows past the end are not stored.
"""

from typing import Optional

import cutlass.cute as cute
from cutlass import Int32
from quack import copy_utils

RANK = 5


def bounded(tensor: Optional[cute.Tensor], cu_seqlens: Optional[cute.Tensor], dim: int = 0) -> Optional[cute.Tensor]:
    """The tensor to make a TMA atom of: of packed sequences, one of which `sequence_of` takes a sequence.

    tensor: if ``cu_seqlens`` is given, of three dimensions; None stays None. dim: that of the tokens.
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
    """True of a TMA tensor of packed sequences that was made of a `bounded` one."""
    return cute.rank(tensor) == RANK


def sequence_of(tensor: cute.Tensor, offset: Int32, length: Int32, dim: int = 0) -> cute.Tensor:
    """The tokens offset .. offset + length - 1 of a `bounded` tensor. Tokens are counted from 0 on; none is before."""
    return copy_utils.offset_ragged_tensor(tensor, offset, length, ragged_dim=dim, ptr_shift=False)


def offset_tokens(tensor: cute.Tensor, offset: tuple, length: Int32, dim: int = 0) -> cute.Tensor:
    """`sequence_of`, or where loads are not bounded, the tensor from `offset` on in all dimensions."""
    return sequence_of(tensor, offset[dim], length, dim) if is_bounded(tensor) else cute.domain_offset(offset, tensor)
