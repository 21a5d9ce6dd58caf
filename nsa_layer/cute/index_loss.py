"""An index' scores and loss on the kernels, over the chosen blocks, and the loss' gradients."""

from __future__ import annotations

import torch

from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.bwd_dkdv.spec import KeyPairs
from nsa_layer.call import Call, Saved
from nsa_layer.cute.varlen import Varlen
from nsa_layer.kernels.index_loss.keys import IndexKeyGradient
from nsa_layer.kernels.index_loss.listed_scores import ListedScores
from nsa_layer.kernels.index_loss.rows import LossSums, QueryGradient
from nsa_layer.kernels.launch import launch

Tensor = torch.Tensor


def of_chosen_blocks(
    call: Call,
    varlen: Varlen,
    unions: BlockSparseTensorsTorch,
    of_choice: Tensor | None,
    sums: Tensor | None,
    lse: Tensor,
) -> dict[str, Tensor]:
    """Fields of `Saved` for the scores of chosen blocks, and for the loss.

    Args:
        unions: of the lists, as attention reads them.
        of_choice, sums, lse: for a loss: scores of `select_blocks`, sums of `fwd_sm90.block_sums`; the log-sum-exp.
    """
    spec, config, where = call.spec, call.config, (varlen.cu_seqlens, varlen.cu_seqlens_k, call.q_offset)
    indices, lse, of_choice = _batched(call, call.block_indices, lse, of_choice)
    static, fields = (indices.shape[-1], call.q.shape[-2] // indices.shape[-2], config.block_size), {}
    if spec.index_scores:
        fields["index_scores"] = torch.full_like(indices, -torch.inf, dtype=torch.float32)
        if indices.numel():
            lists = unions.mask_block_cnt, unions.mask_block_idx, unions.mask_block_bits
            tensors = _batched(call, call.q_index, call.k_index, *lists)
            more = (*where, unions.cu_total_m_blocks, fields["index_scores"], spec.index_scale)
            launch("index_scores", ListedScores, (call.q_index.shape[-1], *static), *tensors, *more)
    if spec.index_loss:
        dz = fields["index_dz"] = torch.empty_like(indices, dtype=torch.float32)
        rows = dz.new_zeros(2, *dz.shape[:-1])
        if indices.numel():
            static = (*static, config.init_blocks, config.local_blocks)
            of_loss = (sums.view(*indices.shape[:3], -1), lse, dz, rows, spec.index_scale)
            launch("index_loss", LossSums, static, indices, of_choice, where[0], where[2], *of_loss)
    if call.packed:
        fields = {name: x.squeeze(0) for name, x in fields.items()}
    return fields | dict(index_sums=rows.flatten(1).sum(1)) if spec.index_loss else fields


def index_loss_backward(
    call: Call, varlen: Varlen, saved: Saved, pairs: KeyPairs, d_sums: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of ``d_sums[0]`` times the numerator, of q_index and k_index."""
    config, scale, d_sums = call.config, call.spec.index_scale, d_sums.contiguous()
    q_index, k_index, lists, dz = _batched(call, call.q_index, call.k_index, saved.block_indices, saved.index_dz)
    dq, dk = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_index, k_index))
    where, best = (varlen.cu_seqlens, varlen.cu_seqlens_k), torch.empty_like(lists)
    D, n = dq.shape[-1], dz.shape[-1]
    if best.numel():
        static = (D, n, config.block_size, config.init_blocks, config.local_blocks)
        more = (*where, pairs.cu_blocks, call.q_offset, d_sums, best, dk, scale)
        launch("index_dk", IndexKeyGradient, static, q_index, k_index, lists, dz, *pairs[:3], *more)
        launch("index_dq", QueryGradient, (D, n), dz, best, k_index, *where, d_sums, dq, scale)
    return tuple(x.squeeze(0) if call.packed else x for x in (dq, dk))


def _batched(call: Call, *tensors: Tensor | None) -> list[Tensor | None]:
    """Packed tensors as a batch of one."""
    return [x.unsqueeze(0) if call.packed and x is not None else x for x in tensors]
