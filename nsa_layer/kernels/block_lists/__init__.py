"""Block lists for attention from selected blocks: by query tile for forward, by key tile in CSR for backward."""
