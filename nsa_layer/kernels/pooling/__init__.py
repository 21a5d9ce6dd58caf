"""Means of blocks of k and v, and their gradients."""
