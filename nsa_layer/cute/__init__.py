"""The kernels' backend of the operator: forward and backward of a call, by groups of heads, and what they share."""
