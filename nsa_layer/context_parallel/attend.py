"""`nsa` and `selected_attention` of a rank's tokens: compare the ranks' arguments, check them, choose the mode."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from nsa_layer import autocast, operators, support
from nsa_layer.call import TENSORS, Call
from nsa_layer.checks import assert_numbers, host_reads
from nsa_layer.config import NSAConfig
from nsa_layer.context_parallel import gather, heads
from nsa_layer.context_parallel.checks import KINDS, TILES, TOKENS, check_same_on_all_ranks, check_shard
from nsa_layer.context_parallel.heads import AUX, Attended
from nsa_layer.context_parallel.spec import ContextParallel
from nsa_layer.context_parallel.transport import sum_over_ranks
from nsa_layer.cute.memory_plan import MemoryPolicy
from nsa_layer.operators.registration import dispatcher_sees

LONG = 1 << 18  # tokens of all ranks from which on "gather" was measured to be faster than "heads"
RAGGED = ("k_cmp", "v_cmp", "block_indices")  # of which ranks have the rows whose first tokens they have


def attend(
    cp: ContextParallel,
    call: Call,
    check_options: Callable[[], None],
    static: dict[str, Any],
    options: dict[str, Any],
) -> Attended:
    """`operators.attend` of a rank's tokens, with the sums of an index' loss over all ranks; a rank's gradient of them
    is that of its part.

    Args:
        static: the arguments of `nsa`, or of `selected_attention`, that say what is computed.
        options: their other arguments, which `check_options` checks.
    """
    alone, config = "block_size" in static, static.get("config")
    check = partial(check_shard, call, cp, **static)
    arguments = dict(zip(TENSORS[:-2], call)) | static | options
    check_same_on_all_ranks(cp, [check_options, check], ragged=() if alone else RAGGED, **arguments)
    check_options()
    backend, more = options["backend"], options["return_lse" if alone else "return_aux"]
    gathers = cp.mode == "gather" or cp.mode == "auto" and auto_gathers(cp, call, config, backend)
    # Chunks hold blocks and tiles by length.
    by_length = call.k_cmp is not None or call.v_cmp is not None or (not alone and config.q_tile > 1)
    spec, layouts = check(read=gathers or by_length or host_reads(backend, call.q, call.cu_seqlens))
    kinds = [kind for name, kind in KINDS.items() if getattr(call, name) is not None] + [TILES] * (more and not alone)
    if missing := [kind for kind in kinds if kind not in layouts]:
        raise NotImplementedError(f"cp in a graph, with cu_seqlens and rows of {missing[0]}")
    call, memory = support.on_backend(backend, call._replace(spec=spec)), options.get("memory", MemoryPolicy())
    if call.k_index is not None:  # lists may share one key; heads are exchanged, and computed, apart
        call = call._replace(k_index=call.k_index.expand(*call.k.shape[:-1], -1))

    def attend_whole(call: Call) -> Attended:
        """A call of all tokens and some heads."""
        if options["validate"] and call.q.is_cuda and torch.compiler.is_compiling():
            assert_numbers(call, max_seqlen=static.get("max_seqlen"))
        return operators.attend(call, memory=memory, return_aux=more)

    with autocast.off(call.q.device):
        if gathers:
            o, aux, sums = gather.attend_shard(cp, call, memory, return_aux=more)
        else:
            memory, results = heads.memory_of_steps(call, layouts[TOKENS], cp, memory), ("lse_slc",) if alone else AUX
            o, aux, sums = heads.attend_heads(attend_whole, cp, call, layouts, results if more else ())
        return o, aux, sums if sums is None else sum_over_ranks(sums, cp)


def auto_gathers(cp: ContextParallel, call: Call, config: NSAConfig | None, backend: str | None) -> bool:
    """True if mode "auto" is "gather": where the ranks do not divide the key/value heads, and, outside of graphs, in
    long calls of `nsa` (config is not None) of which "gather" sends less.

    Each of R ranks sends a share of (R - 1) / R: with "heads" of q, k, v, o and their gradients of its own tokens, with
    "gather" of k and v of all tokens, twice, and of their gradients once.
    """
    q, starts, (Hq, Hkv) = call.q, call.cu_seqlens, (x.shape[-2] for x in call[:2])
    if Hkv % cp.size:
        return True
    if config is None or not config.by_token or backend == "reference":
        return False
    if dispatcher_sees(q) or (starts is not None and starts.is_cuda):
        return False
    return q.shape[-3] * cp.size >= LONG and 3 * Hkv * cp.size < 2 * (Hq + Hkv)
