"""Which heads of a call share a block list: all of them, those of a key/value head, or none.

The kernels index lists by the head that a tile works on. Where the lists of a key/value head serve
the query heads of its group, the head dimension of the lists is looked at as (group, key/value
heads) with a stride of zero over the group: an index among the query heads then finds its list, and
nothing is repeated in memory.
"""

from dataclasses import dataclass
from typing import Optional

import cutlass.cute as cute

from flash_attn.cute.block_sparsity import BlockSparseTensors, BlockSparseTensorsTorch

LISTS = (
    "mask_block_cnt",
    "mask_block_idx",
    "full_block_cnt",
    "full_block_idx",
    "dq_write_order",
    "dq_write_order_full",
)
STARTS = ("cu_block_idx_offsets", "cu_full_block_idx_offsets")


@dataclass(frozen=True)
class ListHeads:
    """`count`: heads that the lists have once normalised. `group`: query heads that share one of them.

    `packable`: whether the query heads of a key/value head always share a list, as pack_gqa asks.
    """

    count: int
    group: int
    packable: bool

    @staticmethod
    def of(tensors: Optional[BlockSparseTensorsTorch], num_head: int, num_head_kv: int) -> "ListHeads":
        """One list for all heads, one for each key/value head, or one for each query head.

        Raises:
            ValueError: the lists have another number of heads.
        """
        given = 1 if tensors is None else _given_heads(tensors)
        if given not in (1, num_head_kv, num_head):
            raise ValueError(
                f"block_sparse_tensors have lists for {given} heads, which cannot be expanded: their head dim must be "
                f"{num_head} or 1, or {num_head_kv} for one list a key/value head"
            )
        if given == 1 or given == num_head:
            return ListHeads(num_head, 1, packable=given == 1)
        return ListHeads(num_head_kv, num_head // num_head_kv, packable=True)

    def group_in_kernel(self, pack_gqa: bool) -> int:
        """Heads of the kernel's grid that share a list: with pack_gqa the grid has key/value heads."""
        return 1 if pack_gqa else self.group


def _given_heads(tensors: BlockSparseTensorsTorch) -> int:
    """The head dimension of the lists, whichever of them leave it at 1; packed lists have it first.

    Ragged entries have none: they are one row for all heads.
    """
    counts = tensors.mask_block_cnt
    head_dim = 0 if counts is not None and counts.ndim == 2 else 1
    given = (getattr(tensors, name) for name in LISTS)
    return max((t.shape[head_dim] for t in given if t is not None and t.ndim > 1), default=1)


def lists_by_query_head(tensors: Optional[BlockSparseTensors], group: int) -> Optional[BlockSparseTensors]:
    """The lists as a kernel indexes them, with an index among `group` times as many heads."""
    if tensors is None or group == 1:
        return tensors
    head_dim = 0 if cute.rank(tensors.mask_block_cnt.shape) == 2 else 1
    # Starts of ragged rows have heads too; those of stacked lists have none.
    lists = {name: getattr(tensors, name) for name in (*LISTS, *STARTS)}
    with_heads = {name: t for name, t in lists.items() if t is not None and cute.rank(t.shape) > 1}
    return tensors._replace(**{name: _spread(t, head_dim, group) for name, t in with_heads.items()})


def _spread(tensor: cute.Tensor, dim: int, group: int) -> cute.Tensor:
    shape, stride = list(tensor.shape), list(tensor.stride)
    shape[dim], stride[dim] = (group, shape[dim]), (0, stride[dim])
    return cute.make_tensor(tensor.iterator, cute.make_layout(tuple(shape), stride=tuple(stride)))
