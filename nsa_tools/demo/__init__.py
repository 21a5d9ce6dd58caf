"""The demo: a small byte-level language model trained with sparse and with dense attention, side by side."""
