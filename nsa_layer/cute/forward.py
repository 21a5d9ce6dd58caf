"""Forward of the kernels' backend, top to bottom, for one group of key/value heads after the other.

Saved for backward: each branch's o (unless the memory plan recomputes it, or it is the output) and lse, the gates, the
compressed keys and values, and the selected blocks. Block lists are built again in backward; nothing is selected again.
"""

from __future__ import annotations

from contextlib import nullcontext
from inspect import unwrap

import torch

from flash_attn.cute.fwd_unions.interface import forward_unions
from flash_attn.cute.interface import _flash_attn_fwd
from flash_attn.cute.lists.query_bits import block_sums
from flash_attn.cute.mma.form import use_mma_sync
from nsa_layer.call import Call, CallSpec, Saved, lse_shape
from nsa_layer.cute.branch_options import compressed_options, pooling_options, window_options
from nsa_layer.cute.head_slices import head_group, join_saved, narrow, query_heads
from nsa_layer.cute.index_loss import of_chosen_blocks
from nsa_layer.cute.memory_plan import MemoryPlan
from nsa_layer.cute.select_blocks import select_blocks
from nsa_layer.cute.selected import dq_options, selected_options
from nsa_layer.cute.side_stream import SideStream
from nsa_layer.cute.varlen import Varlen, as_kernels_read
from nsa_layer.kernels.gating.forward import gated_sum
from nsa_layer.kernels.pooling.mean_pool import mean_pool
from nsa_layer.profiler_ranges import component
from nsa_layer.projection import project
from nsa_layer.support import UNION_BLOCK, device_arch, reads_unions
from nsa_layer.warm_up.api import compile_missing

Tensor = torch.Tensor
attention_forward = unwrap(_flash_attn_fwd)  # the call's GPU is the current one here


def forward(
    call: Call,
    *,
    plan: MemoryPlan,
    backward: bool = True,
    o: Tensor | None = None,
    side_stream: SideStream | None = None,
) -> tuple[Tensor, Saved]:
    """o [..., Hq, Dv], and what backward needs of all heads; lists of the caller's are left out.

    Args:
        backward: there will be one.
        o: written, if not None.
        side_stream: of the window's attention; joined before its output is read. None: all on the current one.
    """
    (call, varlen), spec = as_kernels_read(call), call.spec
    with compile_missing(call, plan, backward=backward):
        o = new_outputs(*call[:3:2])[0] if o is None else o
        saved, Hkv, config = Saved(), call.k.shape[-2], spec.config
        for group in plan.groups:
            part = head_group(call, *group)
            (q, _, v), into = part[:3], narrow(o, -2, query_heads(*call[:2], *group))
            o_cmp = o_slc = o_swa = lse_cmp = lse_slc = lse_swa = k_scored = k_cmp = v_cmp = None
            indices = counts = scores = None
            means, of_index = (None, None), {}
            # The window needs q, k and v alone: the GPU has work at once, while the host launches short kernels.
            if config.computes("window"):
                aside = None if side_stream is None else new_outputs(q, v)
                with component("swa"), nullcontext() if side_stream is None else side_stream.launches():
                    o_swa, lse_swa = attend_branch(q, *part.of_window, spec, window_options(part, varlen), aside)
            if config.computes("compressed"):
                with component("compress"):
                    k_scored, k_cmp, v_cmp, *means = _compressed(part, varlen)
                with component("cmp"):
                    o_cmp, lse_cmp = attend_branch(q, k_cmp, v_cmp, spec, compressed_options(part, varlen))
            if config.computes("selected"):
                with component("choose"):
                    indices = part.block_indices
                    if indices is None:
                        scored = k_cmp if config.by_token else k_scored
                        indices, counts, scores = select_blocks(part, varlen, scored, lse_cmp)
                        del scored
                del k_scored
                o_slc, lse_slc, of_index = forward_selected(
                    part._replace(block_indices=indices), varlen, counts, scores, into if call.one_branch else None
                )
            if side_stream is not None:
                side_stream.join()
            outputs, g = (o_cmp, o_slc, o_swa), None
            if not call.one_branch:
                with component("gate"):
                    gating = dict(gate_weight=part.gate_weight, gates=part.gates, out=into)
                    g = gated_sum(q, *config.of_branches(outputs), **gating)[1]
            elif o_slc is not into:
                into.copy_(o_slc)
            selection = (indices, counts) if part.block_indices is None else (None, None)
            compressed = k_cmp if part.k_cmp is None else None, v_cmp if part.v_cmp is None else None
            outputs = (x if keep else None for x, keep in zip(outputs, plan.kept))
            of_group = Saved(*selection, *compressed, *means, *outputs, lse_cmp, lse_slc, lse_swa, g, **of_index)
            saved = join_saved(saved, of_group, group, Hkv)
            del selection, compressed, outputs, of_group  # else they are beside the next group's
    return o, saved


