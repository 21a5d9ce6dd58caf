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
from nsa_layer.context_parallel.checks import TOKENS, check_same_on_all_ranks, check_shard
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
    """`nsa` or `selected_attention`, which is passed in, of a rank's tokens.

    Args:
        static: its arguments that say what is computed.
        options: the others.
    """
    alone, config = "block_size" in static, static.get("config")
    if isinstance(config, NSAConfig):
        require_published(config, "cp")
    check = partial(check_shard, call, cp, **static)
    given = call.arguments() | static | options
    check_same_on_all_ranks(cp, [check_options, check], ragged=() if alone else RAGGED, **given)
    check_options()
    backend, more = options["backend"], options["return_lse" if alone else "return_aux"]
    better = not alone and backend != "reference" and gather.is_better(cp, call, config)
    gathers = cp.mode_of(call.k.shape[-2], gather=better) == "gather"
    # Chunks hold blocks and tiles by length.
    by_length = call.k_cmp is not None or call.v_cmp is not None or (not alone and config.q_tile > 1)
    on_gpu = call.q.is_cuda and getattr(call.cu_seqlens, "is_cuda", False)
    spec, layouts = check(read=gathers or by_length or not on_gpu)
    call = call._replace(spec=spec)
    if gathers:
        memory = {} if alone else dict(memory=options["memory"])
        with autocast.off(call.q.device):
            o, rest = gather.attend(cp, support.on_backend(backend, call), **memory, return_aux=more)
        return (o, rest) if more else o
    if spec.lengths is not None:  # no second look at what may be on a GPU
        call = call._replace(cu_seqlens=starts_of_lengths(spec.lengths))
    if not alone:
        options = options | dict(memory=heads.memory_of_steps(call, layouts[TOKENS], cp, options["memory"]))
    return heads.attend(partial(function, **static, **options), cp, call, layouts)
