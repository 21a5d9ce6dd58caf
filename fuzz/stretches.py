"""A call of the operator in stretches of its queries, each with all keys and the position of its first query."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from nsa_layer.call_spec import Aux, CallSpec, CallTensors

Tensor = torch.Tensor
Attend = Callable[..., tuple[Tensor, Aux]]
Stretch = Sequence[tuple[int, int]]  # (first query, end) of each sequence


def in_stretches(attend: Attend, stretches: Sequence[Stretch]) -> Attend:
    """An ``attend`` that calls another one for each stretch in turn and joins what it gives.

    Args:
        attend: a backend's.
        stretches: which together are all queries; in a batch those of one stretch have one length.
    """

    def joined(tensors: CallTensors, *, spec: CallSpec) -> tuple[Tensor, Aux]:
        q, gates, block_indices = tensors.q, tensors.gates, tensors.block_indices
        lengths = spec.lengths or [q.shape[1]] * len(q)
        tile = spec.config.q_tile
        found = []
        for stretch in stretches:
            own = replace(spec, lengths_k=spec.lengths, lengths=tuple(end - first for first, end in stretch))
            if spec.lengths is None:
                own = spec
            listed = [(first // tile, -(-end // tile)) for first, end in stretch]
            cut = [
                x if x is None else _taken(x, _places(bounds, sizes, spec.lengths is not None))
                for x, bounds, sizes in (
                    (q, stretch, lengths),
                    (gates, stretch, lengths),
                    (block_indices, listed, [spec.config.num_tiles(length) for length in lengths]),
                )
            ]
            offset = torch.tensor([first for first, _ in stretch], dtype=torch.int32, device=q.device)
            more = dict(q=cut[0], gates=cut[1], block_indices=cut[2], q_offset=offset)
            found.append(attend(tensors._replace(**more, cu_seqlens=None), spec=own))
        # The stretches' rows one after the other, and back to the order of all queries.
        order = torch.cat([_places(s, lengths, spec.lengths is not None).to(q.device) for s in stretches], dim=-1)
        back = order.argsort(dim=-1)

        def whole(parts: list[Tensor], tokens_last: bool = False) -> Tensor:
            parts = [x.mT for x in parts] if tokens_last else parts
            made = _taken(torch.cat(parts, dim=order.dim() - 1), back)
            return made.mT if tokens_last else made

        auxes = [aux for _, aux in found]
        lists = block_indices if block_indices is not None else whole([aux.block_indices for aux in auxes])
        lses = [whole([getattr(aux, name) for aux in auxes], True) for name in ("lse_cmp", "lse_slc", "lse_swa")]
        return whole([o for o, _ in found]), Aux(lists, whole([aux.gates for aux in auxes]), *lses)

    return joined


def _places(bounds: Sequence[tuple[int, int]], lengths: Sequence[int], packed: bool) -> Tensor:
    """The rows of a stretch: [B, rows], or of packed sequences [rows]."""
    if not packed:
        return torch.stack([torch.arange(first, end) for first, end in bounds])
    before = torch.tensor([0, *lengths]).cumsum(0)
    return torch.cat([torch.arange(first, end) + at for (first, end), at in zip(bounds, before)])


def _taken(x: Tensor, places: Tensor) -> Tensor:
    """Rows of [B, T, ...] by places [B, rows], or of [total, ...] by places [rows]."""
    places = places.to(x.device)
    return x[places] if places.dim() == 1 else x[torch.arange(len(x), device=x.device)[:, None], places]
