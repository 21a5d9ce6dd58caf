"""Tiles of keys of SM90 forward in a short window: counted from where the window of a tile's last query ends.

Tiles at multiples of their width reach over both ends of what a tile of queries sees. Here each tile of queries has an
origin of its own among the keys, such that a tile of keys ends with the last query's window. Positions alone decide, so
no bit of a row depends on what follows it. From then on keys count from the origin.
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from flash_attn.cute.block_info import BlockInfo
from flash_attn.cute.seqlen_info import SeqlenInfoQK


def from_origin(info: BlockInfo, seqlen: SeqlenInfoQK, m_block: Int32) -> tuple[SeqlenInfoQK, Int32]:
    """The sequence with keys as a tile of queries counts them, and the first key that it counts.

    info: of a window with two ends.
    """
    rows, heads = m_block * info.tile_m, info.qhead_per_kvhead_packgqa
    of_first = seqlen.seqlen_k - seqlen.seqlen_q + seqlen.shift  # the key of query 0
    end = cute.ceil_div(rows + info.tile_m, heads) + of_first + info.window_size_right
    origin = cutlass.max(end, 0) % info.tile_n
    # Tiles that see keys before the origin count all keys.
    sees_none = rows // heads + of_first - info.window_size_left >= origin
    origin = cutlass.select_(sees_none & (origin < seqlen.seqlen_k), origin, Int32(0))
    q_offset = None if seqlen.q_offset is None else seqlen.q_offset - origin
    return replace(seqlen, seqlen_k=seqlen.seqlen_k - origin, q_offset=q_offset), origin


def keys_from(keys: cute.Tensor, origin: Int32) -> cute.Tensor:
    """[keys, D] from the origin on."""
    return cute.domain_offset((origin, 0), keys)
