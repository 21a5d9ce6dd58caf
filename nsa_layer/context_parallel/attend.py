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
    better = not alone and backend != "reference" and gather.is_better(cp, call, config)
    gathers = cp.mode_of(call.k.shape[-2], gather=better) == "gather"
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
            o, rest = gather.attend(cp, support.on_backend(backend, call), options.get("memory"), return_aux=more)
        return (o, rest) if more else o
    if spec.lengths is not None:  # no second look at what may be on a GPU
        call = call._replace(cu_seqlens=starts_of_lengths(spec.lengths))
    if not alone:
        options = options | dict(memory=heads.memory_of_steps(call, layouts[TOKENS], cp, options["memory"]))
    return heads.attend(partial(function, **static, **options), cp, call, layouts)
