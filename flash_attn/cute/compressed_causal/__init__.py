"""The compressed-causal mask, and how Hopper's kernels split work under it."""
