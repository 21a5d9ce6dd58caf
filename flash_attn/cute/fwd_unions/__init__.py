"""Forward over unions of the lists of a tile's tokens, where upstream's kernel reads no bits: on SM100."""
