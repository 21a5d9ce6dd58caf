"""The compressed-causal mask, and the tiles and query splits of SM90 kernels under it."""
