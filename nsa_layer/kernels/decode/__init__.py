"""A step on caches for few queries: decode, and the verification of a draft.

Three launches: `compressed` appends, completes compressed keys and attends to them; `choice` finds the best blocks,
beside the window's attention; `selected` attends to selected blocks and adds up. Between them lie partial results,
scores of the compressed branch, and candidates for each token's list: a workspace that shapes alone bound. `step`
launches them.
"""
