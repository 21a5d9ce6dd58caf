"""Test cases of the operator, oracles, and assertions about a backend."""
