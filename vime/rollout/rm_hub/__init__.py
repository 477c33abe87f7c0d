"""Rewards. `async_rm(args, sample)` and `batched_async_rm(args, samples)` are what plug-ins call."""

from vime.rollout.rm_hub.scoring import async_rm, batched_async_rm

__all__ = ["async_rm", "batched_async_rm"]
