"""The index' loss over the chosen blocks: its rows and its gradients, nothing of the size T x T.

The choice of blocks hands over their scores, from which `rows` has the sums of the loss and gradients of scores. In
backward `keys` goes through the token-block CSR, finds the tokens of these scores again, and adds up the gradient of
keys; then `rows` has that of queries. The same bits every time. `listed_scores` is for `Aux` alone.
"""
