"""`torch.ops.flash_attn_4`: attention as PyTorch's graphs have it."""
