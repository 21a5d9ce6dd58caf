"""Measurements of calls: time, memory, and kernels of a trace."""
