"""Soft punishment of responses that come near the length limit.

DAPO (arXiv:2503.14476, eq. 13), with L_max the limit and L_cache the margin before it:

    0                                    |y| <= L_max - L_cache
    ((L_max - L_cache) - |y|) / L_cache  in between
    -1                                   |y| > L_max
"""

from __future__ import annotations

__all__ = ["overlong_penalty"]


def overlong_penalty(length: int, *, max_length: int, margin: int) -> float:
    """What is added to the reward of a response of `length` tokens, between -1 and 0. `margin` in 1 ... max_length."""
    return -min(max(length - (max_length - margin), 0) / margin, 1.0)
