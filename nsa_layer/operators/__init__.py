"""`torch.ops.nsa_layer`: the operators that PyTorch sees, in eager mode, in graphs that it compiles, and in exports.

Arguments are flat, and an operator has a fixed number of outputs: what is missing is empty, never None. Shapes follow
from shapes: lists of packed sequences have room for what any lengths could need. Each operator has a backward that is
an operator too; that one cannot be differentiated.

- ``branches``, ``branches_backward``: the three branches in plain PyTorch, before the gates.
- ``attend``, ``attend_backward``: the layer on the kernels.
- ``selected``, ``selected_backward``: `selected_attention` in plain PyTorch; ``selected_on_kernels`` on the kernels.
"""

from nsa_layer.operators.arguments import CONFIG, static_arguments
from nsa_layer.operators.branches import attend
from nsa_layer.operators.layer import attend_on_kernels
from nsa_layer.operators.selected import attend_selected

__all__ = ["CONFIG", "attend", "attend_on_kernels", "attend_selected", "static_arguments"]
