"""`nsa` and `selected_attention` of a rank's tokens: compare the ranks' arguments, check them, choose the mode."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from nsa_layer import autocast, support
from nsa_layer.call import Call
from nsa_layer.checks import require_published, starts_of_lengths
from nsa_layer.config import NSAConfig
from nsa_layer.context_parallel import gather, heads
from nsa_layer.context_parallel.checks import KINDS, TILES, TOKENS, check_same_on_all_ranks, check_shard
from nsa_layer.context_parallel.spec import ContextParallel
from nsa_layer.operators.registration import dispatcher_sees

LONG = 1 << 18  # tokens of all ranks from which on "gather" was measured to be faster than "heads"
RAGGED = ("k_cmp", "v_cmp", "block_indices")  # of which ranks have the rows whose first tokens they have


def attend(
    function: Callable[..., Any],
    cp: ContextParallel,
    call: Call,
    check_options: Callable[[], None],
    static: dict[str, Any],
    options: dict[str, Any],
) -> Any:
    """`nsa` or `selected_attention` of a rank's tokens.

    Args:
        function: one of the two.
        call: this rank's tensors.
        check_options: checks `options`.
        static: the function's arguments that say what is computed.
        options: its other arguments.

    Raises:
        TypeError, ValueError, RuntimeError: as of `check_same_on_all_ranks` and `check_shard`.
        NotImplementedError: an index, or branches left out; the mode does not do this; or a graph would have to know
            lengths of packed sequences.
    """
    alone, config = "block_size" in static, static.get("config")
    if isinstance(config, NSAConfig):
        require_published(config, "cp")
    check = partial(check_shard, call, cp, **static)
    arguments = call.arguments() | static | options
    check_same_on_all_ranks(cp, [check_options, check], ragged=() if alone else RAGGED, **arguments)
    check_options()
    backend, more = options["backend"], options["return_lse" if alone else "return_aux"]
    gathers = cp.mode == "gather" or cp.mode == "auto" and auto_gathers(cp, call, config, backend)
    # Chunks hold blocks and tiles by length.
    by_length = call.k_cmp is not None or call.v_cmp is not None or (not alone and config.q_tile > 1)
    on_gpu = call.q.is_cuda and getattr(call.cu_seqlens, "is_cuda", False)
    spec, layouts = check(read=gathers or by_length or not on_gpu)
    kinds = [kind for name, kind in KINDS.items() if getattr(call, name) is not None] + [TILES] * (more and not alone)
    if missing := [kind for kind in kinds if kind not in layouts]:
        raise NotImplementedError(f"cp in a graph, with cu_seqlens and rows of {missing[0]}")
    call = call._replace(spec=spec)
    if gathers:
        with autocast.off(call.q.device):
            o, rest = gather.attend_shard(cp, support.on_backend(backend, call), options.get("memory"), return_aux=more)
        return (o, rest) if more else o
    if spec.lengths is not None:  # starts on a GPU are not read twice
        call = call._replace(cu_seqlens=starts_of_lengths(spec.lengths))
    if not alone:
        options = options | dict(memory=heads.memory_of_steps(call, layouts[TOKENS], cp, options["memory"]))
    return heads.attend_heads(partial(function, **static, **options), cp, call, layouts)


def auto_gathers(cp: ContextParallel, call: Call, config: NSAConfig | None, backend: str | None) -> bool:
    """True if mode "auto" is "gather": where the ranks do not divide the key/value heads, and, outside of graphs, in
    long calls of `nsa` of which "gather" sends less.

    Each of R ranks sends a share of (R - 1) / R: with "heads" of q, k, v, o and their gradients of its own tokens, with
    "gather" of k and v of all tokens, twice, and of their gradients once.

    Args:
        config: None for `selected_attention`.
    """
    q, starts, (Hq, Hkv) = call.q, call.cu_seqlens, (x.shape[-2] for x in call[:2])
    if Hkv % cp.size:
        return True
    if config is None or not config.by_token or backend == "reference":
        return False
    if dispatcher_sees(q) or (starts is not None and starts.is_cuda):
        return False
    return q.shape[-3] * cp.size >= LONG and 3 * Hkv * cp.size < 2 * (Hq + Hkv)
