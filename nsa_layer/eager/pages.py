"""Plain PyTorch: its two pages."""

from nsa_layer.eager.backward import backward
from nsa_layer.eager.forward import attend, forward

__all__ = ["attend", "backward", "forward"]
