"""Forward and backward in plain PyTorch."""

from nsa_layer.eager.backward import backward
from nsa_layer.eager.forward import attend, forward

__all__ = ["attend", "backward", "forward"]
