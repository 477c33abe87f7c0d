"""Measurements that a person runs by hand; what they gave stands in results/."""
