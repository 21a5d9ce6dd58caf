"""A step on caches for few queries: decode, and the verification of a draft.

One launch, `selected`: the compressed branch, the window, the choice of blocks, the selected branch, and the gated sum.
Where there are many more compressed keys than other ones, `compressed` attends to them in a launch before it. Scores of
the compressed branch, and its partial results, lie in a workspace that shapes alone bound. `step` launches them.
"""
