"""The layer's own CuTe DSL kernels, one a file: everything between the attention calls."""
