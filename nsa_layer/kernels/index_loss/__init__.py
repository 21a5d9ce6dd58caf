"""The index' loss over the selected blocks: its rows and its gradients, nothing of the size T x T.

Selection hands over the blocks' scores, from which `rows` computes the sums of the loss and gradients of scores. In
backward `keys` loops over the token-block CSR, finds the key that has each score again, and sums the gradient of keys;
then `rows` computes that of queries. Results are deterministic. `listed_scores` is for `Aux` alone.
"""
