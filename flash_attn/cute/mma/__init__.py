"""Products of the kernels that SM90 and SM100 share, and the form that they have on each."""
