"""Lists of blocks by token -> what attention's kernels read: unions by query tile, and tokens by key block.

Both take block_indices int32 [B, T, Hs, n], or packed [total, Hs, n]: any strides, any order. -1 and blocks outside of
the sequence are no entries, nor with `causal` those that start after their token; a block named twice counts once.
The same lists give the same bits: threads race only to set bits of a set, and an entry's index is its rank in it.
"""
