"""`nsa` and `selected_attention`: check the arguments, pick the backend, run it."""

from __future__ import annotations

from functools import partial

import torch

from nsa_layer import autocast, operators, support
from nsa_layer.call import Aux, Call, loss_of_sums
from nsa_layer.checks import assert_numbers, check_inputs, check_selected, lists_in_int32
from nsa_layer.config import NSAConfig, require_bools
from nsa_layer.context_parallel import attend as context_parallel
from nsa_layer.context_parallel.spec import ContextParallel
from nsa_layer.cute.memory_plan import MemoryPolicy
from nsa_layer.derivatives import refuse_transforms


def nsa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    config: NSAConfig = NSAConfig(),
    gate_weight: torch.Tensor | None = None,
    gates: torch.Tensor | None = None,
    compress_k_weight: torch.Tensor | None = None,
    compress_v_weight: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    causal: bool = True,
    block_indices: torch.Tensor | None = None,
    k_cmp: torch.Tensor | None = None,
    v_cmp: torch.Tensor | None = None,
    k_win: torch.Tensor | None = None,
    v_win: torch.Tensor | None = None,
    q_index: torch.Tensor | None = None,
    k_index: torch.Tensor | None = None,
    index_scale: float | None = None,
    backend: str | None = None,
    memory: MemoryPolicy = MemoryPolicy(),
    cp: ContextParallel | None = None,
    return_aux: bool = False,
    return_index_loss: bool = False,
    validate: bool = False,
) -> torch.Tensor | tuple[torch.Tensor | Aux, ...]:
    """Native Sparse Attention: compressed, selected and sliding-window attention, gated and summed.

    Differentiable in q, k, v, gate_weight, gates, both compression weights and the branches' own keys and values: once,
    by reverse mode. The reference is differentiable any number of times and in either mode.

    Under `torch.autocast` inputs are cast to the autocast dtype and nothing inside is, as by
    `scaled_dot_product_attention`.

    Args:
        q: [B, T, Hq, D], or packed [total, Hq, D] with ``cu_seqlens``.
        k: [B, T, Hkv, D] or [total, Hkv, D]; Hkv divides Hq.
        v: [B, T, Hkv, Dv] or [total, Hkv, Dv].
        config: block sizes, window, the rule that chooses blocks.
        gate_weight: [Hq, 3, D]; the gates are ``sigmoid(q . gate_weight)``.
        gates: [B, T, Hq, 3] or [total, Hq, 3], used unchanged, in the order compressed, selected, window; as many
            columns, and rows of ``gate_weight``, as ``config.branches``. Without both all branches count the same. With
            ``window_size=0`` the window's is ignored.
        compress_k_weight: [Hkv, D, D], applied to the mean of a block of k; None: the identity.
        compress_v_weight: [Hkv, Dv, Dv], the same for v.
        softmax_scale: factor of q . k, above 0; None: ``D ** -0.5``.
        cu_seqlens: int32 [sequences + 1], starts of the packed sequences and the total, on q's device or the CPU;
            backward does not read them, so that a buffer may be refilled. On a GPU the kernels alone read them: nothing
            waits, a captured CUDA graph accepts other starts, and wrong starts are undefined behaviour. For other
            backends the host reads them once a call.
        max_seqlen: an upper bound of the packed lengths, in tokens: checked, or where the host does not read
            ``cu_seqlens``, relied on.
        causal: False lets every query see the whole sequence.
        block_indices: int32 or int64 [B, M, Hs, n], packed [tiles of all sequences, Hs, n]: the blocks of each tile of
            ``config.q_tile`` queries, instead of a choice, nothing added; Hs = Hkv, or Hq for a list of each query
            head. Any strides and order, counted from each sequence's start; a number that is no block of the sequence,
            such as -1, is padding, a block named twice counts once.
        k_cmp: [B, Tc, Hkv, D], packed [sum of Tc, Hkv, D]: the caller's compressed keys, by any network, instead
            of means of k; Tc = ``config.compressed_length(T)`` of each sequence.
        v_cmp: [B, Tc, Hkv, Dv] or [sum of Tc, Hkv, Dv], the same for v.
        k_win: like k, v_win: like v: keys and values of the sliding window instead of k and v, where there is one.
        q_index: [B, T, Hkv, Di] or [total, Hkv, Di], k_index: [B, T, Hkv, Di], or one key for all lists [B, T, 1, Di]:
            the index that ``rule="index"`` chooses blocks by, unrotated. The index' loss alone has gradients in it.
        index_scale: factor of q_index . k_index, above 0; None: ``Di ** -0.5``.
        backend: "cute" (the kernels), "eager" (plain PyTorch, linear memory) or "reference" (quadratic). None: the
            kernels where the tensors are on a supported GPU, else eager. A named one runs, or raises.
        memory: the kernels' memory budget and recomputation; other backends ignore it.
        cp: ranks that share the sequences. Tensors of tokens are this rank's shard; rows of a compressed key or a tile
            are on the rank of its first token; ``cu_seqlens`` and weights are whole and the same on all ranks. Results
            and gradients are this rank's: sum gradients of weights over the ranks. An index' loss is that of all ranks,
            with the gradient of this rank's part.
        return_aux: also return the chosen blocks, the gates and each branch's log-sum-exp.
        return_index_loss: also return the index' loss, a number in the accumulation dtype: over the chosen blocks that
            are not forced, KL(m / M | softmax of their scores), weighted by M / sum of M, where m is the selected
            branch's probability in a block, the mean over a list's query heads, a constant, and M its sum over these
            blocks. 0 where every M is.
        validate: check ``cu_seqlens`` that are on a GPU, which waits for it; in a graph the GPU asserts them.

    Returns:
        o, [B, T, Hq, Dv] or [total, Hq, Dv] in q's dtype; with ``return_aux`` and ``return_index_loss`` a tuple of o,
        `Aux` and the loss, as far as they are asked for.

    Raises:
        TypeError, ValueError: an argument is bad; the message names it.
        NotImplementedError: the named backend does not do this on this architecture; or vmap or forward mode.
        RuntimeError: a second derivative is asked for; or torch.distributed is not initialised.

    Source: arXiv:2502.11089; for differences see the README.

    Example:
        >>> q, k, v = (torch.randn(1, 256, heads, 64) for heads in (8, 2, 2))
        >>> nsa(q, k, v, gate_weight=torch.zeros(8, 3, 64)).shape
        torch.Size([1, 256, 8, 64])
    """
    weights = gate_weight, gates, compress_k_weight, compress_v_weight
    tensors = autocast.cast(q, k, v, *weights, k_cmp, v_cmp, k_win, v_win, q_index, k_index)
    call = Call(*tensors, cu_seqlens, lists_in_int32(block_indices))
    static = dict(config=config, softmax_scale=softmax_scale, max_seqlen=max_seqlen, causal=causal)
    static |= dict(index_scale=index_scale, return_index_loss=return_index_loss)
    options = dict(backend=backend, memory=memory, return_aux=return_aux, validate=validate)
    check = partial(_check_flags, call, **options)
    if cp is not None:
        o, aux, sums = context_parallel.attend(cp, call, check, static, options)
    else:
        check()
        spec = check_inputs(call, **static, backend=backend, validate=validate)
        call = support.on_backend(backend, call._replace(spec=spec))
        if validate and call.q.is_cuda and torch.compiler.is_compiling():
            assert_numbers(call, max_seqlen=max_seqlen)
        with autocast.off(call.q.device):
            o, aux, sums = operators.attend(call, memory=memory, return_aux=return_aux)
    if call.q_index is not None and not any(x is not None and x.requires_grad for x in call.differentiable[:-2]):
        o = o.detach()  # an index has gradients of the loss alone: without others, the layers behind save nothing
    results = [o, aux] if return_aux else [o]
    if return_index_loss:
        results.append(loss_of_sums(sums))
    return results[0] if len(results) == 1 else tuple(results)


