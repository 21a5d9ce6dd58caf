"""`NSAttention`: projections, position embedding, `nsa`, output projection, as one `nn.Module`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from nsa_layer import autocast
from nsa_layer.api import nsa
from nsa_layer.block_mlp import BlockMLP, compress_blocks, compress_sequences
from nsa_layer.branches import Branches, check_branches
from nsa_layer.call import Aux
from nsa_layer.checks import BATCH, PACKED, check_starts, check_tensor, host_reads, require_config
from nsa_layer.config import NSAConfig, require_bools, require_one_of, require_sizes
from nsa_layer.context_parallel.checks import check_same_on_all_ranks, whole_lengths
from nsa_layer.context_parallel.shard import compress_shard
from nsa_layer.context_parallel.spec import ContextParallel
from nsa_layer.cute.host_constants import starts_on
from nsa_layer.cute.memory_plan import MemoryPolicy
from nsa_layer.kvcache.nsa_cache import NSACache
from nsa_layer.rope import RotaryEmbedding
from nsa_layer.support import BACKENDS

Rope = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class NSAttention(Branches):
    """Self-attention with Native Sparse Attention instead of dense attention.

    The gates start at 1/2 each, the matrices of ``compression="linear"`` at the identity. With ``compression="mlp"``,
    ``kv_per_branch=True``, ``gate="input"`` and ``NSAConfig.paper()`` this is the module of arXiv:2502.11089.

    With ``rule="index"`` the layer projects x, as a constant, to q_index and k_index. A forward in training leaves the
    loss of these in ``index_loss``: add it, weighted, to the model's; `nsa_layer.index_loss` sums it over layers.

    Args:
        dim: width of the input and the output.
        num_heads: Hq.
        num_kv_heads: Hkv, a divisor of Hq.
        head_dim: D of q and k; None: ``dim // num_heads``. The kernels support
            multiples of 8 from 16 to 256, and pad all but 64, 96, 128, 256, and 192 with 128 of v; eager any.
        head_dim_v: Dv of v; None: ``head_dim``.
        config: the operator's options.
        compression: of a block's keys and values: their "mean"; "linear", a matrix for each head after the mean,
            [Hkv, D, D] and [Hkv, Dv, Dv]; or "mlp", a network over all tokens of the block, see `BlockMLP`.
        kv_per_branch: project k and v anew for each branch; otherwise one k, v serves all three.
        gate: "query", ``sigmoid(q . gate_weight)`` for each head; "linear", the sigmoid of a linear layer of x; or
            "input", of a network of two layers. None: "query", and none where ``config`` has one branch.
        index_dim: Di of an index; None: 32, or ``head_dim`` where that is less.
        bias: give the projections a bias.
        o_bias: give the output projection one; None: as ``bias``.
        rope: called as ``rope(q, k, positions)`` with q [.., T, Hq, D], k [.., T, Hkv, D], positions [T] or [B, T],
            int64; returns (q, k). `RotaryEmbedding` is one. None: no position embedding. It also turns an index'
            queries and keys, by the slowest pairs of a `RotaryEmbedding` where they have fewer dimensions.
        backend, memory: as in `nsa`.
        device, dtype: of the parameters.

    Raises:
        TypeError, ValueError: an argument is bad; the message names it.

    Example:
        >>> layer = NSAttention(128, num_heads=4, num_kv_heads=2)
        >>> layer(torch.randn(2, 200, 128)).shape
        torch.Size([2, 200, 128])
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
        compression: str = "mean",
        kv_per_branch: bool = False,
        gate: str | None = None,
        index_dim: int | None = None,
        bias: bool = False,
        o_bias: bool | None = None,
        rope: Rope | None = None,
        backend: str | None = None,
        memory: MemoryPolicy = MemoryPolicy(),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_sizes(dim=dim, num_heads=num_heads, num_kv_heads=num_kv_heads)
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads, got {num_kv_heads} and {num_heads}")
        if head_dim is None and dim % num_heads:
            raise ValueError(f"num_heads must divide dim where head_dim is None, got num_heads={num_heads}, dim={dim}")
        D = dim // num_heads if head_dim is None else head_dim
        Dv = D if head_dim_v is None else head_dim_v
        require_sizes(head_dim=D, head_dim_v=Dv)
        require_config(config)
        kinds = dict(gate=gate, compression=compression, index_dim=index_dim)
        self.gate = kinds["gate"] = check_branches(config, "query", **kinds)
        require_bools(kv_per_branch=kv_per_branch)
        if kv_per_branch and config.branches == ("selected",):
            raise ValueError("kv_per_branch=True needs a branch beside the selected one, got branches=('selected',)")
        require_one_of("backend", backend, (None, *BACKENDS))
        if rope is not None and not callable(rope):
            raise TypeError(f"rope must be callable or None, got {rope!r}")
        self.dim, self.head_dim, self.head_dim_v = dim, D, Dv
        self.rope, self.backend, self.memory = rope, backend, memory
        self.compression, self.kv_per_branch = compression, kv_per_branch
        options = {"bias": bias, "device": device, "dtype": dtype}
        self.q_proj = nn.Linear(dim, num_heads * D, **options)
        self.k_proj = nn.Linear(dim, num_kv_heads * D, **options)
        self.v_proj = nn.Linear(dim, num_kv_heads * Dv, **options)
        self.o_proj = nn.Linear(num_heads * Dv, dim, **options | {"bias": bias if o_bias is None else o_bias})
        self.branch_proj = None
        if kv_per_branch:
            sizes = dict(k_cmp=D, v_cmp=Dv) if "compressed" in config.branches else {}
            sizes |= dict(k_win=D, v_win=Dv) if config.computes("window") else {}
            each = {name: nn.Linear(dim, num_kv_heads * size, **options) for name, size in sizes.items()}
            self.branch_proj = nn.ModuleDict(each)
        where = dict(index_bias=bias, device=device, dtype=dtype)
        networks = self._add_branches(dim, num_heads, num_kv_heads, D, Dv, config, **kinds, **where)
        self.compress_k, self.compress_v = networks.get("k_cmp"), networks.get("v_cmp")
        self.index_rope = None  # in place of rope
        if self.q_index is not None and isinstance(rope, RotaryEmbedding) and self.index_dim < rope.head_dim:
            self.index_rope = RotaryEmbedding(self.index_dim, rope.base, slowest_of=rope.head_dim)
        super().reset_parameters()
        self.cp: ContextParallel | None = None

    def set_context_parallel(self, cp: Any, *, mode: str = "auto", load_balance: str | None = "zigzag") -> None:
        """Share sequences among ranks: from then on x, positions and results are this rank's part, as in `nsa`.

        Gradients of parameters are this rank's part: they add up over the ranks.

        Args:
            cp: a process group, with this mode and load_balance, or a `ContextParallel`; None: no sharing.
        """
        known = cp is None or isinstance(cp, ContextParallel)
        self.cp = cp if known else ContextParallel(cp, mode=mode, load_balance=load_balance)

    def reset_parameters(self) -> None:
        """Draw projections and networks anew, set the gates to 1/2 and matrices of compression to the identity."""
        for part in self.modules():
            if isinstance(part, (nn.Linear, BlockMLP)):
                part.reset_parameters()
        super().reset_parameters()

    @property
    def networks(self) -> dict[str, BlockMLP]:
        return {} if self.compress_k is None else dict(k_cmp=self.compress_k, v_cmp=self.compress_v)

    def forward(
        self,
        x: torch.Tensor,
        *,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
        positions: torch.Tensor | None = None,
        causal: bool = True,
        return_aux: bool = False,
        cache: NSACache | None = None,
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
            cache: this layer's, of its config, with ``own_window`` and ``own_sources`` for ``kv_per_branch``: x are the
                next tokens of the cache's sequences, which are appended to it and attend to all that it holds;
                positions count on. Backward raises RuntimeError.

        Returns:
            [B, T, dim] or [total, dim]; with ``return_aux`` a pair.

        Raises:
            TypeError, ValueError: an argument is bad; the message names it. What `nsa` raises besides, and with a
                cache `NSACache.attend`.
        """
        check = partial(self._check_input, x, cu_seqlens, positions)
        if self.cp is not None:
            compared = dict(x=x, cu_seqlens=cu_seqlens, config=self.config, cache=cache is not None)
            check_same_on_all_ranks(self.cp, [check], **compared)
        check()
        if cache is not None:
            self._check_cache(cache, causal, return_aux)
        if positions is not None:
            positions = positions.to(x.device, torch.int64)
        q, parts = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim)), dict(k=self.k_proj, v=self.v_proj)
        if self.branch_proj is not None:
            parts |= self.branch_proj.items()
        kv = {name: part(x).unflatten(-1, (self.num_kv_heads, -1)) for name, part in parts.items()}
        if self.rope is not None:
            if positions is None:
                positions = _count_positions(x, cu_seqlens, None if cache is None else cache.cache_seqlens, self.cp)
            names = [name for name in kv if name[0] == "k"]
            keys = torch.cat([kv[name] for name in names], dim=-2) if len(names) > 1 else kv["k"]
            q, keys = self.rope(q, keys, positions)
            kv |= zip(names, keys.split(self.num_kv_heads, dim=-2))
        turn = self.rope if self.index_rope is None else self.index_rope
        kv |= self.index_of(x, lambda *both: both if turn is None else turn(*both, positions))
        gates, inside = self.gates_of(x), "k_cmp" not in kv and not self.networks  # `nsa` compresses
        if cache is not None:
            if "k_cmp" in kv:
                kv["sources"] = kv.pop("k_cmp"), kv.pop("v_cmp")
            kv |= self.compress_weights() if inside else dict(compress=partial(compress_blocks, self.compressors()))
            packing = dict(cu_seqlens_q=cu_seqlens, max_seqlen_q=max_seqlen, backend=self.backend)
            self._keep_loss(None)
            return self.o_proj(cache.attend(q, **gates, **kv, **packing).flatten(-2))
        sources = kv.get("k_cmp", kv["k"]), kv.get("v_cmp", kv["v"])
        kv |= self.compress_weights() if inside else self._compressed(q, *sources, cu_seqlens)
        static = dict(config=self.config, causal=causal, backend=self.backend, memory=self.memory, cp=self.cp)
        packing, with_loss = dict(cu_seqlens=cu_seqlens, max_seqlen=max_seqlen), self.training and "q_index" in kv
        results = nsa(q, **gates, **kv, **static, **packing, return_aux=return_aux, return_index_loss=with_loss)
        o, *more = results if isinstance(results, tuple) else (results,)
        self._keep_loss(more.pop() if with_loss else None)
        o = self.o_proj(o.flatten(-2))
        return (o, *more) if return_aux else o

    def _compressed(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """Compressed keys and values of the tokens k and v, this rank's."""
        if self.cp is None:
            read = host_reads(self.backend, q, cu_seqlens)
            return compress_sequences(self.compressors(), k, v, cu_seqlens, read=read)
        lengths = None if cu_seqlens is None else whole_lengths(cu_seqlens, k, self.cp)
        shard = partial(compress_shard, lengths=lengths, cp=self.cp, config=self.config)
        return {name: shard(x, compress=f) for (name, f), x in zip(self.compressors().items(), (k, v))}

    def _check_input(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None, positions: torch.Tensor | None) -> None:
        check_tensor("x", x, x, {"dim": self.dim}, BATCH if cu_seqlens is None else PACKED)
        if type(self.q_proj) is nn.Linear:  # the weights of others, quantized ones for instance, say nothing of x
            weight = self.q_proj.weight
            if x.device != weight.device:
                raise ValueError(f"x must be on the layer's device {weight.device}, got {x.device}")
            if autocast.dtype_in_force(x.device) is None and x.dtype != weight.dtype:
                raise TypeError(f"x must have the layer's dtype {weight.dtype}, got {x.dtype}")
        if cu_seqlens is not None:
            check_starts(cu_seqlens)
        if positions is None:
            return
        if self.rope is None:
            raise ValueError("positions are for rope, got positions on a layer without rope")
        if not isinstance(positions, torch.Tensor):
            raise TypeError(f"positions must be a torch.Tensor or None, got {type(positions).__name__}")
        if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
            raise TypeError(f"positions must be integers, got {positions.dtype}")
        allowed = sorted({tuple(x.shape[:-1]), tuple(x.shape[-2:-1])})
        if tuple(positions.shape) not in allowed:
            raise ValueError(
                f"positions must have shape {' or '.join(map(str, allowed))}, got {tuple(positions.shape)}"
            )

    def _check_cache(self, cache: NSACache, causal: bool, return_aux: bool) -> None:
        if not isinstance(cache, NSACache):
            raise TypeError(f"cache must be an NSACache or None, got {type(cache).__name__}")
        if self.cp is not None:
            raise NotImplementedError("cache on a layer that shares sequences: set_context_parallel(None) before")
        if causal is not True or return_aux:
            raise ValueError(f"cache needs causal=True and return_aux=False, got {causal!r} and {return_aux!r}")
        if cache.config != self.config:
            raise ValueError(f"cache must have the layer's config {self.config}, got {cache.config}")

    def extra_repr(self) -> str:
        names = ("dim", "num_heads", "num_kv_heads", "head_dim", "head_dim_v", "config")
        names += ("compression", "kv_per_branch", "gate", "backend")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names if getattr(self, name) is not None)


def _count_positions(
    x: torch.Tensor, cu_seqlens: torch.Tensor | None, before: torch.Tensor | None, cp: ContextParallel | None
) -> torch.Tensor:
    """Positions within each sequence, int64 [T] or [total], of this rank's tokens, [B, T] with the numbers [B] of
    tokens before them; nothing waits for the device."""
    index = torch.arange(x.shape[-2], device=x.device) if cp is None else cp.positions(x.shape[-2], x.device)
    if cu_seqlens is None:
        return index if before is None else index + before.long()[:, None]
    starts = starts_on(cu_seqlens, x.device).long()
    sequence = torch.searchsorted(starts[1:], index, right=True)
    return index - starts[sequence] + (0 if before is None else before.long()[sequence])
