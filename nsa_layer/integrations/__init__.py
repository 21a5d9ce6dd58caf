"""Rooms for other libraries; each needs its own extra."""
