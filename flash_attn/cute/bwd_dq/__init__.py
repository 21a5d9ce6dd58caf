"""The dq pass of Hopper's backward in two passes: its kernel and its host code."""
