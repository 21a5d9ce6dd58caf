"""Writes of a step to the caches: new tokens, and the compressed keys and values that they complete."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from nsa_layer.kernels.cache_rows.locate import pages_exist
from nsa_layer.kernels.decode.cache_rows import Caches, Sequence, Stored, Table, new_row
from nsa_layer.kernels.decode.partial_sums import fragment
from nsa_layer.kernels.decode.spec import VECTOR, DecodeSpec
from nsa_layer.kernels.fp8 import E4M3, floats, inverse, store


def is_inside(sequence: Sequence, caches: Caches, threads: int, sBad: cute.Tensor) -> Boolean:
    """True if all the sequence's slots are in the caches; called by all threads of the CTA."""
    used = [(caches.tokens, sequence.S)]
    if caches.keys is not None:
        used.append((caches.keys, sequence.completed()[1]))
    tables = [stored.table(sequence).used(slots) for stored, slots in used if stored.pages is not None]
    return pages_exist(sequence.inside, tables, sBad, threads) if tables else sequence.inside


@cute.jit
def write_valid(
    mValid: cute.Tensor,
    sequence: Sequence,
    caches: Caches,
    head: Int32,
    threads: cutlass.Constexpr[int],
    sBad: cute.Tensor,
):
    """mValid: int32 [B, Hkv]: 1 where all the sequence's slots are in the caches."""
    tidx, _, _ = cute.arch.thread_idx()
    valid = is_inside(sequence, caches, threads, sBad)
    if tidx == 0:
        mValid[sequence.b, head] = cutlass.select_(valid, Int32(1), Int32(0))


@cute.jit
def complete_keys(
    sequence: Sequence,
    caches: Caches,
    head: Int32,
    threads: cutlass.Constexpr[int],
    sSums: cute.Tensor,
    sBad: cute.Tensor,
):
    """Write the compressed keys and values that this call completes, if it may; sSums: fp32 [2 * VECTOR * threads]."""
    before, after = sequence.completed()
    if before < after:
        if is_inside(sequence, caches, threads, sBad):
            for j in cutlass.range(before, after, unroll=1):
                complete(sequence.spec, sequence, caches, j, head, threads, sSums)
        cute.arch.sync_threads()


