"""Parts of Hopper's forward that upstream does not have: persistent CTAs, two blocks a step, masks at edges only."""
