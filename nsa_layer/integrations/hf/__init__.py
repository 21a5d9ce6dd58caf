"""Hugging Face transformers: the attention "nsa", models with it, a cache for `generate`; needs the extra ``[hf]``."""

from nsa_layer.integrations.hf.cache import NSAModelCache
from nsa_layer.integrations.hf.convert import convert_to_nsa
from nsa_layer.integrations.hf.minimax import use_nsa_kernels
from nsa_layer.integrations.hf.models import (
    NSALlamaConfig,
    NSALlamaForCausalLM,
    NSALlamaModel,
    NSAQwen2Config,
    NSAQwen2ForCausalLM,
    NSAQwen2Model,
    NSAQwen3Config,
    NSAQwen3ForCausalLM,
    NSAQwen3Model,
)

__all__ = ["NSALlamaConfig", "NSALlamaForCausalLM", "NSALlamaModel", "NSAModelCache", "NSAQwen2Config"]
__all__ += ["NSAQwen2ForCausalLM", "NSAQwen2Model", "NSAQwen3Config", "NSAQwen3ForCausalLM", "NSAQwen3Model"]
__all__ += ["convert_to_nsa", "use_nsa_kernels"]
