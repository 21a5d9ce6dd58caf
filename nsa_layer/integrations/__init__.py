"""Integrations of other libraries; each needs its extra."""
