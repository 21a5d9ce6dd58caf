"""The gated sum of the branches, ``o = sum_i g_i * o_i``, in one pass that also computes ``g_i = sigmoid(q . W_i)``.

A CTA takes a few heads and loops over tokens: 8 elements a thread, so that a row is 8, 16 or 32 threads, heads are side
by side as in memory, and a thread keeps its share of its head's W in registers. Threads past the end of a shorter row
read its last elements as zeros and write nothing. Bound by memory: the loads of several tokens are in flight before the
first is used.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32, const_expr

from flash_attn.cute.utils import LOG2_E
from nsa_layer.kernels.launch import DTYPES, launch
from nsa_layer.kernels.varlen import load_once

Tensor = torch.Tensor


@dataclass(frozen=True)
class Layout:
    """The layout of a CTA's threads over rows: the lanes of a row, then the heads of a token, then tokens.

    Attributes:
        dims: elements of rows of the outputs, and of q if it is read.
        heads: of a CTA, a power of two that divides Hq.
        at_once: steps of a CTA whose loads are in flight together.
        steps: of `tokens` tokens each, one after the other: a CTA's piece of work, a tile.
        resident: CTAs on a multiprocessor.
        gates: of a row: one a branch, of which the last may have no output.
    """

    dims: tuple[int, ...]
    heads: int
    at_once: int
    steps: int
    resident: int = 2
    gates: int = 3
    threads: int = 256
    vector: int = 8  # 16 bytes of a 16-bit dtype: one load

    @property
    def lanes(self) -> int:
        """Threads of a row: a power of two, for shuffles, and at least one for each gate."""
        return max(4, 1 << (max(self.dims) // self.vector - 1).bit_length())

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.threads // self.lanes // self.heads

    @property
    def tile(self) -> int:
        """Tokens of all steps."""
        return self.tokens * self.steps

    @property
    def equal_share(self) -> float:
        """Each gate, if all are the same."""
        return 1.0 / self.gates


class GatedSum:
    """The kernel of `gated_sum`; without mW and mGates all gates are the same, one without an output is not read."""

    shapes = "B T H D", "H 3 D", "B T H 3 *", *["B T H D"] * 4, "B T H 3 *"  # 3: as many gates as there are

    def __init__(self, rows: Layout) -> None:
        self.rows = rows

    @cute.jit
    def __call__(self, *arguments):
        """q, weight, gates, outputs of the branches, o, the gates in fp32, stream; packed rows have no B."""
        mQ, mW, *rows, stream = arguments
        mQ, mGates, *branches, mO, mG = [batched(t, 4) for t in (mQ, *rows)]
        B, T, Hq, _ = mO.shape
        tiles = cute.ceil_div(T, self.rows.tile)
        branches = tuple(t for t in branches if t is not None)
        self.kernel((mQ, mW, mGates, branches, mO, mG), tiles).launch(
            grid=[B * tiles * (Hq // self.rows.heads), 1, 1],
            block=[self.rows.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.rows.resident,
            preferred_smem_carveout=0,
        )

    @cute.kernel
    def kernel(self, tensors: tuple, tiles: Int32):
        mQ, mW, mGates, branches, mO, mG = tensors
        rows = self.rows
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        _, T, Hq, _ = mO.shape
        groups = Hq // rows.heads  # side by side in memory, so side by side in time
        group, tile = bidx % groups, bidx // groups
        b, tile = tile // tiles, tile % tiles
        lane, row = tidx % rows.lanes, tidx // rows.lanes
        h = group * rows.heads + row % rows.heads
        first = tile * rows.tile + row // rows.heads

        rW = load_weight(mW, h, lane, rows) if const_expr(mW is not None) else None
        for batch in cutlass.range(rows.steps // rows.at_once, unroll=1):
            tokens = [first + (batch * rows.at_once + s) * rows.tokens for s in range(rows.at_once)]
            # Rows past the end read the last one: a branch would delay the loads.
            loads = [cutlass.min(token, T - 1) for token in tokens]
            rO = [[load_vector(o, b, t, h, lane, rows) for o in branches] for t in loads]
            rQ = [load_vector(mQ, b, t, h, lane, rows) for t in loads] if const_expr(mW is not None) else None
            given = None
            if const_expr(mGates is not None):
                given = [[mGates[b, t, h, i] for i in range(rows.gates)] for t in loads]
            for s in cutlass.range_constexpr(rows.at_once):
                if const_expr(mW is not None):
                    g = sigmoids(rQ[s], rW, rows)
                elif const_expr(mGates is not None):
                    g = [x.to(Float32) for x in given[s]]
                else:
                    g = [Float32(rows.equal_share)] * rows.gates
                total = weighted(g, rO[s])
                rOut = cute.make_rmem_tensor((rows.vector,), mO.element_type)
                for c in cutlass.range_constexpr(rows.vector):
                    rOut[c] = total[c].to(mO.element_type)
                if tokens[s] < T:
                    if in_row(mO, lane, rows):
                        cute.autovec_copy(rOut, vector_of(mO, b, tokens[s], h, lane, rows))
                    if const_expr(mG is not None):
                        if lane < rows.gates:
                            mG[b, tokens[s], h, lane] = pick(lane, g)


def batched(t: cute.Tensor | None, rank: int) -> cute.Tensor | None:
    """The tensor with `rank` dimensions: a packed one, which has one less, becomes a batch of one."""
    if t is None or cute.rank(t) == rank:
        return t
    return cute.make_tensor(t.iterator, cute.make_layout((1, *t.shape), stride=(0, *t.stride)))


def vectors(t: cute.Tensor, rows: Layout) -> int:
    """Shares of a row of [.., D]."""
    return t.shape[cute.rank(t) - 1] // rows.vector


def in_row(t: cute.Tensor, lane: Int32, rows: Layout) -> bool | Boolean:
    """True if a thread has a share of the rows of [.., D]."""
    return True if vectors(t, rows) == rows.lanes else lane < vectors(t, rows)


def clamped(t: cute.Tensor, lane: Int32, rows: Layout) -> Int32:
    """The lane, or the last one that has a share of the rows of [.., D]."""
    return lane if vectors(t, rows) == rows.lanes else cutlass.min(lane, vectors(t, rows) - 1)


def vector_of(t: cute.Tensor, b: Int32, token: Int32, h: Int32, lane: Int32, rows: Layout) -> cute.Tensor:
    """A thread's share of a row of [B, T, H, D]."""
    return cute.local_tile(t[b, token, h, None], (rows.vector,), (lane,))


