"""The operator in plain PyTorch: memory linear in T, on any device, any dtype and head dimension."""
