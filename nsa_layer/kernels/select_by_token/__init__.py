"""Block selection by token: which key blocks each token and key/value head attends to, in one launch.

The compressed branch's probabilities are recomputed from its log-sum-exp, and never written to memory. CTAs are
persistent. A work tile is a few neighbouring tokens with all heads of a group; compressed keys stream past it, 64 at a
time, first to last. One warpgroup sums probabilities over heads (`group_sums`), another keeps each token's best blocks
(`topk`), one step behind:

1. Products of keys with queries, laid out so that a thread has a key's scores of all heads of a few tokens: the sum of
   ``exp(s - lse)`` over a group needs no other thread. The next step's products run meanwhile.
2. The sums are handed over through shared memory: each warp gets all keys of some tokens, and adds those that overlap a
   block, weighted by the overlap (`step_scores`).
3. A few lanes share a token, and each keeps the best scores it has seen. The n-th best of all its lanes bounds the
   token's n-th best from below: blocks below the bound are dropped, others are appended to the lane's candidates in
   shared memory (`candidates`).
4. A lane's candidates are pruned when they are many. At the end the bound is raised until exactly the best reach it; if
   scores tie, candidates are ranked, the earlier block first. Forced blocks are merged by rank, and the list is written
   ascending (`epilogue`), while the next tile's sums are computed.

A score depends on its token, group and key alone, and the order of candidates is total, so a token's list is the same
bits in any tile, and later tokens do not change it. `spec` has what the kernel is compiled for. Source: section 3.3 of
arXiv:2502.11089, equations 8 to 10.
"""
