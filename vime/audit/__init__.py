"""`vime audit`: whether a run lost a prompt or trained on one twice."""