def selected_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_indices: torch.Tensor,
    *,
    block_size: int,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    q_offset: torch.Tensor | int | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
    cp: ContextParallel | None = None,
    validate: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
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
            for `nsa`, the kernels alone read them on a GPU where the number of lists determines the tile for all
            lengths.
        cu_seqlens_k: the same for keys; None: ``cu_seqlens``.
        q_offset: position of each sequence's first query among its keys: int32 [B] or [sequences] on q's device, or an
            int for all. None: the queries are the last ones, ``S - T``.
        softmax_scale: factor of q . k, above 0; None: ``D ** -0.5``.
        causal: query i sees no key after position ``q_offset + i``.
        deterministic: the same input gives the same bits twice, backward included.
        return_lse: also return the log-sum-exp, which carries no gradient.
        backend: as for `nsa`.
        cp: as for `nsa`, where there are as many queries as keys.
        validate: check ``cu_seqlens`` and ``cu_seqlens_k`` that are on a GPU, which waits for it; in a graph the GPU
            asserts them.

    Returns:
        o, [B, T, Hq, Dv] or [total, Hq, Dv] in q's dtype; a query that sees no key gives 0. With ``return_lse`` a pair
        (o, lse): natural, [B, Hq, T] or [Hq, total], -inf where a query sees no key.

    Raises:
        TypeError, ValueError: an argument is bad; the message names it.
        NotImplementedError: the backend does not do this on this architecture; or vmap or forward mode.
        RuntimeError: a second derivative is asked for.

    Source: the selected branch of arXiv:2502.11089, over any lists.

    Example:
        >>> q, k, v = (torch.randn(1, 256, heads, 64) for heads in (8, 2, 2))
        >>> own = torch.arange(256).div(64, rounding_mode="floor").view(1, 256, 1, 1)  # the block of each query
        >>> selected_attention(q, k, v, own.repeat(1, 1, 2, 1), block_size=64).shape
        torch.Size([1, 256, 8, 64])
    """
    tensors = autocast.cast(q, k, v)
    starts = dict(cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k)
    call = Call(*tensors, **starts, block_indices=lists_in_int32(block_indices), q_offset=q_offset)
    static = dict(block_size=block_size, softmax_scale=softmax_scale, causal=causal, deterministic=deterministic)
    options = dict(backend=backend, return_lse=return_lse, validate=validate)
    check = partial(_check_flags, call, **options)
    if cp is not None:
        o, aux, _ = context_parallel.attend(cp, call, check, static, options)
        return (o, aux.lse_slc) if return_lse else o
    check()
    spec = check_selected(call, **static, backend=backend, validate=validate)
    call = support.on_backend(backend, call._replace(spec=spec))
    if isinstance(q_offset, int):
        call = call._replace(q_offset=torch.full((call.B,), q_offset, dtype=torch.int32, device=call.q.device))
    if validate and call.q.is_cuda and torch.compiler.is_compiling():
        assert_numbers(call)
    with autocast.off(call.q.device):
        o, aux, _ = operators.attend(call, return_aux=return_lse)
    return (o, aux.lse_slc) if return_lse else o


def _check_flags(call: Call, *, backend: str | None, memory: MemoryPolicy = MemoryPolicy(), **flags: object) -> None:
    """Check arguments that do not change the result."""
    if not isinstance(memory, MemoryPolicy):
        raise TypeError(f"memory must be a MemoryPolicy, got {type(memory).__name__}")
    require_bools(**flags)
    if backend != "reference":
        refuse_transforms(*call.tensors)
