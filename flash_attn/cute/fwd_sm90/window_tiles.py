"""Key tiles of SM90 forward in a short window, aligned to the end of the window of a query tile's last row.

Key tiles at multiples of their width overlap both ends of a query tile's window. Here each query tile has its own
origin, from which its keys are counted, such that a key tile ends with the last query's window. The origin depends on
positions alone, so no bit of a row depends on later tokens.
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from flash_attn.cute.block_info import BlockInfo
from flash_attn.cute.seqlen_info import SeqlenInfoQK


def from_origin(info: BlockInfo, seqlen: SeqlenInfoQK, m_block: Int32) -> tuple[SeqlenInfoQK, Int32]:
    """The sequence with keys counted from a query tile's origin, and that origin.

    info: of a window bounded on both sides.
    """
    rows, heads = m_block * info.tile_m, info.qhead_per_kvhead_packgqa
    of_first = seqlen.seqlen_k - seqlen.seqlen_q + seqlen.shift  # the key of query 0
    end = cute.ceil_div(rows + info.tile_m, heads) + of_first + info.window_size_right
    origin = cutlass.max(end, 0) % info.tile_n
    # A tile that sees keys before the origin keeps origin 0.
    sees_none = rows // heads + of_first - info.window_size_left >= origin
    origin = cutlass.select_(sees_none & (origin < seqlen.seqlen_k), origin, Int32(0))
    q_offset = None if seqlen.q_offset is None else seqlen.q_offset - origin
    return replace(seqlen, seqlen_k=seqlen.seqlen_k - origin, q_offset=q_offset), origin


def keys_from(keys: cute.Tensor, origin: Int32) -> cute.Tensor:
    """Keys [S, D] from the origin on."""
    return cute.domain_offset((origin, 0), keys)
