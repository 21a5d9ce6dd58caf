"""The dk and dv pass of SM90 backward where every token has a list of its own."""
