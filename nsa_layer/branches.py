"""`Branches`: gates, compression and index of `NSAttention` and of models of transformers; `index_loss` of a model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from nsa_layer.block_mlp import BlockMLP, Compressors, compressed
from nsa_layer.checks import DTYPES
from nsa_layer.config import NSAConfig, require_one_of, require_sizes

COMPRESSIONS, GATES = ("mean", "linear", "mlp"), ("query", "input", "linear")
INDEX_DIM = 32  # unless heads are smaller
NO_LOSS = (
    "index_loss is of a forward in training, with rule='index' and without a cache, and the last one was none: "
    "call train() before"
)
NO_GRAPH = (
    "index_loss has no graph: forward ran without gradients, or q_index and k_index are frozen. Checkpoint with "
    "use_reentrant=False, or return the loss from the function that is checkpointed; read its value in no_grad"
)


class EqualGates(nn.Linear):
    """Scores of the gates, which start at 1/2 each."""

    def reset_parameters(self) -> None:
        """Set all parameters to 0."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


class Branches(nn.Module):
    """Gates, compression and index of an attention; subclasses have the ``networks`` of compression.

    Attributes:
        q_index, k_index: projections of the index with ``rule="index"``, else None.
    """

    _index_loss: torch.Tensor | None = None

    def _add_branches(
        self,
        dim: int,
        Hq: int,
        Hkv: int,
        D: int,
        Dv: int,
        config: NSAConfig,
        *,
        gate: str | None,
        compression: str,
        index_dim: int | None,
        index_bias: bool,
        **at: Any,
    ) -> dict[str, BlockMLP]:
        """Add all parameters, and return the networks, whose parameters are not added; ``at``: device, dtype."""
        self.config, self.num_heads, self.num_kv_heads, count = config, Hq, Hkv, len(config.branches)
        self.gate_mlp = EqualGates(dim, count * Hq, **at) if gate == "linear" else None
        if gate == "input":
            hidden = max(1, dim // 4)
            last = EqualGates(hidden, count * Hq, **at)
            self.gate_mlp = nn.Sequential(nn.Linear(dim, hidden, **at), nn.GELU(), last)
        shapes = dict(gate_weight=(Hq, count, D), compress_k_weight=(Hkv, D, D), compress_v_weight=(Hkv, Dv, Dv))
        for name, shape in shapes.items():
            needed = gate == "query" if name == "gate_weight" else compression == "linear"
            self.register_parameter(name, nn.Parameter(torch.empty(shape, **at)) if needed else None)
        self.q_index = self.k_index = self.index_dim = None
        if config.rule == "index":
            self.index_dim = min(INDEX_DIM, D) if index_dim is None else index_dim
            self.q_index = nn.Linear(dim, Hkv * self.index_dim, bias=index_bias, **at)
            self.k_index = nn.Linear(dim, Hkv * self.index_dim, bias=index_bias, **at)
        sizes = dict(k_cmp=D, v_cmp=Dv) if compression == "mlp" else {}
        return {name: BlockMLP(Hkv, size, config=config, **at) for name, size in sizes.items()}

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set a weight of gates to 0 and matrices of compression to the identity, but none that transformers loaded."""
        for weight in (self.gate_weight, self.compress_k_weight, self.compress_v_weight):
            if weight is not None and not getattr(weight, "_is_hf_initialized", False):
                weight.zero_()
                if weight is not self.gate_weight:
                    weight.diagonal(dim1=-2, dim2=-1).fill_(1)

    @torch.no_grad()
    def start_index(self, layer: nn.Module) -> None:
        """Start the index as a layer's keys and the mean of each group's queries, but for what transformers loaded.

        Args:
            layer: with ``q_proj`` and ``k_proj``, such as this `NSAttention`, once it has a dense one's weights.
        """
        for name, parameter in self.named_parameters():
            part, _, key = name.replace("_index_norm.", "_norm.").replace("_index.", "_proj.").partition(".")
            if "_index" not in name or getattr(parameter, "_is_hf_initialized", False):
                continue
            start = getattr(getattr(layer, part), key, None)
            if start is None or start.dtype not in DTYPES:
                raise NotImplementedError(f"an index starts from {part}, which has no {key} of floating point")
            is_projection = part.endswith("_proj")
            if is_projection:
                start = start.unflatten(0, (self.num_kv_heads, -1, layer.head_dim)).mean(1)
            parameter.copy_(slowest_pairs(start, self.index_dim, int(is_projection)).reshape(parameter.shape))

    def gates_of(self, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """Gates of x [.., dim], or the weight that makes them of q, as arguments of `nsa`."""
        gates = None if self.gate_mlp is None else self.gate_mlp(x).sigmoid().unflatten(-1, (self.num_heads, -1))
        return dict(gate_weight=self.gate_weight, gates=gates)

    def index_of(self, x: torch.Tensor, turn: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> dict[str, Any]:
        """Queries and keys of the index, of x [.., dim] as a constant, whose projections [.., Hkv, Di] are turned; as
        arguments of `nsa`, without an index none."""
        if self.q_index is None:
            return {}
        both = (part(x.detach()).unflatten(-1, (self.num_kv_heads, -1)) for part in (self.q_index, self.k_index))
        return dict(zip(("q_index", "k_index"), turn(*both)))

    @property
    def index_loss(self) -> torch.Tensor:
        """The index' loss of the last forward; RuntimeError where there is none, or where it lacks a needed graph."""
        if self._index_loss is None:
            raise RuntimeError(NO_LOSS)
        if torch.is_grad_enabled() and not self._index_loss.requires_grad:
            raise RuntimeError(NO_GRAPH)
        return self._index_loss

    def _keep_loss(self, loss: torch.Tensor | None) -> None:
        """Set ``index_loss`` to this forward's; graphs read the one before only where this forward has none."""
        if loss is not None or self._index_loss is not None:
            self._index_loss = loss

    def __getstate__(self) -> dict[str, Any]:
        """The state without the loss, which belongs to a graph: copies and files have none."""
        return {name: value for name, value in vars(self).items() if name != "_index_loss"}

    def compress_weights(self) -> dict[str, torch.Tensor | None]:
        """The matrices of compression, as arguments of `nsa`."""
        return dict(compress_k_weight=self.compress_k_weight, compress_v_weight=self.compress_v_weight)

    def compressors(self) -> Compressors:
        """Functions that compress blocks outside of `nsa`, by networks or means and matrices."""
        weights, networks = self.compress_weights().values(), dict(self.networks.items())
        return {
            name: partial(compressed, network=networks.get(name), weight=weight, config=self.config)
            for name, weight in zip(("k_cmp", "v_cmp"), weights)
        }


def slowest_pairs(x: torch.Tensor, size: int, dim: int = -1) -> torch.Tensor:
    """The last ``size / 2`` pairs (i, i + D / 2) of D dimensions, which a rotary embedding rotates slowest."""
    return torch.cat([half.narrow(dim, half.shape[dim] - size // 2, size // 2) for half in x.chunk(2, dim)], dim)


def check_branches(
    config: NSAConfig, default: str, *, gate: str | None, compression: str, index_dim: int | None
) -> str | None:
    """The gate in force, by default none with one branch; TypeError or ValueError for options of `Branches` that are
    unknown, or do not fit the configuration."""
    require_one_of("compression", compression, COMPRESSIONS)
    require_one_of("gate", gate, (None, *GATES))
    if compression != "mean" and "compressed" not in config.branches:
        raise ValueError(f"compression={compression!r} needs the compressed branch, got {config.branches}")
    if index_dim is not None:
        require_sizes(index_dim=index_dim)
        if config.rule != "index":
            raise ValueError(f"index_dim is for rule='index', got {index_dim} with rule={config.rule!r}")
    return default if gate is None and len(config.branches) > 1 else gate


def index_loss(model: nn.Module) -> torch.Tensor:
    """Sum of the index' losses of a model's layers, `NSAttention` or of transformers, in their last forward.

    Raises:
        ValueError: no layer has an index.
        RuntimeError: as ``index_loss`` of a layer.

    Example:
        >>> config = NSAConfig(rule="index", branches=("selected",))
        >>> layer = NSAttention(64, num_heads=4, num_kv_heads=2, config=config)
        >>> o = layer(torch.randn(1, 100, 64))
        >>> index_loss(layer).backward()
    """
    parts = [part for part in model.modules() if isinstance(part, Branches) and part.q_index is not None]
    if not parts:
        raise ValueError(f"index_loss needs a model with layers of rule='index', got {type(model).__name__} without")
    losses, sharded = [part.index_loss for part in parts], _sharded_by_fsdp(model)
    for part, loss in zip(parts, losses):
        if part in sharded and loss.requires_grad and torch.is_grad_enabled():
            loss.register_hook(sharded[part]._get_fsdp_state()._pre_backward)
    return sum(loss.to(losses[0].device) for loss in losses)


def _sharded_by_fsdp(model: nn.Module) -> dict[nn.Module, Any]:
    """The innermost module that FSDP2 has sharded around each part of a model; in graphs none.

    FSDP2 gathers parameters, and reduces their gradients, where a backward reaches an output of such a module. That of
    a loss which is no output, of an index that trains alone, does not.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or torch.compiler.is_compiling():
        return {}
    outer = (each for each in model.modules() if isinstance(each, fsdp.FSDPModule))
    return {part: each for each in outer for part in each.modules()}
