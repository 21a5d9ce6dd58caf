"""The kernels' forward and backward, once `flash_attn.cute` is known to be the patched build."""

from nsa_layer.fork import require_patched

require_patched()

from nsa_layer.cute.backward import backward  # noqa: E402
from nsa_layer.cute.forward import forward  # noqa: E402

__all__ = ["backward", "forward"]
