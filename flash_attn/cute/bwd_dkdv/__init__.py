"""The dk and dv pass of backward over lists of single tokens; on SM90, and on SM100 by mma.sync."""
