"""Checks of a rank's arguments, before anything is exchanged: as shards of a whole call, and against other ranks'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from nsa_layer import checks
from nsa_layer.call import Call, CallSpec
from nsa_layer.config import NSAConfig
from nsa_layer.context_parallel.layout import ShardLayout, block_layout, resized
from nsa_layer.context_parallel.spec import ContextParallel, require_initialized
from nsa_layer.operators.registration import dispatcher_sees

Tensor = torch.Tensor
WEIGHTS = ("gate_weight", "compress_k_weight", "compress_v_weight")
TOKENS, BLOCKS, TILES = "tokens", "blocks", "tiles"
# Kinds of rows of a tensor; a tile of one query is a token.
KINDS = dict.fromkeys(("q", "k", "v", "gates", "k_win", "v_win", "q_index", "k_index"), TOKENS)
KINDS |= dict(k_cmp=BLOCKS, v_cmp=BLOCKS, block_indices=TILES)
# Descriptions that all ranks of a group had: an equal call of tensors on a GPU is not compared again.
_compared: set[tuple[str, tuple[tuple[str, str], ...]]] = set()


def check_same_on_all_ranks(
    cp: ContextParallel, locally: Sequence[Callable[[], object]], *, ragged: Sequence[str] = (), **arguments: object
) -> None:
    """Compare a call's arguments in one exchange, so that ranks that disagree raise instead of waiting for one another.

    On a CPU every call is compared: gloo ends the process if a peer sends more than is expected. On a GPU the first
    call of its shapes is, and with ``validate`` every call outside CUDA graphs. In a compiled graph none is. Where
    calls are compared, so are the values of ``cu_seqlens`` on a CPU, with ``validate`` on a GPU too.

    Args:
        locally: raise what is wrong with this rank's arguments, where calls are compared.
        ragged: names of the arguments of which ranks may have different numbers of rows.

    Raises:
        TypeError: cp is no ContextParallel.
        RuntimeError: torch.distributed is not initialised; or the first call like it is captured in a CUDA graph.
        ValueError: the ranks' shapes, dtypes, options, packed sequences or need of gradients differ, not all are in a
            mode of PyTorch's dispatcher, or some rank's arguments are bad: on every rank.
    """
    if not isinstance(cp, ContextParallel):
        raise TypeError(f"cp must be a ContextParallel or None, got {type(cp).__name__}")
    if torch.compiler.is_compiling():
        return
    require_initialized()
    arguments |= {f"cp.{name}": getattr(cp, name) for name in ("mode", "load_balance")}
    # Modes, and classes of tensors, decide what mode "auto" is.
    arguments["being in a mode of PyTorch's dispatcher"] = dispatcher_sees(arguments.get("q"))
    described = tuple((name, _describe(value, ragged=name in ragged)) for name, value in arguments.items())
    key, validate = (cp.group_name, described), arguments.get("validate")
    known = key in _compared and any(isinstance(x, Tensor) and x.is_cuda for x in arguments.values())
    if known and not validate:
        return
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        if known:
            return
        raise RuntimeError("CUDA graph capture: run a call with these shapes once before capturing it")
    wrong, starts = None, arguments.get("cu_seqlens")
    try:
        for check in locally:
            check()
        if starts is not None and (starts.is_cpu or validate):
            sequences = enumerate(pairwise(starts.tolist()))
            described = *described, *((f"the tokens of sequence {i} in cu_seqlens", pair) for i, pair in sequences)
    except Exception as error:  # raised below, after the other ranks have heard of it
        wrong = error
    answers: list = [None] * cp.size
    dist.all_gather_object(answers, (described, wrong and str(wrong)), group=cp.group)
    for rank, (theirs, _) in enumerate(answers):
        for (name, first), (_, value) in zip(answers[0][0], theirs):
            if first != value:
                raise ValueError(f"ranks disagree on {name}: rank 0 has {first}, rank {rank} has {value}") from wrong
    if wrong is not None:
        raise wrong
    for rank, (_, message) in enumerate(answers):
        if message is not None:
            raise ValueError(f"rank {rank}: {message}")
    if len(_compared) >= checks.MOST_KEPT:
        _compared.clear()
    _compared.add(key)


def check_shard(
    call: Call, cp: ContextParallel, *, read: bool = True, **static: Any
) -> tuple[CallSpec, dict[str, ShardLayout]]:
    """Check a rank's arguments of `nsa`, or of `selected_attention`, as shards of a whole call.

    Args:
        read: read ``cu_seqlens``, which a graph does not; else nothing is checked that depends on lengths.
        static: the function's arguments that say what is computed.

    Returns:
        The whole call's static side, and layouts by kind: "tokens"; "blocks", if there are compressed keys; "tiles". Of
        packed sequences that are not read there are no lengths, and no layouts that depend on them.
    """
    (q, k, v), starts, alone = call[:3], call.cu_seqlens, "block_size" in static
    packed = starts is not None
    checks.check_qkv(q, k, v, packed=packed)
    local, heads = q.shape[-3], k.shape[-2]
    if cp.mode == "heads" and heads % cp.size:
        raise ValueError(f"cp: mode='heads' needs ranks that divide the {heads} key/value heads, got {cp.size}")
    if local % len(cp.chunks):
        raise ValueError(f"q must have an even number of tokens on a rank, for load_balance='zigzag', got {local}")
    tokens = ShardLayout.of_tokens(cp, local)
    layouts, chunk = {TOKENS: tokens}, tokens.counts[0]
    config = _list_config(call, chunk, static["block_size"], static["deterministic"]) if alone else static["config"]
    checks.require_config(config)
    if config.q_tile == 1:
        layouts[TILES] = tokens
    checked = checks.check_selected if alone else checks.check_inputs
    if packed and (torch.compiler.is_compiling() or not read):  # as a call of this rank's tokens
        spec = checked(call, **static, backend="cute", validate=False)
        return replace(spec, bound=static.get("max_seqlen")), layouts
    lengths = whole_lengths(starts, q, cp) if packed else (tokens.total,)
    if call.k_cmp is not None or call.v_cmp is not None:
        layouts[BLOCKS] = block_layout(tokens, lengths, config.span, config.stride)
    if config.q_tile > 1:
        layouts[TILES] = block_layout(tokens, lengths, 1, config.q_tile)

    def whole(name: str, x: Tensor | None) -> Tensor | None:
        """A stand-in on no device for the tensor that the ranks hold together."""
        if not isinstance(x, Tensor) or (name in KINDS and x.dim() < 3):
            return x
        if x.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")
        if name in WEIGHTS:
            return x.to("meta")
        kind = KINDS[name]
        lead = (*q.shape[:-3], layouts[kind].local)
        if x.shape[not packed] != lead[-1]:
            raise ValueError(f"{name} must have this rank's {kind}, {lead}, first, got shape {tuple(x.shape)}")
        return resized(x, layouts[kind].total)

    stand_ins = {name: whole(name, getattr(call, name)) for name in (*WEIGHTS, *KINDS)}
    stand_ins["cu_seqlens"] = checks.starts_of_lengths(lengths) if packed else None
    return checked(call._replace(**stand_ins), **static), layouts


def _list_config(call: Call, chunk: int, block_size: int, deterministic: bool) -> NSAConfig:
    """Options of `selected_attention`: the number of lists tells how many queries of a chunk share one."""
    if call.q_offset is not None or call.cu_seqlens_k is not None:
        raise ValueError("cu_seqlens_k and q_offset must be None with cp: queries have the positions of keys, got one")
    lists, local = call.block_indices, call.q.shape[-3]
    checks.check_kind("block_indices", lists, call.q, checks.LISTS, optional=False)
    count = lists.shape[-3] if lists.dim() == call.q.dim() else local
    q_tile = next((tile for tile in checks.Q_TILES if tile * count == local), None)
    if q_tile is None or (q_tile > 1 and (call.packed or chunk % q_tile)):
        raise ValueError(
            f"block_indices must have a list for each of the rank's {local} queries, or, not packed, for each tile of "
            f"its chunks of {chunk}, got {count} lists"
        )
    sizes = dict(block_size=block_size, q_tile=q_tile, window_size=0)
    return NSAConfig(**sizes, deterministic=deterministic, branches=("selected",))


def whole_lengths(cu_seqlens: Tensor, x: Tensor, cp: ContextParallel) -> tuple[int, ...]:
    """Lengths of the sequences that the ranks' tokens, such as x [n, ...], are of; TypeError or ValueError."""
    checks.check_starts(cu_seqlens)
    whole = resized(x, x.shape[-3] * cp.size)
    return checks.check_lengths(cu_seqlens.cpu(), whole, "cu_seqlens", f"the {cp.size} ranks")


def _describe(value: object, *, ragged: bool) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    if value.is_nested:
        return "a nested tensor"  # it has no shape to read
    gradient = " with a gradient" if torch.is_grad_enabled() and value.requires_grad else ""
    shape = f"(.., {', '.join(map(str, value.shape[-2:]))})" if ragged else str(tuple(value.shape))
    return f"{value.dtype} {shape} on {value.device.type}{gradient}"
