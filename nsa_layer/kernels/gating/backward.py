"""Backward of the gated sum in one pass, with the row sums and lse that the branches' attention backward reads.

Branch i's output gradient, ``g_i * do``, is never written. Attention's backward takes do itself and an lse lowered by
``ln g_i``, since with ``Delta_i = rowsum(do * o_i)``, which is the gradient of g_i too,

    P' = exp(S - (lse_i - ln g_i)) = g_i P,    dV = P'^T do,    dS = P' (do V^T - Delta_i)

hold. The outputs are Delta_i as `dpsum` and ``(lse_i - ln g_i) log2(e)`` as `lse_log2`, laid out as attention's own
preprocess does: rows past a sequence's end, up to the tile, have dpsum 0 and lse_log2 +inf, which makes P' 0; a row
that sees no key (lse -inf) has lse_log2 0, since its scores are -inf. A gate of exactly 0 gives lse_log2 +inf as well:
scores are finite or -inf, so ``S * scale - inf`` is -inf and not NaN, P' is 0, and dS is 0 times a finite number. Gates
that are given may be negative and have no logarithm: then ``do_i = g_i * do`` is written, rounded, with the lse
unchanged and the row sums of the rounded do_i.

CTAs loop over tiles of tokens with one group of heads each, so that the sums of d_weight stay in registers; a second
small launch adds the CTAs' sums in a fixed order.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from flash_attn.cute.lists.rows import sequence_at
from flash_attn.cute.runtime.own_device import target_sm_count
from flash_attn.cute.utils import LOG2_E
from nsa_layer.kernels.gating.forward import (
    Layout,
    batched,
    clamped,
    dot,
    heads_of_cta,
    in_row,
    load_weight,
    numbers,
    pick,
    readable_weight,
    row_sum,
    three,
    vector_of,
    zero_behind,
)
from nsa_layer.kernels.gating.reduce_partials import reduce_partials
from nsa_layer.kernels.launch import DTYPES, launch

Tensor = torch.Tensor
OfBranches = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class GateGradients:
    """Results of `gated_sum_backward`; branches in the order of the outputs, None where an output is None.

    Attributes:
        dq: the gates' share of q's gradient, in q's dtype; None without gate_weight.
        d_weight: in gate_weight's dtype; None without.
        d_gates: in gates' dtype; None without.
        dpsum, lse_log2: fp32 [B, Hq, T rounded up to tile_m], packed [Hq, padded total]: for attention's backward.
        do_branches: each branch's output gradient where gates are given; else None, and do is every branch's.
    """

    dq: Tensor | None
    d_weight: Tensor | None
    d_gates: Tensor | None
    dpsum: OfBranches
    lse_log2: OfBranches
    do_branches: OfBranches | None


class GatedSumBackward:
    """The kernel of `gated_sum_backward`; mW, mdGates and outputs are None as in its forward."""

    shapes = (
        *(["B T H D"] * 4 + ["B H T"] * 3 + ["2 B H padded @16"] * 3),
        *("B T H 3", "B T H D", "H 3 D", "B T H D", "sums H 3 D", "B T H 3 *"),
        *(["B T H D"] * 3 + ["starts"]),
    )

    def __init__(self, rows: Layout, tile_m: int) -> None:
        self.rows, self.tile_m = rows, tile_m
        # Strides in shared memory by token, head, branch and stage, padded against bank conflicts.
        branch = (rows.tile + 1) * rows.heads + 7
        self.strides = (1, rows.tile + 1, branch, rows.gates * branch)

    @cute.jit
    def __call__(self, *arguments):
        """do, outputs, lses, dpsum and lse_log2 [2, B, Hq, padded] of the branches, gates, q, weight, dq, partial sums
        [ctas * tokens of a step, Hq, gates, D], gradients of gates, do of the branches, starts; CTAs of a group,
        stream.

        Packed rows have no B, and of missing branches each three tensors have None at the end.
        """
        mdO, *threes, mG, mQ, mW, mdQ, mSums, mdGates, mdO_cmp, mdO_slc, mdO_swa, mCuSeqlens, ctas, stream = arguments
        outputs, lses, three_stats = ([t for t in threes[i : i + 3] if t is not None] for i in (0, 3, 6))
        mdO, mG, mQ, mdQ, mdGates = [batched(t, 4) for t in (mdO, mG, mQ, mdQ, mdGates)]
        branches, lses = tuple(batched(t, 4) for t in outputs), tuple(batched(t, 3) for t in lses)
        mdOs = None
        if const_expr(mdO_cmp is not None):
            mdOs = tuple(batched(t, 4) for t in (mdO_cmp, mdO_slc, mdO_swa) if t is not None)
        # One layout for all of them saves registers.
        rest = (None,) * (cute.rank(three_stats[0]) - 1)
        stats = [[t[(n, *rest)] for t in three_stats] for n in range(2)]
        dpsums, lse_log2s = (tuple(t.iterator for t in three) for three in stats)
        stat = batched(stats[0][0], 3)
        groups = mdO.shape[2] // self.rows.heads
        rows = (mdO, branches, lses, stat, dpsums, lse_log2s, mG, mQ, mW)
        self.kernel((*rows, mdQ, mSums, mdGates, mdOs, mCuSeqlens), ctas).launch(
            grid=[ctas * groups, 1, 1],
            block=[self.rows.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.rows.resident,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(self, tensors: tuple, ctas: Int32):
        mdO, branches, lses, stat, dpsums, lse_log2s, mG, mQ, mW, mdQ, mSums, mdGates, mdOs, mCuSeqlens = tensors
        rows, dtype, count = self.rows, mdO.element_type, len(branches)
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        B, T, Hq, _ = mdO.shape
        dpsums, lse_log2s = [[cute.make_tensor(p, stat.layout) for p in of] for of in (dpsums, lse_log2s)]
        tiles = cute.ceil_div(T, rows.tile)
        groups = Hq // rows.heads  # side by side in memory, so side by side in time
        group, cta = bidx % groups, bidx // groups
        lane, row = tidx % rows.lanes, tidx // rows.lanes
        head, slot = row % rows.heads, row // rows.heads
        h = group * rows.heads + head

        read = (mdO, *branches, mQ) if const_expr(mW is not None) else (mdO, *branches)
        smem = cutlass.utils.SmemAllocator()
        # Loads in flight: a thread's share of some steps, which no other thread reads.
        in_ring = cute.make_layout((rows.vector, rows.threads, len(read), rows.at_once))
        sRing = smem.allocate_tensor(dtype, in_ring, byte_alignment=128)
        in_tile = cute.make_layout((rows.tile, rows.heads, rows.gates, 2), stride=self.strides)
        sDelta = smem.allocate_tensor(Float32, cute.select(in_tile, [0, 1, 2]), byte_alignment=16)
        sG = smem.allocate_tensor(Float32, in_tile, byte_alignment=16) if const_expr(mG is not None) else None
        sPosition = smem.allocate_tensor(Int32, cute.make_layout(rows.tile), byte_alignment=16)
        sW = None
        if const_expr(mW is not None):
            D = mW.shape[2]
            of_heads = cute.make_layout((rows.heads, rows.gates, D), stride=(rows.gates * D, D, 1))
            sW = smem.allocate_tensor(mW.element_type, of_heads, byte_alignment=16)
            if (slot == 0) & in_row(mW, lane, rows):
                for i in cutlass.range_constexpr(rows.gates):
                    share = cute.local_tile(sW[head, i, None], (rows.vector,), (lane,))
                    cute.autovec_copy(cute.local_tile(mW[h, i, None], (rows.vector,), (lane,)), share)

        b, tile, stage = cta // tiles, cta % tiles, Int32(0)
        if const_expr(mG is not None):
            self.load_gates(mG, sG, b, tile, group, stage, tidx)
        for s in cutlass.range_constexpr(rows.at_once - 1):
            self.load_rows(read, sRing, (b, tile * rows.tile + s * rows.tokens + slot, h, lane), tidx, s)
            cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(rows.at_once - 2)
        cute.arch.sync_threads()

        rSums = cute.make_rmem_tensor((rows.vector, rows.gates), Float32)
        rSums.fill(0.0)
        at = Int32(0)
        for index in cutlass.range(cta, B * tiles, ctas, unroll=1):
            b, tile = index // tiles, index % tiles
            following = index + ctas
            b_next, tile_next = following // tiles, following % tiles
            if const_expr(mG is not None):
                if following < B * tiles:
                    self.load_gates(mG, sG, b_next, tile_next, group, 1 - stage, tidx)
            for step in cutlass.range(rows.steps, unroll=1):
                cute.arch.cp_async_wait_group(rows.at_once - 2)
                loaded = []
                for k in cutlass.range_constexpr(len(read)):
                    r = cute.make_rmem_tensor((rows.vector,), dtype)
                    cute.autovec_copy(sRing[None, tidx, k, at], r)
                    loaded.append(r)
                ahead = step + rows.at_once - 1
                before = Int32(cutlass.select_(at == 0, Int32(rows.at_once - 1), at - 1))
                if ahead < rows.steps:
                    token = tile * rows.tile + ahead * rows.tokens + slot
                    self.load_rows(read, sRing, (b, token, h, lane), tidx, before)
                elif following < B * tiles:
                    token = tile_next * rows.tile + (ahead - rows.steps) * rows.tokens + slot
                    self.load_rows(read, sRing, (b_next, token, h, lane), tidx, before)
                cute.arch.cp_async_commit_group()
                at = Int32(cutlass.select_(at == rows.at_once - 1, Int32(0), at + 1))

                offset = step * rows.tokens + slot
                token = tile * rows.tile + offset
                do, rO = zero_behind(mdO, numbers(loaded[0]), lane, rows), loaded[1 : 1 + count]
                deltas = [row_sum(dot(do, numbers(r)), rows) for r in rO]
                sent = deltas
                g = [sG[offset, head, i, stage] for i in range(3)] if const_expr(mG is not None) else None
                if const_expr(mW is not None):
                    # A select, not a product with 0: rows past the end may hold infinity.
                    d_logits = [
                        Float32(cutlass.select_(token < T, d * x * (1.0 - x), Float32(0.0))) for d, x in zip(deltas, g)
                    ]
                    q, rW = numbers(loaded[1 + count]), load_weight(sW, head, lane, rows)
                    rdQ = cute.make_rmem_tensor((rows.vector,), dtype)
                    for c in cutlass.range_constexpr(rows.vector):
                        rdQ[c] = dot(d_logits, [w[c] for w in rW]).to(dtype)
                        for i in cutlass.range_constexpr(count):
                            rSums[c, i] = cute.math.fma(d_logits[i], q[c], rSums[c, i])
                    if (token < T) & in_row(mdQ, lane, rows):
                        cute.autovec_copy(rdQ, vector_of(mdQ, b, token, h, lane, rows))
                if const_expr(mdOs is not None):
                    rdOs = [scaled(x, do, dtype) for x in g[:count]]
                    sent = [row_sum(dot(numbers(d), numbers(r)), rows) for d, r in zip(rdOs, rO)]
                    if token < T:
                        if in_row(mdO, lane, rows):
                            for i in cutlass.range_constexpr(count):
                                cute.autovec_copy(rdOs[i], vector_of(mdOs[i], b, token, h, lane, rows))
                        if lane < rows.gates:
                            mdGates[b, token, h, lane] = pick(lane, deltas).to(mdGates.element_type)
                if lane < rows.gates:
                    sDelta[offset, head, lane] = pick(lane, sent)
            if const_expr(mCuSeqlens is not None):
                for offset in cutlass.range(tidx, rows.tile, rows.threads, unroll=1):
                    sPosition[offset] = padded_position(mCuSeqlens, tile * rows.tile + offset, self.tile_m)
            cute.arch.sync_threads()
            # Threads side by side take tokens side by side: what is stored by heads is read and written in whole lines.
            pairs = [n * rows.threads + tidx for n in range(rows.tile * rows.heads // rows.threads)]
            heads = [group * rows.heads + n // rows.tile for n in pairs]
            tokens = [tile * rows.tile + n % rows.tile for n in pairs]
            lse = [[x[b, hh, cutlass.min(t, T - 1)] for x in lses] for hh, t in zip(heads, tokens)]
            for n in cutlass.range_constexpr(len(pairs)):
                if tokens[n] < T:
                    offset, in_group = pairs[n] % rows.tile, pairs[n] // rows.tile
                    position = sPosition[offset] if const_expr(mCuSeqlens is not None) else tokens[n]
                    for i in cutlass.range_constexpr(count):
                        log2_g = math.log2(rows.equal_share) if const_expr(mdOs is None) else 0.0
                        if const_expr(mW is not None):
                            log2_g = cute.math.log2(sG[offset, in_group, i, stage], fastmath=True)
                        empty = lse[n][i] == -Float32.inf
                        lowered = Float32(cutlass.select_(empty, Float32(0.0), lse[n][i] * LOG2_E - log2_g))
                        lse_log2s[i][b, heads[n], position] = lowered
                        dpsums[i][b, heads[n], position] = sDelta[offset, in_group, i]
            cute.arch.sync_threads()
            stage = 1 - stage

        self.fill_padding(dpsums, lse_log2s, mCuSeqlens, (B, T), (group, tidx, cta, ctas))
        if const_expr(mSums is not None):
            if in_row(mSums, lane, rows):
                for i in cutlass.range_constexpr(rows.gates):
                    share = cute.local_tile(mSums[cta * rows.tokens + slot, h, i, None], (rows.vector,), (lane,))
                    cute.autovec_copy(rSums[None, i], share)

    @cute.jit
    def load_rows(self, read: tuple[cute.Tensor, ...], sRing: cute.Tensor, row: tuple, tidx: Int32, at: Int32 | int):
        """Load a thread's share of a step, asynchronously; row: batch, token (clamped to the last one), head, lane."""
        b, token, h, lane = row
        op = cpasync.CopyG2SOp(cache_mode=cute.nvgpu.LoadCacheMode.GLOBAL)
        atom = cute.make_copy_atom(op, read[0].element_type, num_bits_per_copy=128)
        token = cutlass.min(token, read[0].shape[1] - 1)
        for k in cutlass.range_constexpr(len(read)):
            own = clamped(read[k], lane, self.rows)
            cute.copy(atom, vector_of(read[k], b, token, h, own, self.rows), sRing[None, tidx, k, at])

    @cute.jit
    def load_gates(
        self, mG: cute.Tensor, sG: cute.Tensor, b: Int32, tile: Int32, group: Int32, stage: Int32, tidx: Int32
    ):
        """Issue the loads of a tile's gates."""
        rows, wide = self.rows, self.rows.gates * self.rows.heads
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=32)
        for n in cutlass.range_constexpr(rows.tile * wide // rows.threads):
            offset, in_token = (n * rows.threads + tidx) // wide, (n * rows.threads + tidx) % wide
            head, i = in_token // rows.gates, in_token % rows.gates
            token = cutlass.min(tile * rows.tile + offset, mG.shape[1] - 1)
            source = cute.local_tile(mG[b, token, group * rows.heads + head, None], (1,), (i,))
            cute.copy(atom, source, cute.local_tile(sG[offset, head, None, stage], (1,), (i,)))

    @cute.jit
    def fill_padding(self, dpsums: tuple, lse_log2s: tuple, mCuSeqlens: cute.Tensor | None, shape: tuple, index: tuple):
        """Write the rows past the ends of sequences; index: group of heads, thread, CTA in the group, its CTAs."""
        (B, T), (group, tidx, cta, ctas) = shape, index
        heads = self.rows.heads
        sequences = B if const_expr(mCuSeqlens is None) else mCuSeqlens.shape[0] - 1
        for sequence in cutlass.range(cta, sequences, ctas, unroll=1):
            b, begin, length = sequence, Int32(0), T
            if const_expr(mCuSeqlens is not None):
                b, begin = Int32(0), padded_begin(mCuSeqlens, sequence, self.tile_m)
                length = mCuSeqlens[sequence + 1] - mCuSeqlens[sequence]
            padding = (self.tile_m - length % self.tile_m) % self.tile_m
            for n in cutlass.range(tidx, padding * heads, self.rows.threads, unroll=1):
                position, h = begin + length + n // heads, group * heads + n % heads
                for i in cutlass.range_constexpr(len(dpsums)):
                    dpsums[i][b, h, position] = Float32(0.0)
                    lse_log2s[i][b, h, position] = Float32.inf


def scaled(g: Float32, do: list[Float32], dtype: type[cutlass.Numeric]) -> cute.Tensor:
    """A thread's share of ``g * do``, rounded."""
    r = cute.make_rmem_tensor((len(do),), dtype)
    for c, x in enumerate(do):
        r[c] = (g * x).to(dtype)
    return r


def padded_begin(mCuSeqlens: cute.Tensor, sequence: Int32, tile_m: int) -> Int32:
    """The first row of a sequence in attention's backward."""
    return (mCuSeqlens[sequence] + sequence * tile_m) // tile_m * tile_m


@cute.jit
def padded_position(mCuSeqlens: cute.Tensor, token: Int32, tile_m: cutlass.Constexpr[int]) -> Int32:
    """The row of a packed token in attention's backward."""
    sequence = sequence_at(mCuSeqlens, token)
    return padded_begin(mCuSeqlens, sequence, tile_m) + token - mCuSeqlens[sequence]


def gated_sum_backward(
    do: Tensor,
    outputs: Sequence[Tensor | None],
    lses: Sequence[Tensor | None],
    *,
    g: Tensor | None,
    q: Tensor | None,
    gate_weight: Tensor | None,
    gates: Tensor | None,
    tile_m: int,
    cu_seqlens: Tensor | None = None,
    out: Tensor | None = None,
) -> GateGradients:
    """Gradients of `gated_sum`, and each branch's row sums and lse for attention's backward.

    Args:
        do, outputs, q: [B, T, Hq, Dv], q with D, or packed; outputs are those of `gated_sum`, and q is read with
            `gate_weight` only.
        lses: of the outputs, fp32 [B, Hq, T], packed [Hq, total], natural, -inf where a row sees no key. Where the last
            output is None, so are its lse and what is returned for it; its gates' gradients are 0.
        g: the gates that `gated_sum` returned.
        gate_weight, gates: as in `gated_sum`.
        tile_m: rows of a tile of attention's backward.
        cu_seqlens: int32 starts of the packed sequences, and the total.
        out: written and returned as dq, with `gate_weight`; heads and tokens may have any stride.
    """
    Hq, Dv = do.shape[-2:]
    weighed, given = gate_weight is not None, gates is not None
    rows = backward_rows((Dv, q.shape[-1]) if weighed else (Dv,), Hq, len(outputs))
    ctas = _ctas_a_group(do, rows, weighed)

    new = dict(device=do.device, dtype=do.dtype)
    fp32 = dict(device=do.device, dtype=torch.float32)
    padded, there = (2, *_padded_shape(do, tile_m, cu_seqlens)), [o is not None for o in outputs]
    stats = tuple(torch.empty(padded, **fp32) if branch else None for branch in there)
    q = q if weighed else None
    weight = readable_weight(gate_weight)
    dq = (torch.empty(q.shape, **new) if out is None else out) if weighed else None
    sums = torch.empty((ctas * rows.tokens, Hq, rows.gates, q.shape[-1]), **fp32) if weighed else None
    d_gates = None
    if given:
        d_gates = torch.empty(gates.shape, device=do.device, dtype=gates.dtype if gates.dtype in DTYPES else g.dtype)
    do_branches = tuple(torch.empty(do.shape, **new) if branch else None for branch in there) if given else None

    g = g if weighed or given else None
    of_branches = (x for each in (outputs, lses, stats) for x in three(each))
    results = (dq, sums, d_gates, *three(do_branches or ()))
    tensors = (do, *of_branches, g, q, weight, *results, cu_seqlens)
    launch("gated_sum_backward", GatedSumBackward, (rows, tile_m), *tensors, ctas)
    d_weight = reduce_partials(sums, weight.dtype).to(gate_weight.dtype) if weighed else None
    d_gates = d_gates.to(gates.dtype) if given else None
    dpsum, lse_log2 = zip(*((None, None) if both is None else both.unbind(0) for both in stats))
    return GateGradients(dq, d_weight, d_gates, dpsum, lse_log2, do_branches)


def backward_rows(dims: tuple[int, ...], Hq: int, gates: int) -> Layout:
    rows = Layout(dims, heads_of_cta(Hq, max(dims)), at_once=3, steps=0, gates=gates)
    return replace(rows, steps=2 * rows.lanes)


def _ctas_a_group(do: Tensor, rows: Layout, weighed: bool) -> int:
    """CTAs of each group of heads, which share the tiles of tokens."""
    tiles = do.shape[:-3].numel() * -(-do.shape[-3] // rows.tile)
    if not weighed:
        return tiles
    # Each CTA leaves partial sums: no more CTAs than run at a time.
    resident = rows.resident * target_sm_count() // (do.shape[-2] // rows.heads)
    return min(tiles, max(1, resident))


def _padded_shape(do: Tensor, tile_m: int, cu_seqlens: Tensor | None) -> tuple[int, ...]:
    if cu_seqlens is None:
        B, T, Hq, _ = do.shape
        return B, Hq, -(-T // tile_m) * tile_m
    total, Hq, _ = do.shape
    return Hq, (total + cu_seqlens.shape[0] * tile_m - 1) // tile_m * tile_m
