"""A step on caches for few queries: decode, and the verification of a draft.

One launch, `selected`: compressed branch, window, selection of blocks, selected branch, and gated sum. If there are
many more compressed keys than other keys, `compressed` attends to them in an earlier launch. The compressed branch's
scores and partial sums go to a workspace whose size follows from shapes alone. `step` launches both.
"""
