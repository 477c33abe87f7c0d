"""`vime plan`: what a run will be, before it is started. Pure arithmetic: no GPU, no torch, nothing is started."""
