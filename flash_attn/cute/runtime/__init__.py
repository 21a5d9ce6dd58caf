"""Host code around kernels: cache, lazy imports, device, autograd, checks of options."""
