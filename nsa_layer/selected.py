"""`selected_attention`: the selected branch alone, over the caller's own lists of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from nsa_layer import autocast, operators, support
from nsa_layer.call import Call, CallSpec
from nsa_layer.checks import (
    INT32,
    assert_numbers,
    check_kind,
    check_lengths,
    check_lists_of,
    check_positions,
    check_qkv,
    check_scale,
    check_starts,
    check_tensor,
    lengths_known,
    lists_in_int32,
)
from nsa_layer.config import WIDEST_TILE, ListConfig, require_bools, require_int
from nsa_layer.context_parallel import selected as context_parallel
from nsa_layer.context_parallel.checks import check_list_shard, check_same_on_all_ranks
from nsa_layer.context_parallel.spec import ContextParallel
from nsa_layer.derivatives import refuse_transforms

Tensor = torch.Tensor
TILES = tuple(1 << i for i in range(WIDEST_TILE.bit_length()))  # queries that may share a list


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    *,
    block_size: int,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    q_offset: Tensor | int | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
    cp: ContextParallel | None = None,
    validate: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of every query to the blocks of keys that its list names.

    Differentiable in q, k and v: once, by reverse mode; the reference any number of times. Autocast as for `nsa`.

    Args:
        q: [B, T, Hq, D], or packed [total, Hq, D] with ``cu_seqlens``.
        k: [B, S, Hkv, D], or packed [total_k, Hkv, D]; Hkv divides Hq.
        v: [B, S, Hkv, Dv], or packed [total_k, Hkv, Dv].
        block_indices: int32 or int64 [B, M, Hs, n], packed [tiles of all sequences, Hs, n]; M is T for a list of each
            query, or the number of tiles of 2, 4, .. 256 queries. Hs = Hkv, or Hq for a list of each query head. Any
            strides and order; block j is keys ``j * block_size`` to ``(j + 1) * block_size - 1`` of its sequence; a
            number that is no block of the sequence is padding, a block named twice counts once.
        block_size: keys in a block; the last one may be short.
        cu_seqlens: int32 [sequences + 1], starts of the packed queries and their total, on q's device or the CPU; as
            for `nsa`, the kernels do not show those on a GPU to the host where the number of lists tells the tile
            whatever the lengths are.
        cu_seqlens_k: the same for keys; None: ``cu_seqlens``.
        q_offset: position of each sequence's first query among its keys: int32 [B] or [sequences] on q's device, or an
            int for all. None: the queries are the last ones, ``S - T``.
        softmax_scale: factor of q . k, above 0; None: ``D ** -0.5``.
        causal: query i sees no key after position ``q_offset + i``.
        deterministic: the same input gives the same bits twice, backward included.
        return_lse: also return the log-sum-exp, which carries no gradient.
        backend: as for `nsa`.
        cp: as for `nsa`, where queries are those of all keys.
        validate: check ``cu_seqlens`` and ``cu_seqlens_k`` that are on a GPU, which waits for it; in a graph the GPU
            asserts them.

    Returns:
        o, [B, T, Hq, Dv] or [total, Hq, Dv] in q's dtype; a query that sees no key gives 0. With ``return_lse`` a pair
        (o, lse): natural, [B, Hq, T] or [Hq, total], -inf where a query sees no key.

    Raises:
        TypeError, ValueError: an argument is bad; the message names it.
        NotImplementedError: the backend does not do this on this architecture; or vmap or forward mode.
        RuntimeError: a second derivative is asked for.
    """
    transformed = () if backend == "reference" else (q, k, v, block_indices, cu_seqlens, cu_seqlens_k, q_offset)
    flags = dict(causal=causal, deterministic=deterministic, return_lse=return_lse, validate=validate)
    checks = (
        partial(refuse_transforms, *transformed),
        partial(require_bools, **flags),
        partial(require_int, "block_size", block_size, least=1),
    )
    q, k, v = autocast.cast(q, k, v)
    block_indices = lists_in_int32(block_indices)
    starts = dict(cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k)
    call = Call(q, k, v, **starts, block_indices=block_indices, q_offset=q_offset)
    static = dict(block_size=block_size, softmax_scale=softmax_scale, causal=causal, deterministic=deterministic)
    options = dict(backend=backend, return_lse=return_lse, validate=validate)
    if cp is not None:
        of_shard = partial(check_list_shard, call, cp, **static)
        check_same_on_all_ranks(cp, (*checks, of_shard), **call.arguments(), **static, **options)
    for check in checks:
        check()
    if cp is not None:
        return context_parallel.attend(selected_attention, cp, call, **static, **options)
    if cu_seqlens is None and cu_seqlens_k is not None:
        raise ValueError("cu_seqlens_k is for packed input, got it without cu_seqlens")
    packed, apart = cu_seqlens is not None, cu_seqlens is None or cu_seqlens_k is not None
    _, layout = check_qkv(q, k, v, packed=packed, same_length=not apart)
    if not isinstance(block_indices, Tensor):
        check_kind("block_indices", block_indices, q, INT32)
    of_q = of_k = bound = q_tile = None
    if packed:
        check_starts(cu_seqlens)
        q_tile = _tile_of_any(block_indices, q.shape[0], cu_seqlens.shape[0] - 1)
        read = validate or q_tile is None or torch.compiler.is_compiling()
        read = read or lengths_known(backend, q, cu_seqlens, *[cu_seqlens_k] * apart)
        bound = None if read else q.shape[0]
        of_q = check_lengths(cu_seqlens, q, "cu_seqlens", "q", read=read)
        of_k = check_lengths(cu_seqlens_k, k, "cu_seqlens_k", "k", read=read) if apart else of_q
        if apart and cu_seqlens_k.shape != cu_seqlens.shape:
            sequences, of_keys = cu_seqlens.shape[0] - 1, cu_seqlens_k.shape[0] - 1
            raise ValueError(f"cu_seqlens_k must have cu_seqlens's {sequences} sequences, got {of_keys}")
    known = not packed or of_q is not None
    if known or q_tile is None:
        q_tile = _tile_of(block_indices, of_q or q.shape[-3:-2], packed)
    config = ListConfig(block_size=block_size, q_tile=q_tile, window_size=0, deterministic=deterministic)
    static = dict(lengths=of_q, lengths_k=of_k, listed=True, bound=bound, alone=True)
    call = call._replace(spec=CallSpec(config, causal, check_scale(softmax_scale, q.shape[-1]), **static))
    check_lists_of(call)
    sequences = cu_seqlens.shape[0] - 1 if packed else q.shape[0]
    if q_offset is None or isinstance(q_offset, Tensor):
        check_tensor("q_offset", q_offset, q, dict(sequences=sequences), layout)
    else:
        require_int("q_offset", q_offset, least=0)
    if backend == "reference" or q_offset is None:  # operators of other backends read it
        check_positions(q_offset, zip(of_q or q.shape[-3:-2], of_k or k.shape[-3:-2]), causal=causal)
    call = support.on_backend(backend, call)
    if isinstance(q_offset, int):
        q_offset = torch.full((sequences,), q_offset, dtype=torch.int32, device=q.device)
    call = call._replace(q_offset=q_offset)
    if validate and q.is_cuda and torch.compiler.is_compiling():
        assert_numbers(call)
    with autocast.off(q.device):
        o, lse, _ = operators.attend(call)
    return (o, lse.detach()) if return_lse else o


