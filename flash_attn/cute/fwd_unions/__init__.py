"""Forward over unions of the lists of a tile's tokens, for SM100, where upstream's kernel reads no bits."""
