"""Caches of keys and values: slots of a call's sequences, and rows moved between caches and dense tensors."""
