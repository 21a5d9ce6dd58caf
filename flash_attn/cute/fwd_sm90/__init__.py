"""Parts of SM90 forward that upstream does not have: persistent CTAs, two blocks per step, masks at edges only."""
