"""An index' scores and loss on the kernels, over the chosen blocks, and the loss' gradients."""

from __future__ import annotations

import torch

from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.bwd_dkdv_sm90.spec import KeyPairs
from nsa_layer.call import Call, Saved
from nsa_layer.cute.varlen import Varlen
from nsa_layer.kernels.index_loss.best_tokens import BestTokens
from nsa_layer.kernels.index_loss.keys import IndexKeyGradient
from nsa_layer.kernels.index_loss.rows import LossSums, QueryGradient
from nsa_layer.kernels.launch import launch

Tensor = torch.Tensor


def of_chosen_blocks(
    call: Call, varlen: Varlen, unions: BlockSparseTensorsTorch, sums: Tensor | None, lse: Tensor
) -> dict[str, Tensor]:
    """Fields of `Saved` for the scores of chosen blocks, and for the loss.

    Args:
        unions: of the lists, as attention reads them.
        sums, lse: of attention: `fwd_sm90.block_sums`, None without a loss, and the log-sum-exp.
    """
    lists, spec = (unions.mask_block_cnt, unions.mask_block_idx, unions.mask_block_bits), call.spec
    q_index, k_index, indices, lse, *lists = _batched(call, call.q_index, call.k_index, call.block_indices, lse, *lists)
    best, where = torch.full_like(indices, -1), (varlen.cu_seqlens, varlen.cu_seqlens_k, call.q_offset)
    scores = torch.full_like(best, -torch.inf, dtype=torch.float32) if spec.index_scores else None
    static = _kernel_sizes(call, best)
    if best.numel():
        tensors = (q_index, k_index, *lists, best, *where, unions.cu_total_m_blocks, scores)
        launch("best_tokens", BestTokens, static[:4], *tensors, spec.index_scale)
    fields = dict(index_scores=scores)
    if sums is not None:
        mass = torch.empty_like(best, dtype=torch.float32)
        rows = mass.new_zeros(2, *mass.shape[:-1])
        if best.numel():
            of_loss = (sums.view(*best.shape[:3], -1), lse, mass, rows, spec.index_scale)
            launch("index_loss", LossSums, static, q_index, k_index, best, *where, *of_loss)
        fields |= dict(index_mass=mass, index_tokens=best)
    if call.packed:
        fields = {name: x if x is None else x.squeeze(0) for name, x in fields.items()}
    return fields if sums is None else fields | dict(index_sums=rows.flatten(1).sum(1))


def index_loss_backward(
    call: Call, varlen: Varlen, saved: Saved, pairs: KeyPairs, d_sums: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of ``d_sums[0]`` times the numerator, of q_index and k_index."""
    q_index, k_index, best, mass = _batched(call, call.q_index, call.k_index, saved.index_tokens, saved.index_mass)
    dq, dk = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_index, k_index))
    where, dz = (varlen.cu_seqlens, varlen.cu_seqlens_k), torch.empty_like(mass)
    if best.numel():
        static, more = _kernel_sizes(call, best), (mass, d_sums.contiguous(), dq, dz, call.spec.index_scale)
        launch("index_dq", QueryGradient, static, q_index, k_index, best, *where, call.q_offset, *more)
        static = (*static[:2], call.config.block_size, call.config.init_blocks)
        launch("index_dk", IndexKeyGradient, static, q_index, best, dz, *pairs[:3], *where, pairs.cu_blocks, dk)
    return tuple(x.squeeze(0) if call.packed else x for x in (dq, dk))


def _batched(call: Call, *tensors: Tensor) -> list[Tensor]:
    """Packed tensors as a batch of one."""
    return [x.unsqueeze(0) if call.packed else x for x in tensors]


def _kernel_sizes(call: Call, best: Tensor) -> tuple[int, ...]:
    (H, n), config = best.shape[-2:], call.config
    sizes = (call.q_index.shape[-1], n, call.q.shape[-2] // H, config.block_size)
    return *sizes, config.init_blocks, config.local_blocks
