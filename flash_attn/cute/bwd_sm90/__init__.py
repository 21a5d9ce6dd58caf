"""Parts of Hopper's backward: loops over query tiles and heads, accumulators, turns, the rule for two passes."""
