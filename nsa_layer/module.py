"""`NSAttention`: projections, position embedding, `nsa`, output projection, as one `nn.Module`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from nsa_layer import autocast
from nsa_layer.api import nsa
from nsa_layer.call_spec import Aux
from nsa_layer.config import NSAConfig, require_int
from nsa_layer.cute.memory_plan import MemoryPolicy
from nsa_layer.cute.packing import starts_on
from nsa_layer.inputs import check_starts, refuse_nested

Rope = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class NSAttention(nn.Module):
    """Self-attention with Native Sparse Attention in place of dense attention.

    One q, k, v serves all three branches. The gates start at 1/2 each (``gate_weight`` is zero), the compression
    weights at the identity.

    Args:
        dim: width of the input and the output.
        num_heads: Hq.
        num_kv_heads: Hkv, a divisor of Hq.
        head_dim: D of q and k; None: ``dim // num_heads``. The kernels take 64 and 128; eager takes any.
        head_dim_v: Dv of v; None: ``head_dim``.
        config: the operator's options.
        compress_weights: learn a projection of the compressed keys and values, [Hkv, D, D] and [Hkv, Dv, Dv].
        bias: give the four projections a bias.
        rope: called as ``rope(q, k, positions)`` with q [.., T, Hq, D], k [.., T, Hkv, D], positions [T] or [B, T],
            int64; returns (q, k). `RotaryEmbedding` is one. None: no position embedding.
        backend, memory: as in `nsa`.
        device, dtype: of the parameters.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a size is below 1, num_kv_heads does not divide num_heads, or num_heads does not divide dim where
            ``head_dim`` is None.
    """

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int | None = None,
        head_dim_v: int | None = None,
        config: NSAConfig = NSAConfig(),
        compress_weights: bool = False,
        bias: bool = False,
        rope: Rope | None = None,
        backend: str | None = None,
        memory: MemoryPolicy = MemoryPolicy(),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_sizes(dim, num_heads, num_kv_heads, head_dim, head_dim_v)
        if not isinstance(config, NSAConfig):
            raise TypeError(f"config must be an NSAConfig, got {type(config).__name__}")
        if rope is not None and not callable(rope):
            raise TypeError(f"rope must be callable or None, got {rope!r}")
        if backend is not None and not isinstance(backend, str):
            raise TypeError(f"backend must be a string or None, got {backend!r}")
        if not isinstance(memory, MemoryPolicy):
            raise TypeError(f"memory must be a MemoryPolicy, got {type(memory).__name__}")
        self.dim, self.num_heads, self.num_kv_heads = dim, num_heads, num_kv_heads
        self.head_dim = D = dim // num_heads if head_dim is None else head_dim
        self.head_dim_v = Dv = D if head_dim_v is None else head_dim_v
        self.config, self.rope, self.backend, self.memory = config, rope, backend, memory
        options = {"bias": bias, "device": device, "dtype": dtype}
        self.q_proj = nn.Linear(dim, num_heads * D, **options)
        self.k_proj = nn.Linear(dim, num_kv_heads * D, **options)
        self.v_proj = nn.Linear(dim, num_kv_heads * Dv, **options)
        self.o_proj = nn.Linear(num_heads * Dv, dim, **options)
        self.gate_weight = nn.Parameter(torch.empty(num_heads, 3, D, device=device, dtype=dtype))
        for name, size in (("compress_k_weight", D), ("compress_v_weight", Dv)):
            weight = torch.empty(num_kv_heads, size, size, device=device, dtype=dtype) if compress_weights else None
            self.register_parameter(name, None if weight is None else nn.Parameter(weight))
        self._reset_own_parameters()

    def reset_parameters(self) -> None:
        """Draw the projections anew, set the gates to 1/2 and the compression weights to the identity."""
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            linear.reset_parameters()
        self._reset_own_parameters()

    @torch.no_grad()
    def _reset_own_parameters(self) -> None:
        self.gate_weight.zero_()
        for weight in (self.compress_k_weight, self.compress_v_weight):
            if weight is not None:
                weight.copy_(torch.eye(weight.shape[-1], device=weight.device, dtype=weight.dtype))

    def forward(
        self,
        x: torch.Tensor,
        *,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
        positions: torch.Tensor | None = None,
        causal: bool = True,
        return_aux: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, Aux]:
        """Attend.

        Args:
            x: [B, T, dim], or packed [total, dim] with ``cu_seqlens``.
            cu_seqlens: int32 [sequences + 1], starts of the packed sequences and the total, on x's device or, as in
                `nsa`, on the CPU.
            max_seqlen: an upper bound of the packed lengths, in tokens.
            positions: [T] or [B, T] ([total] when packed), integers, for ``rope``. None: counted from 0 within each
                sequence. They move only the embedding; what a query sees follows the order of the tokens.
            causal: False lets every query see its whole sequence.
            return_aux: also return `nsa`'s `Aux`: chosen blocks, gates, log-sum-exps.

        Returns:
            [B, T, dim] or [total, dim]; with ``return_aux`` a pair.

        Raises:
            TypeError, ValueError: an argument is bad; the message names it. What `nsa` raises besides.
        """
        self._check_input(x, cu_seqlens)
        if positions is not None:
            if self.rope is None:
                raise ValueError("positions are for rope, got positions on a layer without rope")
            positions = _check_positions(positions, x)
        q = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim_v))
        if self.rope is not None:
            q, k = self.rope(q, k, _count_positions(x, cu_seqlens) if positions is None else positions)
        attended = nsa(
            q,
            k,
            v,
            config=self.config,
            gate_weight=self.gate_weight,
            compress_k_weight=self.compress_k_weight,
            compress_v_weight=self.compress_v_weight,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            causal=causal,
            backend=self.backend,
            memory=self.memory,
            return_aux=return_aux,
        )
        o, aux = attended if return_aux else (attended, None)
        out = self.o_proj(o.flatten(-2))
        return (out, aux) if return_aux else out

    def _check_input(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> None:
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
        refuse_nested("x", x)
        layout, dims = (
            ("[B, T, dim]", 3) if cu_seqlens is None else ("packed [total, dim], since cu_seqlens is given", 2)
        )
        if x.dim() != dims or x.shape[-1] != self.dim:
            raise ValueError(f"x must be {layout} with dim={self.dim}, got shape {tuple(x.shape)}")
        weight = self.q_proj.weight
        if x.device != weight.device:
            raise ValueError(f"x must be on the layer's device {weight.device}, got {x.device}")
        if autocast.dtype_in_force(x.device) is None and x.dtype != weight.dtype:
            raise TypeError(f"x must have the layer's dtype {weight.dtype}, got {x.dtype}")
        if cu_seqlens is not None:
            check_starts(cu_seqlens)

    def extra_repr(self) -> str:
        parts = [f"dim={self.dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"]
        parts += [f"head_dim={self.head_dim}, head_dim_v={self.head_dim_v}", f"config={self.config}"]
        parts += [f"compress_weights={self.compress_k_weight is not None}"]
        if self.backend is not None:
            parts.append(f"backend={self.backend!r}")
        return ", ".join(parts)


def _check_sizes(dim: int, num_heads: int, num_kv_heads: int, head_dim: int | None, head_dim_v: int | None) -> None:
    for name, size in dict(dim=dim, num_heads=num_heads, num_kv_heads=num_kv_heads).items():
        require_int(name, size, least=1)
    for name, size in dict(head_dim=head_dim, head_dim_v=head_dim_v).items():
        if size is not None:
            require_int(name, size, least=1)
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads must divide num_heads, got {num_kv_heads} and {num_heads}")
    if head_dim is None and dim % num_heads:
        raise ValueError(f"num_heads must divide dim where head_dim is None, got num_heads={num_heads}, dim={dim}")


def _count_positions(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """Positions within each sequence: int64 [T] or [total]; computed on the device, without a synchronisation."""
    index = torch.arange(x.shape[-2], device=x.device)
    if cu_seqlens is None:
        return index
    starts = starts_on(cu_seqlens, x.device).long()
    return index - starts[torch.searchsorted(starts[1:], index, right=True)]


def _check_positions(positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if not isinstance(positions, torch.Tensor):
        raise TypeError(f"positions must be a torch.Tensor or None, got {type(positions).__name__}")
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise TypeError(f"positions must be integers, got {positions.dtype}")
    allowed = {tuple(x.shape[:-1]), tuple(x.shape[-2:-1])}
    if tuple(positions.shape) not in allowed:
        expected = " or ".join(str(shape) for shape in sorted(allowed))
        raise ValueError(f"positions must have shape {expected}, got {tuple(positions.shape)}")
    return positions.to(x.device, torch.int64)
