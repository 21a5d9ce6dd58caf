"""`NSAModelCache`: keys and values of a model's layers for `generate`, an `NSACache` for each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from nsa_layer.block_mlp import Compressors, compress_blocks, compress_sequences
from nsa_layer.config import NSAConfig
from nsa_layer.integrations.hf.packing import BatchPacking, first_columns
from nsa_layer.kvcache.api import nsa_with_kvcache
from nsa_layer.kvcache.fp8 import dequantise, in_cache_dtype
from nsa_layer.kvcache.nsa_cache import LastingTensors, NSACache

Tensor = torch.Tensor
CAPACITY = 256  # tokens, without max_cache_len


class NSACacheLayer(LastingTensors, CacheLayerMixin):
    """One layer's sequences, without their padding.

    Args:
        max_cache_len: tokens to allocate at once; with more of them the cache grows, unless it is static.
        static: steps of one token for each row count on the device alone, so that they compile to one graph.
        dtype: of the cache, see `NSACache`; None: that of the keys.
    """

    is_croppable = True
    supports_early_init = False

    def __init__(self, max_cache_len: int = CAPACITY, static: bool = False, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.max_cache_len, self.is_compileable, self.dtype = max_cache_len, static, dtype
        self.cache: NSACache | None = None
        self._is_token: Tensor | None = None  # bool [B, columns of prompts] on the CPU; None: there is no padding
        self._padding = 0  # columns of row 0 without a token
        self._padding_on_device: Tensor | None = None  # int32 [1], of a static cache
        self._is_counted = True  # False: the cache's lengths are on the device alone

    @property
    def columns(self) -> int:
        """Tokens of a row, its padding included; waits for lengths that steps have left on the device."""
        if not self._is_counted:
            self.cache.read_lengths()
            self._is_counted = True
        return 0 if self.cache is None else self.cache.lengths[0] + self._padding

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        packing: BatchPacking,
        *,
        config: NSAConfig,
        compressors: Compressors,
        **options: object,
    ) -> Tensor:
        """Append k and v of q's tokens, and attend to all: [B, T, Hq, Dv], or as packing packs it, as q, k and v are.

        Args:
            compressors: for "k_cmp" and "v_cmp", or none: blocks have means.
            options: of `nsa_with_kvcache`; gates, q_index and k_index as q, k and v are.

        Raises:
            ValueError: rows hold several sequences, or rows or config differ from the calls before.
        """
        B, T = packing.shape
        if self.cache is not None and (B, config) != (rows := len(self.cache.cache_seqlens), self.cache.config):
            raise ValueError(f"the cache is of {rows} rows and {self.cache.config}, got {B} and {config}: make another")
        if self.is_compileable and T == 1 and self.is_initialized and packing.is_token is None:
            return self._step(q, k, v, compressors, **options)
        columns = self.columns
        if self.cache is None:
            self._allocate(k, v, B, T, config, options.get("k_index"))
        if (kept := packing.kept(self._is_token, columns)) != self.cache.lengths:
            self._crop(kept, columns)
        self._is_token = packing.is_token
        if columns + T > self.cache.max_seqlen and not self.is_compileable:
            self.cache.grow(max(columns + T, 2 * self.cache.max_seqlen))
        if compressors:
            options["compress"] = partial(compress_blocks, compressors)
        if len(q):
            if self.cache.scales and not any(self.cache.lengths):
                others = compress_sequences(compressors, k, v, packing.cu_seqlens) | dict(
                    k_index=options.get("k_index")
                )
                others = {name: x for name, x in others.items() if x is not None and x.numel()}
                self.cache.calibrate(k, v, **others)
            o = self.cache.attend(q, k, v, cu_seqlens_q=packing.cu_seqlens, **options)
        else:
            o = q.new_zeros(0, q.shape[-2], v.shape[-1])
        self._pad_to(columns + T)
        return o

    def _step(self, q: Tensor, k: Tensor, v: Tensor, compressors: Compressors, **options: object) -> Tensor:
        """`attend` of a token in each row, without lengths on the host."""
        cache, lengths, self._is_counted = self.cache, self.cache.cache_seqlens, False
        for (name, compress), new in zip(compressors.items(), (k, v)):
            # Of the last tokens, whether they complete a block or not: what belongs to no block is not read.
            before = lengths[:, None] + torch.arange(1 - cache.config.span, 0, device=lengths.device)
            rows = torch.arange(len(lengths), device=lengths.device)[:, None]
            stored, scale = cache.caches[f"{name[0]}_cache"], cache.scales.get(f"{name[0]}_scale")
            tokens = stored[rows, before.clamp(min=0)], in_cache_dtype(new, scale, stored.dtype)
            options[name] = compress(torch.cat([dequantise(x, scale, q.dtype) for x in tokens], dim=1))
        options |= cache.caches | cache.scales
        o = nsa_with_kvcache(q, k=k, v=v, cache_seqlens=lengths, config=cache.config, **options)
        lengths += 1
        return o

    def _allocate(self, k: Tensor, v: Tensor, B: int, T: int, config: NSAConfig, k_index: Tensor | None) -> None:
        sizes = dict(head_dim_v=v.shape[-1], dtype=self.dtype or k.dtype, device=k.device)
        sizes |= {} if k_index is None else dict(index_heads=k_index.shape[-2], index_dim=k_index.shape[-1])
        self.cache = NSACache(B, max(self.max_cache_len, T), *k.shape[-2:], config=config, **sizes)
        self.is_initialized = True
        if self.is_compileable:
            with torch.inference_mode(False):
                self._padding_on_device = torch.zeros(1, dtype=torch.int32, device=k.device)
            caches, scales = (each.values() for each in (self.cache.caches, self.cache.scales))
            for x in (*caches, *scales, self.cache.cache_seqlens, self._padding_on_device):
                torch._dynamo.mark_static_address(x)  # a CUDA graph writes to them in place

    def _pad_to(self, columns: int) -> None:
        """Count columns without a token, of row 0, where steps find them."""
        self._padding = columns - self.cache.lengths[0]
        if self._padding_on_device is not None:
            self._padding_on_device.fill_(self._padding)

    def _crop(self, lengths: Sequence[int], columns: int) -> None:
        """Keep each row's first tokens, which end in this many columns."""
        self.cache.crop(lengths)
        self._pad_to(columns)

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple:
        raise NotImplementedError(
            "NSAModelCache is for models of nsa_layer.integrations.hf; for others use DynamicCache"
        )

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: sizes are known with the first tokens."""

    def get_seq_length(self) -> int | Tensor:
        """Tokens of a row, its padding included; a tensor [1] where a graph is compiled."""
        if self.is_compileable and self.is_initialized and torch.compiler.is_compiling():
            return self.cache.cache_seqlens[:1] + self._padding_on_device
        return self.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns of a mask, and the first of them; ValueError where a static cache has too few."""
        columns = self.get_seq_length() + query_length
        if isinstance(columns, Tensor):
            torch._assert_async((columns <= self.max_cache_len).all(), "a static cache has no capacity for a token")
            return query_length, 0
        self.require_capacity(columns)
        return columns, 0

    def require_capacity(self, columns: int) -> None:
        """Raise ValueError unless a row may have this many tokens, its padding included."""
        if self.is_compileable and columns > self.max_cache_len:
            raise ValueError(f"rows must have at most {self.max_cache_len} tokens, the static capacity, got {columns}")

    def get_max_length(self) -> int:
        """Tokens of a row, at most; -1: it grows."""
        return self.max_cache_len if self.is_compileable else -1

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens of all rows, -n for n of them; ValueError for a positive number."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove must be at most 0, as -n for n tokens, got {tokens_to_remove}")
        if columns := self.columns:
            columns = max(0, columns + int(tokens_to_remove))
            is_token = first_columns(self._is_token, len(self.cache.lengths), columns)
            self._crop(is_token.sum(1).tolist(), columns)

    def reset(self) -> None:
        """Remove all tokens."""
        self.crop(-self.columns)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b becomes a copy of row ``beam_idx[b]``, which has the same padding."""
        if self.columns:
            self.cache.reorder(beam_idx)


class NSAModelCache(Cache):
    """A cache of transformers for models of this package; `generate` of these models makes it.

    Sequences are kept without their padding, so that blocks start at a sequence's first token.

    Args:
        config: the model's.
        max_cache_len: tokens of a row, padding included, to allocate at once; with more of them it grows.
        static: it does not grow, and `generate` on a GPU compiles the steps of a token. Steps beyond it are errors,
            in a compiled graph assertions.
        dtype: torch.float8_e4m3fn for half of bfloat16's bytes, with scales by the first tokens; None: the model's.

    Example:
        >>> sizes = dict(hidden_size=64, intermediate_size=64, vocab_size=50, num_hidden_layers=1)
        >>> model = NSALlamaForCausalLM(NSALlamaConfig(**sizes))
        >>> cache = NSAModelCache(model.config, max_cache_len=512)
        >>> model.generate(torch.ones(1, 40, dtype=torch.long), past_key_values=cache, max_new_tokens=2).shape
        torch.Size([1, 42])
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        max_cache_len: int = CAPACITY,
        *,
        static: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(layers=[NSACacheLayer(max_cache_len, static, dtype) for _ in range(config.num_hidden_layers)])

    @property
    def is_initialized(self) -> bool:
        """True once there were tokens."""
        return all(layer.is_initialized for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' tensors."""
        return sum(layer.cache.nbytes for layer in self.layers if layer.cache is not None)
