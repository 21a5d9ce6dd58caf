"""The layer's own CuTe DSL kernels: everything between the attention calls."""
