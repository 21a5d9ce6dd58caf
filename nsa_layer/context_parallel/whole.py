"""The whole call that ranks share, as its shapes: checked before anything is sent."""

from __future__ import annotations

import torch

from nsa_layer.call_spec import CallSpec
from nsa_layer.checks import (
    Arguments,
    check_inputs,
    check_lengths,
    check_qkv,
    check_scale,
    check_starts,
    require_config,
)
from nsa_layer.context_parallel import rows
from nsa_layer.context_parallel.rows import Rows
from nsa_layer.context_parallel.spec import ContextParallel

Tensor = torch.Tensor
WEIGHTS = ("gate_weight", "compress_k_weight", "compress_v_weight")
TOKENS, BLOCKS, TILES = "tokens", "blocks", "tiles"


def check_whole(given: Arguments, cp: ContextParallel, *, read: bool = True) -> tuple[CallSpec, dict[str, Rows]]:
    """Check a rank's arguments of `nsa` as parts of a whole call.

    Args:
        read: read ``cu_seqlens``, which a graph does not; else nothing is checked that depends on lengths.

    Returns:
        The whole call's static side, and rows by kind: "tokens"; "blocks", which are compressed keys, where they are
        given; and "tiles", which have lists. Of packed sequences that are not read no lengths, and of rows those of
        tokens.

    Raises:
        TypeError, ValueError: an argument is bad, or the mode does not fit.
    """
    tensors, config = given.tensors, given.config
    (q, k, v), cu_seqlens, packed = tensors[:3], tensors.cu_seqlens, tensors.cu_seqlens is not None
    check_qkv(q, k, v, packed=packed)
    cp.mode_of(k.shape[-2])
    require_config(config)
    local = q.shape[-3]
    held = {TOKENS: check_tokens(local, cp)}
    total, chunk = local * cp.size, local // len(cp.chunks)
    if packed and (torch.compiler.is_compiling() or not read):
        listed, scale = tensors.block_indices is not None, check_scale(given.softmax_scale, q.shape[-1])
        return CallSpec(config, given.causal, scale, listed=listed), held
    lengths = (total,)
    if packed:
        check_starts(cu_seqlens)
        cu_seqlens = cu_seqlens.cpu()
        lengths = whole_lengths(cu_seqlens, q, cp)
    if tensors.k_cmp is not None or tensors.v_cmp is not None:
        held[BLOCKS] = rows.of_blocks(cp, lengths, chunk, config.span, config.stride)
    held[TILES] = held[TOKENS] if config.q_tile == 1 else rows.of_tiles(cp, lengths, chunk, config.q_tile)

    def on_device(name: str, x: Tensor | None) -> Tensor | None:
        if isinstance(x, torch.Tensor) and x.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")
        return x

    def whole(name: str, x: Tensor | None, kind: str) -> Tensor | None:
        if not isinstance(x, torch.Tensor) or x.dim() < 3:
            return x
        on_device(name, x)
        expected = sum(held[kind].of_rank(cp.rank))
        if x.shape[0 if packed else 1] != expected:
            lead = (expected,) if packed else (q.shape[0], expected)
            raise ValueError(f"{name} must have this rank's {kind}, {lead}, first, got shape {tuple(x.shape)}")
        return _like(x, sum(held[kind].counts), 0 if packed else 1)

    weights = {name: on_device(name, getattr(tensors, name)) for name in WEIGHTS}
    parts = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in weights.items()}
    kinds = dict.fromkeys(("q", "k", "v", "gates", "k_win", "v_win"), TOKENS)
    kinds |= dict(k_cmp=BLOCKS, v_cmp=BLOCKS, block_indices=TILES)
    parts |= {name: whole(name, getattr(tensors, name), kind) for name, kind in kinds.items()}
    spec = check_inputs(given._replace(tensors=tensors._replace(**parts, cu_seqlens=cu_seqlens)))
    return spec, held


def whole_lengths(cu_seqlens: Tensor, x: Tensor, cp: ContextParallel) -> tuple[int, ...]:
    """Lengths of the sequences that the ranks' tokens, such as x [n, ...], are of; TypeError or ValueError."""
    check_starts(cu_seqlens)
    return check_lengths(cu_seqlens.cpu(), _like(x, len(x) * cp.size), "cu_seqlens", f"the {cp.size} ranks")


def check_tokens(local: int, cp: ContextParallel) -> Rows:
    """Raise ValueError where a rank's tokens are no equal chunks."""
    if local % len(cp.chunks):
        raise ValueError(f"q must have an even number of tokens on a rank, for load_balance='zigzag', got {local}")
    return Rows.of_tokens(cp, local)


def _like(x: Tensor, length: int, dim: int = 0) -> Tensor:
    shape = (*x.shape[:dim], length, *x.shape[dim + 1 :])
    return torch.empty(shape, dtype=x.dtype, device="meta")
