"""Attention to keys and values in caches: the call, its operator, the step in plain PyTorch, caches with lengths."""
