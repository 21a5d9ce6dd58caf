"""Native Sparse Attention for Hopper and Blackwell GPUs, and in plain PyTorch anywhere."""

from nsa_layer.api import nsa, selected_attention
from nsa_layer.branches import index_loss
from nsa_layer.config import NSAConfig
from nsa_layer.context_parallel import ContextParallel, shard_sequence, unshard_sequence
from nsa_layer.cute.memory_plan import MemoryPolicy
from nsa_layer.kvcache.api import nsa_with_kvcache
from nsa_layer.kvcache.nsa_cache import NSACache
from nsa_layer.module import NSAttention
from nsa_layer.warm_up.api import warm_up

__all__ = [
    "ContextParallel",
    "MemoryPolicy",
    "NSACache",
    "NSAConfig",
    "NSAttention",
    "index_loss",
    "nsa",
    "nsa_with_kvcache",
    "selected_attention",
    "shard_sequence",
    "unshard_sequence",
    "warm_up",
]
