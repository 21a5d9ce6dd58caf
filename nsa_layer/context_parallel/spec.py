"""`ContextParallel`: the ranks that share a sequence, and how they split it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from nsa_layer.config import require_one_of

MODES, BALANCES = ("auto", "heads", "gather"), (None, "zigzag")


@dataclass(frozen=True)
class ContextParallel:
    """Ranks that share sequences; each holds a shard of the tokens.

    Of R ranks rank r holds chunk r of R equal ones, with ``load_balance="zigzag"`` chunks r and 2R - 1 - r of 2R, in
    this order, so that causal work is even. A pack is cut as one row of tokens, wherever its sequences start.

    Args:
        group: a process group, or a DeviceMesh of one dimension, such as ``mesh["cp"]``.
        mode: "heads" gives each rank all tokens of a part of the key/value heads, whose number the ranks divide;
            "gather" leaves queries where they are and gathers keys and values; "auto" is "heads" where it fits,
            except in long calls in which "gather" sends less (docs/distributed.md).
        load_balance: "zigzag", or None.

    Attributes:
        group_name, size, rank: the group's name, its number of ranks and this rank among them.

    Raises:
        TypeError, ValueError: an argument is bad, or this rank is not in the group.
        RuntimeError: torch.distributed is not initialised.

    Source: mode "heads" is arXiv:2309.14509.

    Example:
        >>> cp = ContextParallel(torch.distributed.group.WORLD)
        >>> q, k, v = (torch.randn(1, 256 // cp.size, heads, 64) for heads in (8, 2, 2))  # of this rank
        >>> o = nsa(q, k, v, cp=cp)
    """

    group: Any
    mode: str = "auto"
    load_balance: str | None = "zigzag"
    group_name: str = field(init=False, repr=False)
    size: int = field(init=False)
    rank: int = field(init=False)

    def __post_init__(self) -> None:
        require_one_of("mode", self.mode, MODES)
        if self.load_balance not in BALANCES:
            raise ValueError(f"load_balance must be None or 'zigzag', got {self.load_balance!r}")
        require_initialized()
        group = self.group
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ValueError(f"group must be a DeviceMesh of one dimension, got {group.ndim}: pass mesh['cp']")
            group = group.get_group()
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(f"group must have this rank as a member, got one without rank {dist.get_rank()}")
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"group must be a ProcessGroup or a DeviceMesh, got {type(group).__name__}")
        fields = dict(group=group, group_name=group.group_name, size=group.size(), rank=group.rank())
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @property
    def chunks(self) -> tuple[int, ...]:
        """This rank's chunks, in the order in which it holds them."""
        return rank_chunks(self.size, self.load_balance)[self.rank]

    @property
    def num_chunks(self) -> int:
        """Chunks of all ranks."""
        return self.size * len(self.chunks)

    def positions(self, local: int, device: torch.device) -> torch.Tensor:
        """Positions in the whole sequence, or pack, of this rank's `local` tokens: int64 [local]."""
        size = local // len(self.chunks)
        return torch.cat([torch.arange(chunk * size, (chunk + 1) * size, device=device) for chunk in self.chunks])


def rank_chunks(size: int, load_balance: str | None) -> list[tuple[int, ...]]:
    """Chunks of each rank, in the order in which it holds them."""
    return [(rank,) if load_balance is None else (rank, 2 * size - 1 - rank) for rank in range(size)]


def require_initialized() -> None:
    """Raise RuntimeError where there are no process groups."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("context parallelism needs torch.distributed: call init_process_group, or init_device_mesh")
