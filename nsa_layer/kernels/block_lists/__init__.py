"""Block lists for attention out of chosen blocks: by query tile for forward, by key tile in CSR for backward."""
