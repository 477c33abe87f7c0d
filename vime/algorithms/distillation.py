"""On-policy distillation: the student's own responses, each token judged by a teacher.

The gradient of the reverse KL(student || teacher) on the student's samples is that of a policy gradient whose token advantage is
-(log pi_student - log pi_teacher) (GKD, arXiv:2306.13649, section 3, on-policy; K. Lu, "On-Policy Distillation", Thinking Machines 2025).
It is added to whatever the advantage estimator gives.
"""

from __future__ import annotations

import torch

__all__ = ["distilled_advantages"]


def distilled_advantages(advantages: torch.Tensor, log_probs: torch.Tensor, teacher_log_probs: torch.Tensor, coef: float) -> torch.Tensor:
    """advantages - coef x (log pi_student - log pi_teacher), all of one shape, log-probs in nats."""
    return advantages - coef * (log_probs - teacher_log_probs)
