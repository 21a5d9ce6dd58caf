"""Parts of SM90 backward: loops over query tiles and heads, accumulators, ordered reduction, rules for two passes."""
