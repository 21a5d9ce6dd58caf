"""Matrix products of the kernels that SM90 and SM100 share: wgmma on SM90, mma.sync on SM100."""
