"""A call of the operator in shards of its queries, each with all keys and the position of its first query."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from nsa_layer import operators
from nsa_layer.call import Aux, Call
from nsa_layer.checks import starts_of_lengths

Tensor = torch.Tensor
Attend = Callable[..., tuple[Tensor, Aux]]
QueryShard = Sequence[tuple[int, int]]  # (first query, end) of each sequence


def in_shards(attend: Attend, shards: Sequence[QueryShard]) -> Attend:
    """An ``attend`` that calls another one for each shard and joins what it gives.

    Args:
        attend: a backend's.
        shards: which together are all queries; in a batch those of one shard have one length.
    """

    def joined(call: Call) -> tuple[Tensor, Aux, Tensor | None]:
        spec, q, block_indices = call.spec, call.q, call.block_indices
        lengths = spec.lengths or [q.shape[1]] * len(q)
        tile = spec.config.q_tile
        found = []
        for shard in shards:
            own = replace(spec, lengths_k=spec.lengths, lengths=tuple(end - first for first, end in shard))
            if spec.lengths is None:
                own = spec
            listed = [(first // tile, -(-end // tile)) for first, end in shard]
            rows = {"block_indices": (listed, [spec.config.num_tiles(length) for length in lengths])}
            rows |= dict.fromkeys(("q", "gates", "q_index"), (shard, lengths))
            cut = {
                name: _at_rows(x, _rows(*of, spec.lengths is not None))
                for name, of in rows.items()
                if (x := getattr(call, name)) is not None
            }
            offset = torch.tensor([first for first, _ in shard], dtype=torch.int32, device=q.device)
            found.append(attend(call._replace(**cut, q_offset=offset, cu_seqlens=None, spec=own)))
        # The shards' rows one after the other, and back to the order of all queries.
        order = torch.cat([_rows(s, lengths, spec.lengths is not None).to(q.device) for s in shards], dim=-1)
        back = order.argsort(dim=-1)

        def whole(parts: list[Tensor], tokens_last: bool = False) -> Tensor:
            parts = [x.mT for x in parts] if tokens_last else parts
            made = _at_rows(torch.cat(parts, dim=order.dim() - 1), back)
            return made.mT if tokens_last else made

        auxes = [aux for _, aux, *_ in found]
        lists = block_indices if block_indices is not None else whole([aux.block_indices for aux in auxes])
        scores = None if auxes[0].index_scores is None else whole([aux.index_scores for aux in auxes])
        lses = {
            name: whole([getattr(aux, name) for aux in auxes], True)
            for name in ("lse_cmp", "lse_slc", "lse_swa")
            if getattr(auxes[0], name) is not None
        }
        aux = Aux(
            block_indices=lists,
            index_scores=scores,
            gates=whole([aux.gates for aux in auxes]),
            **dict.fromkeys(("lse_cmp", "lse_slc", "lse_swa")) | lses,
        )
        return whole([o for o, *_ in found]), aux, sum(s for *_, s in found) if spec.index_loss else None

    return joined


def _rows(bounds: Sequence[tuple[int, int]], lengths: Sequence[int], packed: bool) -> Tensor:
    """The rows of a shard: [B, rows], or of packed sequences [rows]."""
    if not packed:
        return torch.stack([torch.arange(first, end) for first, end in bounds])
    before = torch.tensor([0, *lengths]).cumsum(0)
    return torch.cat([torch.arange(first, end) + at for (first, end), at in zip(bounds, before)])


def _at_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x [B, T, ...] at rows [B, rows], or [total, ...] at rows [rows]."""
    rows = rows.to(x.device)
    return x[rows] if rows.dim() == 1 else x[torch.arange(len(x), device=x.device)[:, None], rows]


def attend(call: Call, *, backend: str) -> tuple[Tensor, Aux, Tensor | None]:
    """The operator with gradients."""
    spec = replace(call.spec, backend=backend)
    if call.q_offset is not None and call.block_indices is None:
        spec.config.require_choice_by_token()
    starts = None if spec.lengths_k is None else starts_of_lengths(spec.lengths_k)
    return operators.attend(call._replace(cu_seqlens_k=starts, spec=spec))
