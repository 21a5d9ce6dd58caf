"""Context parallelism: ranks that share sequences, each with a part of the tokens."""

from nsa_layer.context_parallel.shard import shard_sequence, unshard_sequence
from nsa_layer.context_parallel.spec import ContextParallel

__all__ = ["ContextParallel", "shard_sequence", "unshard_sequence"]