def load_vector(t: cute.Tensor, b: Int32, token: Int32, h: Int32, lane: Int32, rows: Layout) -> cute.Tensor:
    loaded = cute.make_rmem_tensor((rows.vector,), t.element_type)
    load_once(vector_of(t, b, token, h, clamped(t, lane, rows), rows), loaded)
    return loaded


def load_weight(mW: cute.Tensor, h: Int32, lane: Int32, rows: Layout) -> list[list[Float32]]:
    """A thread's share of W[h], in fp32."""
    loaded = []
    for i in range(rows.gates):
        r = cute.make_rmem_tensor((rows.vector,), mW.element_type)
        cute.autovec_copy(cute.local_tile(mW[h, i, None], (rows.vector,), (clamped(mW, lane, rows),)), r)
        loaded.append(zero_behind(mW, numbers(r), lane, rows))
    return loaded


def zero_behind(t: cute.Tensor, share: list[Float32], lane: Int32, rows: Layout) -> list[Float32]:
    """A thread's share of a row of [.., D]; 0 where it has none."""
    there = in_row(t, lane, rows)
    return share if there is True else [Float32(cutlass.select_(there, x, Float32(0.0))) for x in share]


def numbers(r: cute.Tensor) -> list[Float32]:
    return [r[c].to(Float32) for c in range(cute.size(r))]


def dot(a: list[Float32], b: list[Float32]) -> Float32:
    """A thread's share of a row's dot product."""
    total = a[0] * b[0]
    for x, y in zip(a[1:], b[1:]):
        total = cute.math.fma(x, y, total)
    return total


