"""The index' loss over the chosen blocks: their best tokens, its rows, and its gradients, nothing of the size T x T.

`best_tokens` multiplies again what the lists of a tile's tokens hold, `rows` has the sums of the loss and the gradient
of queries by token, `keys` adds up that of keys by block, over the token-block CSR: the same bits every time.
"""
