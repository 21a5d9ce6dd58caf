"""The kernels' backend of the operator: autograd, forward and backward of a call, and what they share."""
