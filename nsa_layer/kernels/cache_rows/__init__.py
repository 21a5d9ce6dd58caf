"""Caches of keys and values: what a call's numbers lead to, and rows moved between caches and dense tensors."""