def row_sum(share: Float32, rows: Layout) -> Float32:
    """The sum over a row's lanes, in each of them."""
    return cute.arch.warp_reduction_sum(share, threads_in_group=rows.lanes)


def sigmoids(rQ: cute.Tensor, rW: list[list[Float32]], rows: Layout) -> list[Float32]:
    q = numbers(rQ)
    logits = [row_sum(dot(q, w), rows) for w in rW]
    return [cute.arch.rcp_approx(1.0 + cute.math.exp2(-LOG2_E * x, fastmath=True)) for x in logits]


def weighted(g: list[Float32], branches: list[cute.Tensor]) -> list[Float32]:
    total = [g[0] * x for x in numbers(branches[0])]
    for share, r in zip(g[1:], branches[1:]):
        total = [cute.math.fma(share, x, y) for x, y in zip(numbers(r), total)]
    return total


def pick(i: Int32, of_three: list[Float32]) -> Float32:
    """The i-th of up to three numbers; 0 past the last."""
    first, second, third = (*of_three, Float32(0.0), Float32(0.0))[:3]
    return Float32(cutlass.select_(i == 0, first, Float32(cutlass.select_(i == 1, second, third))))


def gated_sum(
    q: Tensor | None,
    *outputs: Tensor | None,
    gate_weight: Tensor | None = None,
    gates: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``o = sum_i g_i * o_i``, accumulated in fp32 and rounded once, and the gates.

    Args:
        q: [B, T, Hq, D], or packed [total, Hq, D]; read with `gate_weight` only.
        outputs: of one to three branches, [.., Hq, Dv], in fp16 or bf16; the last of several may be None. D and Dv are
            multiples of 8 up to 256.
        gate_weight: [Hq, branches, D]: gates are ``sigmoid(q . gate_weight)``.
        gates: [B, T, Hq, branches]: the gates themselves. Neither: equal shares.
        out: written and returned as o, if given; heads and tokens may have any stride.

    Returns:
        o, as the outputs, and the gates in fp32 [B, T, Hq, branches]; None for equal shares.
    """
    Hq, Dv = outputs[0].shape[-2:]
    o = torch.empty(outputs[0].shape, dtype=outputs[0].dtype, device=outputs[0].device) if out is None else out
    gated = gate_weight is not None or gates is not None
    g = torch.empty((*o.shape[:-1], len(outputs)), dtype=torch.float32, device=o.device) if gated else None
    q = q if gate_weight is not None else None
    gate_weight, gates = readable_weight(gate_weight), readable_gates(gates)
    dims = (Dv,) if q is None else (Dv, q.shape[-1])
    rows = forward_rows(dims, Hq, len(outputs), weighed=gate_weight is not None)
    launch("gated_sum", GatedSum, (rows,), q, gate_weight, gates, *three(outputs), o, g)
    return o, g


def forward_rows(dims: tuple[int, ...], Hq: int, gates: int, *, weighed: bool) -> Layout:
    return Layout(dims, heads_of_cta(Hq, max(dims)), at_once=4, steps=16, resident=1 if weighed else 2, gates=gates)


def three(of_branches: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """A kernel's arguments of three branches, padded with None."""
    return (*of_branches, None, None, None)[:3]


def heads_of_cta(Hq: int, D: int) -> int:
    """The largest power of two that divides Hq, up to 16, or 8 if D > 128: 4 KB side by side."""
    return min(16 if D <= 128 else 8, Hq & -Hq)


def readable_weight(weight: Tensor | None) -> Tensor | None:
    """The gate weight as the kernels read it: 16 bytes at a time, in 16 or 32 bits."""
    if weight is None:
        return None
    weight = (weight if weight.dtype in DTYPES else weight.float()).contiguous()
    return weight if weight.storage_offset() % 8 == 0 else weight.clone()


def readable_gates(gates: Tensor | None) -> Tensor | None:
    return gates if gates is None or gates.dtype in DTYPES else gates.float()
