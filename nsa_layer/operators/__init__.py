"""`torch.ops.nsa_layer`: the operators that PyTorch sees, in eager mode, in graphs that it compiles, and in exports.

Arguments are flat, and an operator has a fixed number of outputs: what is missing is empty, never None. Shapes follow
from shapes: lists of packed sequences have the capacity that any lengths could need. ``attend``, the layer and
`selected_attention` on any backend, has a backward that is an operator too; that one cannot be differentiated.
"""

from nsa_layer.operators.layer import CONFIG, attend, static_arguments

__all__ = ["CONFIG", "attend", "static_arguments"]
