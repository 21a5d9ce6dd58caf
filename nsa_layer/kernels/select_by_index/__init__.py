"""Block selection by an index of tokens: each token's best blocks by their largest token score, in one launch.

CTAs are persistent. A work tile is `spec.tokens` neighbouring tokens of one list, past which index keys stream, 128 at
a time, first to last; nothing of the size of tokens times blocks is written to memory:

1. One warp loads queries and keys (`loads`).
2. Warpgroups of 64 tokens each multiply (`block_maxima`): tokens are rows, so a thread has columns of a block's scores
   for two tokens. Maxima are taken over the bits as integers, of which Hopper compares three at once: positive floats
   order as their bits. A negative maximum is the minimum of the bits, and computed only until scores from 0 on fill the
   lists of all tokens. Products of the next two steps' keys are in flight meanwhile.
3. A warpgroup keeps each token's best blocks, 64 blocks at a time, as in selection by token
   (`select_by_token.topk`): forced blocks, ties and the order of lists are the same.

A score depends on its token and keys alone, so a token's list is the same in any tile, and later tokens do not change
it. Two scores tie if they differ in the last bit of fp32 alone.
"""
