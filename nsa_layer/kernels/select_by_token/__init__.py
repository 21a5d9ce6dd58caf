"""Block selection by token: which key blocks each token and key/value head attends to, in one launch.

The compressed branch's probabilities are made anew from its log-sum-exp, and never written to memory. CTAs are
persistent. A tile of theirs is a few neighbouring tokens, all heads of a group, past which they stream compressed
keys, 64 at a time, first to last. A warpgroup makes sums of probabilities (`group_sums`), another lists of them
(`topk`), one step behind:

1. Products of keys with queries, so that a thread's scores of a key are those of all heads of a few tokens: the sum of
   ``exp(s - lse)`` over a group needs no other thread. The next step's products run meanwhile.
2. The sums change hands through shared memory: each warp gets all keys of some tokens (`step_scores`), and weighs
   those that overlap a block.
3. A few lanes share a token, and each keeps the best scores it has seen. The n-th best of all its
   lanes bounds the token's n-th best from below: what does not reach it is dropped, the rest goes to the lane's
   candidates in shared memory (`candidates`).
4. A lane's candidates are pruned when they are many. At the end the bound is raised until exactly the best reach it;
   where scores tie, candidates are ranked, and the earlier block goes first. Forced blocks are merged by rank, and the
   list is written ascending (`epilogue`). The next tile's sums are made meanwhile.

A score depends on its token, group and key alone, and the order of ranks is total: so the choice is the same bits in
whatever tile a token falls, and later tokens take no part in it. `spec` says what the kernel is compiled for. Source:
section 3.3 of arXiv:2502.11089, equations 8 to 10.
"""
