"""Filters of finished groups."""
