"""Static sizes that the kernels of a decode step are compiled for, and their tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute

Tensor = cute.Tensor

WARP, WARPS = 32, 4
ROWS, KEYS = 16, 16  # of one product of a warp: (token, head) pairs, and keys
VECTOR = 8  # elements of 16 bits in 16 bytes
MOST_QUERIES = 8
MOST_OF_CLUSTER = 8  # CTAs
RESIDENT = 2  # CTAs of a multiprocessor
LAUNCH = dict(block=(WARP * WARPS, 1, 1), min_blocks_per_mp=RESIDENT, preferred_smem_carveout=75, use_pdl=True)


@dataclass(frozen=True)
class DecodeSpec:
    """A step's static sizes.

    Attributes:
        T: queries of a sequence, at most.
        appends: the queries' keys and values are not in the caches yet.
        n: blocks that a token lists.
        init, local: forced blocks at the sequence's begin, and up to a token's own.
        by_index: blocks are selected by scores of an index; there is no compressed branch.
        columns: the branch that each column of the gates belongs to.
        keys: keys of a warp's step, 16 or 32.
        D, Dv: multiples of 8, at most 128; D of an index is a power of two.
    """

    D: int
    Dv: int
    G: int
    T: int
    span: int
    stride: int
    offset: int
    block_size: int
    n: int
    window: int
    init: int
    local: int
    appends: bool
    by_index: bool = False
    columns: tuple[int, ...] = (0, 1, 2)
    keys: int = KEYS

    @property
    def dims(self) -> tuple[int, int]:
        """Elements of a row of keys, and of values."""
        return self.D, self.Dv

    @property
    def columns_of_sums(self) -> int:
        """Columns of partial sums: Dv rounded up to what a warp covers evenly; those past Dv are not read."""
        return 64 if self.Dv <= 64 else 128

    @property
    def rows(self) -> int:
        """Queries of a key/value head."""
        return self.T * self.G

    @property
    def most_wanted(self) -> int:
        """The most entries of a list that are left for candidates, at least 1."""
        return max(1, self.n - self.init - self.local)


class StepTensors(NamedTuple):
    """Arguments of both kernels; the defaults are their shapes, see `launch`. Packed queries are a batch of one.

    Attributes:
        k, v, k_win, v_win, k_cmp, v_cmp: rows that the step appends.
        k_scale and so on: fp32 scales of caches in FP8.
        scores: fp32, of the compressed branch; of an index int32 [B, Hkv, T, blocks], see `index.in_order`.
        stats, acc: fp32 partial sums of the compressed branch, one for each split of its keys.
        valid: int32, 1 where all of a sequence's slots are in the caches.
    """

    q: Tensor = "Bq Tq Hq D"
    k_cache: Tensor = "P S Hkv D"
    v_cache: Tensor = "P S Hkv D"
    k: Tensor | None = "Bk Tk Hkv D"
    v: Tensor | None = "Bk Tk Hkv D"
    k_win_cache: Tensor | None = "P S Hkv D"
    v_win_cache: Tensor | None = "P S Hkv D"
    k_win: Tensor | None = "Bk Tk Hkv D"
    v_win: Tensor | None = "Bk Tk Hkv D"
    k_cmp_cache: Tensor | None = "Pc Sc Hkv D"
    v_cmp_cache: Tensor | None = "Pc Sc Hkv D"
    k_cmp: Tensor | None = "Bm m Hkv D"
    v_cmp: Tensor | None = "Bm m Hkv D"
    page_table: Tensor | None = "B n *"
    cmp_page_table: Tensor | None = "B nc *"
    cache_batch_idx: Tensor | None = "B *"
    cu_seqlens_q: Tensor | None = "Bs *"
    cache_seqlens: Tensor = "B *"
    k_scale: Tensor | None = "Hkv *"
    v_scale: Tensor | None = "Hkv *"
    k_win_scale: Tensor | None = "Hkv *"
    v_win_scale: Tensor | None = "Hkv *"
    k_cmp_scale: Tensor | None = "Hkv *"
    v_cmp_scale: Tensor | None = "Hkv *"
    compress_k_weight: Tensor | None = "Hkv D D"
    compress_v_weight: Tensor | None = "Hkv D D"
    scores: Tensor = "B Hkv R keys@16"
    stats: Tensor | None = "B Hkv R splits 2"
    acc: Tensor | None = "B Hkv R splits D"
    valid: Tensor = "B Hkv"


class OutputTensors(NamedTuple):
    """Further arguments of the last kernel; lists: int32."""

    lists: Tensor | None = "B T Hkv width"
    gate_weight: Tensor | None = "Hq 3 D"
    gates: Tensor | None = "Bq Tq Hq 3 *"
    o: Tensor = "Bq Tq Hq D"
    lse_cmp: Tensor = "Bq Hq Tq"
    lse_slc: Tensor = "Bq Hq Tq"
    lse_swa: Tensor = "Bq Hq Tq"
