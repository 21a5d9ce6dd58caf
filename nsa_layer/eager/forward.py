"""Forward in plain PyTorch, with the lines of `nsa_layer/cute/forward.py`.

On a CPU, fp16 and bf16 are computed in fp32 and rounded at the end: CPUs multiply fp32 faster. Backward gets the
branches' log-sum-exps, the gates and the selected blocks, and computes everything else again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from nsa_layer.call import LSES, Aux, Call, Saved, accumulation_dtype, equal_gates
from nsa_layer.eager.chunk_attention import attend_chunks, to_compute_dtype, visible_compressed, visible_window
from nsa_layer.eager.index import saved_of_index
from nsa_layer.eager.list_attention import attend_lists
from nsa_layer.eager.pooling import mean_pool
from nsa_layer.eager.select_blocks import select_blocks
from nsa_layer.profiler_ranges import component
from nsa_layer.projection import project

Tensor = torch.Tensor


@torch.no_grad()
def attend(call: Call) -> tuple[Tensor, Aux]:
    """The operator; arguments and results as of `forward`, with `Aux` for what is saved."""
    o, saved = forward(call)
    return o, saved.aux(call)


def forward(call: Call, *, plan: object = None, backward: bool = True, o: Tensor | None = None) -> tuple[Tensor, Saved]:
    """o, in the dtype of q, and the tensors of backward; arguments as `nsa` has checked them.

    ``q_offset`` is read on the host; lengths of packed sequences come from ``spec``, not from ``cu_seqlens``.

    Args:
        plan, backward, o: not read; heads are computed together, and outputs are not saved.
    """
    spec, config = call.spec, call.config
    width = config.list_width(call.k.shape[-3])
    results = [_forward_batch(batch, width, *offsets) for batch, *offsets in batches(call)]

    def joined(parts: Sequence[Tensor | None]) -> Tensor | None:
        if parts[0] is None:
            return None
        parts = parts if spec.lengths is None else [x.squeeze(0) for x in parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    sums = [saved.index_sums for _, saved in results]
    sums = None if sums[0] is None else torch.stack(sums).sum(0)
    saved = Saved(*map(joined, zip(*(saved._replace(index_sums=None) for _, saved in results))))
    more = {name: lse.mT.contiguous() for name in LSES.values() if (lse := getattr(saved, name)) is not None}
    lists = saved.block_indices
    if lists is not None and call.packed and (rows := config.num_tiles(len(call.q), call.B) - len(lists)):
        more["block_indices"] = F.pad(lists, (0, 0, 0, 0, 0, rows), value=-1)
    return joined([o for o, _ in results]), saved._replace(**more, index_sums=sums)


def batches(call: Call) -> Iterator[tuple[Call, int, int]]:
    """Batches of sequences of one length, and the positions of their first query among their keys and their window's.

    The whole batch if it has one position; else each sequence, without packed ones that have no queries.
    """
    if call.q_offset is not None and call.block_indices is None:
        call.config.require_choice_by_token()
    offsets = call.offsets if call.q_offset is None else call.q_offset.tolist()
    in_window = offsets if call.win_offset is None else call.win_offset.tolist()
    if not call.packed and len({*zip(offsets, in_window)}) == 1:
        yield call, offsets[0], in_window[0]
        return
    for sequence, *at in zip(call.sequences(), offsets, in_window, strict=True):
        if len(sequence.q):
            yield sequence.as_batch(), *at


def _forward_batch(batch: Call, width: int, q_offset: int, window_offset: int) -> tuple[Tensor, Saved]:
    """o and what is saved, the selection [B, M, Hs, width], the branches' LSEs [B, T, Hq]."""
    (q, k, v), lists = map(to_compute_dtype, batch[:3]), batch.block_indices
    spec, config, scale = batch.spec, batch.config, batch.spec.softmax_scale
    o_cmp = o_slc = o_swa = lse_cmp = lse_slc = lse_swa = scores = None
    saved = {}
    if config.computes("window"):
        with component("swa"):
            visible = visible_window(spec, window_offset)
            o_swa, lse_swa = attend_chunks(q, *map(to_compute_dtype, batch.of_window), visible, softmax_scale=scale)
    if config.computes("compressed"):
        with component("compress"):
            (_, k_exact, k_cmp), (_, _, v_cmp) = (compress_batch(batch, name) for name in "kv")
        with component("cmp"):
            visible = visible_compressed(spec, q_offset, k_cmp.shape[1])
            o_cmp, lse_cmp = attend_chunks(q, k_cmp, v_cmp, visible, softmax_scale=scale)
    if config.computes("selected"):
        if lists is None:
            with component("choose"):
                asking, scored = (q, k_cmp if config.by_token else k_exact) if config.rule != "index" else batch.index
                options = dict(spec=spec, q_offset=q_offset, S=k.shape[1], width=width)
                lists, scores = select_blocks(asking, scored, lse_cmp, **options)
        with component("slc"):
            o_slc, lse_slc = attend_lists(q, k, v, lists, spec=spec, q_offset=q_offset)
        if spec.index_loss:
            with component("index"):
                saved = saved_of_index(batch, lists, lse_slc, q_offset)
    with component("gate"):
        g = gate_values(batch.q, batch.gate_weight, batch.gates, len(config.branches))
        o = gated_sum(g, *config.of_branches((o_cmp, o_slc, o_swa)))
    saved |= dict(block_indices=lists if batch.block_indices is None else None)
    saved |= dict(index_scores=scores if spec.index_scores else None)
    saved |= dict(g=None if batch.gate == "none" else g, lse_cmp=lse_cmp, lse_slc=lse_slc, lse_swa=lse_swa)
    return o.to(batch.q.dtype), Saved(**saved)


def compress_batch(batch: Call, name: str) -> tuple[Tensor | None, Tensor, Tensor]:
    """Means of blocks of k or v (None with ``k_cmp`` or ``v_cmp``), compressed tokens not rounded, and rounded."""
    x, exact, mean = getattr(batch, name), getattr(batch, f"{name}_cmp"), None
    if exact is None:
        mean = mean_pool(x, config=batch.config)
        exact = project(mean, getattr(batch, f"compress_{name}_weight"))
    return mean, exact, to_compute_dtype(exact.to(x.dtype))


def gate_values(q: Tensor, gate_weight: Tensor | None, gates: Tensor | None, branches: int = 3) -> Tensor:
    """The gates [..., Hq, branches] in the accumulation dtype: sigmoids, `gates` as they are, or equal shares."""
    acc = accumulation_dtype(q.dtype)
    if gates is not None:
        return gates.to(acc)
    if gate_weight is not None:
        return project(q.to(acc), gate_weight.mT).sigmoid()
    return equal_gates(q, branches)


def gated_sum(g: Tensor, *outputs: Tensor | None) -> Tensor:
    """``sum_i g_i * o_i`` of the outputs that are not None, in g's dtype: g [..., Hq, branches], o_i [..., Hq, Dv]."""
    return sum(g_i.unsqueeze(-1) * o_i for g_i, o_i in zip(g.unbind(-1), outputs) if o_i is not None)
