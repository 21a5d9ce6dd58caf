"""The dq pass of backward in two passes; on SM90, and over lists with bits on SM100 too, by mma.sync."""
