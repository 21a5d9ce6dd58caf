"""Block selection by an index of tokens: each token's best blocks by their largest token score, in one launch.

CTAs are persistent. A tile of theirs is `spec.tokens` neighbouring tokens of one list, past which they stream index
keys, 128 at a time, first to last; nothing of the size of tokens times blocks is written to memory:

1. One warp loads queries and keys (`loads`).
2. Warpgroups of 64 tokens multiply (`block_maxima`): tokens are rows, so a thread's scores of a block are columns of
   two tokens. Their maximum is taken on the bits, as integers, of which Hopper compares three at once: positive floats
   order as their bits, and a negative maximum is the minimum of the bits, which nobody needs once a token lists enough
   scores from 0 on. Products of the next keys and of those after them are in flight meanwhile.
3. A warpgroup keeps each token's best blocks, 64 blocks at a time, as in selection by token
   (`select_by_token.topk`): forced blocks, ties and the order of lists are the same.

A score depends on its token and keys alone, so later tokens take no part in a choice, and it is the same in whatever
tile a token falls. Two scores tie if they differ in the last bit of fp32 alone.
"""
