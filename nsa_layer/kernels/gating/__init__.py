"""The gated sum of the three branches' outputs, and its backward, one pass over memory each."""