@cute.jit
def append(
    spec: DecodeSpec,
    sequence: Sequence,
    stored: Stored,
    head: Int32,
    threads: cutlass.Constexpr[int],
    to_cache: cutlass.Constexpr[bool] = True,
):
    """Write a sequence's new keys and values of a head to the caches or, unless `to_cache`, to `Stored.rounded`;
    some threads write keys, others values."""
    tidx, _, _ = cute.arch.thread_idx()
    table = stored.table(sequence)
    for i in cutlass.range_constexpr(2):
        lanes, new = spec.dims[i] // VECTOR, stored.new[i]
        cache = stored.caches[i] if to_cache else stored.rounded[i]
        if const_expr(new is not None and cache is not None):
            first = (tidx // lanes + i) % (threads // lanes)
            for token in cutlass.range(first, sequence.T, threads // lanes, unroll=1):
                at = sequence.position(token)
                chunk = fragment(new_row(new, sequence, token, head), tidx % lanes, VECTOR)
                if const_expr(to_cache):
                    target = cache[table.page(at), table.within(at), head, None]
                else:
                    target = cache[None, token]
                write(chunk, stored, i, head, cute.local_tile(target, (VECTOR,), (tidx % lanes,)))


def write(chunk: cute.Tensor, stored: Stored, i: int, head: Int32, target: cute.Tensor) -> None:
    """Write new elements, in FP8 divided by the scale if the target is in FP8."""
    if const_expr(target.element_type == E4M3):
        store(floats(chunk), inverse(stored.scales[i], head), target)
    else:
        cute.autovec_copy(chunk, target)


@cute.jit
def read(stored: Stored, i: int, table: Table, page: Int32, at: Int32, head: Int32, lane: Int32) -> cute.Tensor:
    """`VECTOR` elements of a token's row, new or cached, in the cache's dtype."""
    chunk = fragment(stored.token(i, table, page, at, head), lane, VECTOR)
    if const_expr(stored.rounds(i)):
        past = at - table.sequence.position(Int32(0))
        if past >= 0:
            write(fragment(new_row(stored.new[i], table.sequence, past, head), lane, VECTOR), stored, i, head, chunk)
    return chunk


@cute.jit
def complete(
    spec: DecodeSpec,
    sequence: Sequence,
    caches: Caches,
    j: Int32,
    head: Int32,
    threads: cutlass.Constexpr[int],
    sSums: cute.Tensor,
):
    """Write compressed key and value j of a head: the given ones, or means of their tokens times the weights."""
    tidx, _, _ = cute.arch.thread_idx()
    tokens, keys, weights = caches.tokens, caches.keys, caches.weights
    widest, table = max(spec.dims), keys.table(sequence)
    lanes = widest // VECTOR
    groups = threads // lanes  # the last threads may not fill a group
    lane, group = tidx % lanes, tidx // lanes
    of_row = [lane if D == widest else cutlass.min(lane, D // VECTOR - 1) for D in spec.dims]
    targets = [cache[table.page(j), table.within(j), head, None] for cache in keys.caches]
    missing = [i for i in range(2) if keys.new[i] is None]
    for i in cutlass.range_constexpr(2):
        if const_expr(keys.new[i] is not None):
            if group == 0:
                before, _ = sequence.completed()
                chunk = fragment(new_row(keys.new[i], sequence, j - before, head), of_row[i], VECTOR)
                write(chunk, keys, i, head, cute.local_tile(targets[i], (VECTOR,), (of_row[i],)))
    if const_expr(len(missing) > 0):
        sums, own = cute.make_rmem_tensor((VECTOR, len(missing)), Float32), tokens.table(sequence)
        sums.fill(0.0)
        first = group
        if const_expr(threads % lanes):
            first = cutlass.select_(group < groups, group, Int32(spec.span))
        for token in cutlass.range(first, spec.span, groups, unroll=8):
            at = j * spec.stride + token
            page = own.page(at)
            for n in cutlass.range_constexpr(len(missing)):
                chunk = floats(read(tokens, missing[n], own, page, at, head, of_row[missing[n]]))
                for x in cutlass.range_constexpr(VECTOR):
                    sums[x, n] += chunk[x]
        sLines = cute.make_tensor(sSums.iterator, cute.make_layout((widest, groups, len(missing))))
        if group < groups:
            for n in cutlass.range_constexpr(len(missing)):
                for x in cutlass.range_constexpr(VECTOR):
                    sLines[lane * VECTOR + x, group, n] = sums[x, n]
        cute.arch.sync_threads()
        for n in cutlass.range_constexpr(len(missing)):
            for column in cutlass.range(tidx, spec.dims[missing[n]], threads, unroll=1):
                total = Float32(0.0)
                for line in cutlass.range_constexpr(groups):
                    total += sLines[column, line, n]
                sLines[column, 0, n] = total * (1.0 / spec.span) * tokens.scale(missing[n], head)
        cute.arch.sync_threads()
        for n in cutlass.range_constexpr(len(missing)):
            i = missing[n]
            for column in cutlass.range(tidx, spec.dims[i], threads, unroll=1):
                mean = sLines[column, 0, n]
                if const_expr(weights[i] is not None):
                    mean = Float32(0.0)
                    for d in cutlass.range(spec.dims[i], unroll=16):
                        mean += sLines[d, 0, n] * weights[i][head, d, column].to(Float32)
                store([mean], inverse(keys.scales[i], head), cute.local_tile(targets[i], (1,), (column,)))
        cute.arch.sync_threads()
