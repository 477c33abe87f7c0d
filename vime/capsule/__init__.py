"""Step capsules: one training step with everything that it was computed from and a digest of all that came out of it."""
