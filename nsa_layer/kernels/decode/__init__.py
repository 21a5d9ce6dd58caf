"""A step on caches for few queries: decode, and the verification of a draft.

One launch, `selected`: compressed branch, window, selection of blocks, selected branch, and gated sum.
Where there are many more compressed keys than other ones, `compressed` attends to them in a launch before it. Scores of
the compressed branch, and its partial results, lie in a workspace that shapes alone bound. `step` launches them.
"""