def _tile_of(block_indices: Tensor, lengths: Sequence[int], packed: bool) -> int:
    """The queries that share a list, by the number of lists: the smallest that fits."""
    given = _lists_of(block_indices, packed)
    for tile in TILES:
        if given is None or sum(-(-T // tile) for T in lengths) == given:
            return tile
    raise ValueError(
        f"block_indices must have a list for each query, {sum(lengths)}, or for each tile of 2, 4, .. {WIDEST_TILE} "
        f"queries, got {given} lists"
    )


def _tile_of_any(block_indices: Tensor, total: int, sequences: int) -> int | None:
    """`_tile_of` packed sequences of any lengths; None where lengths tell."""
    given = _lists_of(block_indices, packed=True)
    if given is None or given == total:
        return 1
    fit = [tile for tile in TILES if -(-total // tile) <= given <= (total + sequences * (tile - 1)) // tile]
    return fit[0] if len(fit) == 1 else None


def _lists_of(block_indices: Tensor, packed: bool) -> int | None:
    """Lists of a sequence, packed of all; None where these are no lists, which the checks of the rest refuse."""
    if not isinstance(block_indices, Tensor) or block_indices.is_nested or block_indices.dim() < 2 + (not packed):
        return None
    return block_indices.shape[0 if packed else 1]
