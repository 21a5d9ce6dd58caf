"""Calls of `nsa`, `selected_attention` and `nsa_with_kvcache` without their tensors: what their kernels depend on."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from nsa_layer.cached_call import CachedCall
from nsa_layer.call_spec import CallSpec, CallTensors
from nsa_layer.config import NSAConfig
from nsa_layer.cute.memory_plan import MemoryPlan, MemoryPolicy, Sizes


@dataclass(frozen=True, kw_only=True)
class CallShape:
    """A call of `nsa` without its tensors.

    Attributes:
        T: tokens of a sequence; of all sequences if packed.
        lengths: of packed sequences; None for a batch.
        policy: without a budget all heads go in one group, whatever the GPU has free.
        gate: "weight" (``gate_weight``), "given" (``gates``) or "none".
        projected: with ``compress_k_weight`` and ``compress_v_weight``.
        own: branches' own keys and values, of `OWN_KEYS`.
        backward: backward too.
        plan: groups of heads, and what is saved; None: as the policy has them.
        lists: (heads, blocks) of ``block_indices``.
        keys: of a sequence, packed of all, where queries are a stretch of them; lengths_k: of packed sequences.
    """

    B: int
    T: int
    Hq: int
    Hkv: int
    D: int
    Dv: int
    dtype: torch.dtype
    config: NSAConfig
    lengths: tuple[int, ...] | None = None
    policy: MemoryPolicy = MemoryPolicy()
    causal: bool = True
    gate: str = "weight"
    projected: bool = False
    own: tuple[str, ...] = ()
    backward: bool = True
    plan: MemoryPlan | None = None
    lists: tuple[int, int] | None = None
    keys: int | None = None
    lengths_k: tuple[int, ...] | None = None

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """By argument of `nsa`: q, k and v [B, T, H, D], or [total, H, D] if packed, and the weights."""
        S = self.T if self.keys is None else self.keys
        tokens, keys = ((self.B, T) if self.lengths is None else (T,) for T in (self.T, S))
        found = dict(q=(*tokens, self.Hq, self.D), k=(*keys, self.Hkv, self.D), v=(*keys, self.Hkv, self.Dv))
        if self.gate == "weight":
            found["gate_weight"] = (self.Hq, 3, self.D)
        if self.gate == "given":
            found["gates"] = (*tokens, self.Hq, 3)
        if self.projected:
            found |= dict(compress_k_weight=(self.Hkv, self.D, self.D), compress_v_weight=(self.Hkv, self.Dv, self.Dv))
        count = self.config.compressed_length
        blocks = (self.B, count(S)) if self.lengths is None else (sum(map(count, self.lengths_k or self.lengths)),)
        for name in self.own:
            shape = found[name[0]]
            found[name] = (*blocks, *shape[-2:]) if name.endswith("cmp") else shape
        return found

    def spec(self) -> CallSpec:
        """The static side of the call, as backends take it."""
        lengths = self.lengths, self.lengths_k
        return CallSpec(self.config, self.causal, self.D**-0.5, *lengths, listed=self.lists is not None)

    def block_indices(self, device: str) -> torch.Tensor | None:
        """Lists of the caller's own, int32 [B, M, *lists], packed [M of all sequences, *lists], if there are."""
        if self.lists is None:
            return None
        tiles = [self.config.num_tiles(T) for T in self.lengths or (self.T,)]
        lead = (self.B, *tiles) if self.lengths is None else (sum(tiles),)
        return torch.empty(*lead, *self.lists, dtype=torch.int32, device=device)

    def sizes(self) -> Sizes:
        """The sizes that predictions of memory depend on."""
        given = {name: torch.empty(of, dtype=self.dtype, device="meta") for name, of in self.tensor_shapes().items()}
        tensors = CallTensors(**given, block_indices=self.block_indices("meta"))
        return Sizes.of(tensors, spec=self.spec(), needs_grad=self.backward)


@dataclass(frozen=True)
class ListsShape:
    """A call of `selected_attention` without its tensors: shapes of q, of k and v, and of block_indices.

    Attributes:
        offset: positions of the first queries are given, or differ from 0.
        backward: backward too.
    """

    q: tuple[int, ...]
    k: tuple[int, ...]
    lists: tuple[int, ...]
    dtype: torch.dtype
    spec: CallSpec
    offset: bool
    backward: bool


@dataclass(frozen=True)
class CachedShape:
    """A call of `nsa_with_kvcache` without its tensors, each of which is a name, a shape and a dtype.

    Attributes:
        lengths: queries of each sequence, if they are known.
    """

    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    config: NSAConfig
    lengths: tuple[int, ...] | None

    @classmethod
    def of(cls, call: CachedCall, lengths: tuple[int, ...] | None) -> CachedShape:
        found = ((field.name, getattr(call, field.name)) for field in fields(call))
        tensors = ((name, tuple(x.shape), x.dtype) for name, x in found if isinstance(x, torch.Tensor))
        return cls(tuple(tensors), call.config, lengths)
