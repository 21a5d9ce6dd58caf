"""Parts of Hopper's backward: loops over query tiles and a group's heads, accumulators, the rule for two passes."""