def _compressed(call: Call, varlen: Varlen) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Compressed keys and values: the caller's, or made of k and v, pooled together.

    Returns:
        Keys in fp32 where the choice of blocks by tile reads them, else anything; keys and values as attention reads
        them; and, where these are projected, means of k and of v in fp32.
    """
    k_cmp, v_cmp, dtype = call.k_cmp, call.v_cmp, call.k.dtype
    w_k, w_v = call.compress_k_weight, call.compress_v_weight
    k, v = call.k if k_cmp is None else None, call.v if v_cmp is None else None
    exact, k_mean, v_mean = torch.float32, None, None
    scored = call.config.computes("selected") and call.block_indices is None and not call.config.by_token
    if k is not None or v is not None:
        k_dtypes = (exact,) if w_k is not None else (exact, dtype) if scored else (dtype,)
        options = pooling_options(call.config, varlen)
        options["total_blocks"] = varlen.total_compressed
        k_means, v_mean = mean_pool(k, v, k_dtypes=k_dtypes, v_dtype=dtype if w_v is None else exact, **options)
    if k is None:
        k_scored = k_cmp.float() if scored else None
    else:
        k_mean, k_scored = k_means[0], project(k_means[0], w_k)
        k_cmp = k_means[-1] if w_k is None else k_scored.to(dtype)
    if v is not None:
        v_cmp = project(v_mean, w_v).to(dtype)
    return k_scored, k_cmp, v_cmp, None if w_k is None else k_mean, None if w_v is None else v_mean


def forward_selected(
    call: Call,
    varlen: Varlen,
    block_counts: Tensor | None = None,
    scores: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """o and the log-sum-exp of the selected branch over the call's lists; and the fields of `Saved` that are of an
    index' scores and loss.

    Args:
        block_counts, scores: of `select_blocks`.
        out: of o, where that is not None and the kernel can write there.
    """
    (q, k, v), spec, lists = call[:3], call.spec, call.block_indices
    with component("lists"):
        options = selected_options(call, varlen, lists, block_counts, backward=False)
    unions, sums = options["block_sparse_tensors"], None
    if spec.index_loss:
        sums = block_sums(q, k.shape[-2], lists.shape[-1] * -(-call.config.block_size // UNION_BLOCK))
        options |= dict(aux_tensors=[sums])
    with component("slc"):
        into = None if out is None else (out, q.new_empty(lse_shape(q), dtype=torch.float32))
        o, lse = attend_selected(q, k, v, spec, options, call.pages, into)
    if not (spec.index_loss or spec.index_scores):
        return o, lse, {}
    with component("index"):
        return o, lse, of_chosen_blocks(call, varlen, unions, scores, sums, lse)


def new_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """New tensors like the results of `attend_branch`."""
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(lse_shape(q), dtype=torch.float32)


def attend_branch(
    q: Tensor, k: Tensor, v: Tensor, spec: CallSpec, options: dict, into: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """A branch's attention to k and v of tokens or of compressed blocks.

    Args:
        options: of `_flash_attn_fwd`, see `branch_options`.
        into: `new_outputs`, which are written where there are keys.

    Returns:
        o [B, T, Hq, Dv] and lse, fp32 [B, Hq, T], natural, -inf where a row sees no key; packed [total, Hq, Dv] and
        [Hq, total].
    """
    if k.shape[-3] == 0:
        lse = q.new_full(lse_shape(q), -torch.inf, dtype=torch.float32)
        return q.new_zeros(*q.shape[:-1], v.shape[-1]), lse
    if into is not None:
        options = options | dict(out=into[0], lse=into[1])
    return attention_forward(q, k, v, return_lse=True, softmax_scale=spec.softmax_scale, **options)[:2]


def attend_selected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: CallSpec,
    options: dict,
    page_table: Tensor | None = None,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The selected branch's `attend_branch`; over unions on Blackwell by a kernel of its own, with outputs of its own.

    Args:
        options: `selected_options`.
        page_table: int32 [B, n], of keys on pages, where `selected.reads_pages`.
    """
    if reads_unions(spec.config, k.shape[-1], listed=spec.listed) and use_mma_sync(device_arch(q.device.index)):
        return forward_unions(q, k, v, softmax_scale=spec.softmax_scale, **dq_options(options))
    if page_table is not None:  # in place of starts
        options = options | dict(page_table=page_table, cu_seqlens_k=None)
    return attend_branch(q, k, v, spec, options, into)
