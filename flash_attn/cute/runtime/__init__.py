"""Host code around kernels: the cache, lazy imports, the device, autograd, checks of options."""
