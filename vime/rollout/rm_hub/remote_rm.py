"""`--rm-type remote_rm`: a reward served over HTTP."""

from __future__ import annotations

from typing import Any

from vime.errors import ConfigError
from vime.utils.http_utils import post
from vime.utils.types import Sample

__all__ = ["score_sample"]

TIMEOUT = 120.0  # seconds of one try
RETRIES = 9


async def score_sample(args: Any, sample: Sample) -> Any:
    """POST {prompt, response, label} to `--rm-url` (or the row's metadata["rm_url"]); its JSON is the reward."""
    url = sample.metadata.get("rm_url") or getattr(args, "rm_url", None)
    if not url:
        raise ConfigError("reward 'remote_rm' needs an address: --rm-url, or metadata {\"rm_url\": ...} in the prompt file.")
    payload = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
    return await post(str(url), payload, max_retries=RETRIES, timeout=TIMEOUT)
