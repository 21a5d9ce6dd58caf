"""Kernels of calls, known from shapes alone: named, compiled ahead without a GPU, or side by side at a first call."""
