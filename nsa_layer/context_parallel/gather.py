"""Each rank attends with its own queries to the keys and values of all ranks.

Compressed keys are made where their blocks start, and gathered.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F

from nsa_layer import support
from nsa_layer.block_mlp import compressed
from nsa_layer.call_spec import Aux, CallSpec, CallTensors, require_choice_by_token
from nsa_layer.context_parallel import overlapped
from nsa_layer.context_parallel.blocks import compress_own
from nsa_layer.context_parallel.collectives import gather
from nsa_layer.context_parallel.halo import with_neighbours
from nsa_layer.context_parallel.rows import Rows, of_blocks
from nsa_layer.context_parallel.spec import ContextParallel
from nsa_layer.context_parallel.stretches import stretches_of

Tensor = torch.Tensor


def attend(
    cp: ContextParallel, backend: str, tensors: CallTensors, *, spec: CallSpec, **options: Any
) -> tuple[Tensor, Aux]:
    """The operator on a rank's queries; arguments as `nsa` has checked them, ``spec`` of the whole call.

    Raises:
        NotImplementedError: queries choose by tile, or have lists of tiles that chunks cut.
    """
    (q, k, v), k_cmp, v_cmp, block_indices = tensors[:3], tensors.k_cmp, tensors.v_cmp, tensors.block_indices
    config, packed, local = spec.config, spec.lengths is not None, q.shape[-3]
    if block_indices is None:
        require_choice_by_token(config, "cp with mode='gather'")
    elif config.q_tile > 1 and (packed or local // len(cp.chunks) % config.q_tile):
        raise NotImplementedError(
            f"cp: mode='gather' with lists for tiles of {config.q_tile} queries needs chunks of whole tiles, not packed"
        )
    lengths = spec.lengths or (local * cp.size,)
    tokens = Rows.of_tokens(cp, local)
    blocks = of_blocks(cp, lengths, tokens.counts[0], config.span, config.stride)

    def whole(x: Tensor, rows: Rows) -> Tensor:
        return gather(x[None], rows, cp)[0] if packed else gather(x, rows, cp)

    def made(x: Tensor, weight: Tensor | None) -> Tensor:
        mean = partial(compressed, network=None) if backend != "cute" else overlapped.compressed
        return compress_own(x, spec.lengths, cp, partial(mean, weight=weight, config=config), config=config)

    k_cmp = made(k, tensors.compress_k_weight) if k_cmp is None else k_cmp
    v_cmp = made(v, tensors.compress_v_weight) if v_cmp is None else v_cmp
    tensors = tensors._replace(
        k_cmp=k_cmp, v_cmp=v_cmp, compress_k_weight=None, compress_v_weight=None, cu_seqlens=None
    )
    stretches = stretches_of(cp, local, spec.lengths, cut=spec.causal and block_indices is None)
    dim, reach = 0 if packed else 1, config.window_size - 1
    windows = [stretch.window(reach, causal=spec.causal) for stretch in stretches]
    of_window: list[list[Tensor]] = []
    if tensors.has_own_window:
        beside, most = [(window.before, window.after) for window in windows], (reach, 0 if spec.causal else reach)
        for x in tensors.of_window:
            parts = with_neighbours(x[None] if packed else x, beside, most, cp)
            of_window.append([part[0] for part in parts] if packed else parts)
    if backend == "cute":
        own = dict(zip(("k_win", "v_win"), [torch.cat(parts, dim) for parts in of_window]))
        o, auxes = overlapped.attend(cp, tensors._replace(**own), stretches, windows, blocks, spec=spec, **options)
        return o, None if auxes is None else joined_aux(auxes, spec, max(lengths), dim, block_indices)
    k_cmp, v_cmp = (whole(x, blocks) for x in (k_cmp, v_cmp))
    of_tokens = dict(k=whole(k, tokens), v=whole(v, tokens))

    def rows(x: Tensor | None, which: slice) -> Tensor | None:
        return x if x is None else x[which] if packed else x[:, which]

    found, sequences, tile = [], 1 if packed else q.shape[0], config.q_tile
    for i, (stretch, window) in enumerate(zip(stretches, windows, strict=True)):
        blocks_here, (first, end) = stretch.blocks(spec), (stretch.queries.start, stretch.queries.stop)
        lists = rows(block_indices, slice(first // tile, -(-end // tile)))
        keys = {name: rows(x, stretch.keys) for name, x in of_tokens.items()}
        keys |= dict(k_cmp=rows(k_cmp, blocks_here), v_cmp=rows(v_cmp, blocks_here))
        unseen = window.keys.start, stretch.keys.stop - stretch.keys.start - window.keys.stop
        keys |= dict(zip(("k_win", "v_win"), [F.pad(parts[i], (0, 0, 0, 0, *unseen)) for parts in of_window]))
        own = dict(q=rows(q, stretch.queries), gates=rows(tensors.gates, stretch.queries), block_indices=lists)
        part = tensors._replace(**keys, **own, q_offset=stretch.offsets(sequences, q.device))
        run = import_module(support.BACKENDS[backend]).attend
        found.append(run(part, spec=stretch.spec(spec), **options))
    o, auxes = torch.cat([o for o, _ in found], dim), [aux for _, aux in found]
    return o, joined_aux(auxes, spec, max(lengths), dim, block_indices)


def joined_aux(auxes: list[Aux], spec: CallSpec, longest: int, dim: int, block_indices: Tensor | None) -> Aux:
    """Those of a rank's stretches, as those of its tokens."""
    lists, width = [aux.block_indices for aux in auxes], spec.config.list_width(longest)
    if block_indices is None:
        lists = torch.cat([F.pad(x, (0, width - x.shape[-1]), value=-1) for x in lists], dim)
    lses = (torch.cat([getattr(aux, name) for aux in auxes], -1) for name in ("lse_cmp", "lse_slc", "lse_swa"))
    return Aux(lists if block_indices is None else block_indices, torch.cat([aux.gates for aux in auxes], dim), *lses)
