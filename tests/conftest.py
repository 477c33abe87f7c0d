"""What every test gets: quiet third parties, no network, one thread per process unless it says otherwise."""

from __future__ import annotations

import os
from typing import Any

import pytest

# Set before any test imports torch, transformers or vllm; child processes inherit them.
DEFAULTS = {
    "HF_HUB_OFFLINE": "1",  # a model or tokenizer that is not on disk is an error, never a download
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",  # two cores hold an engine, a trainer and Ray; more threads only spin
}
for name, value in DEFAULTS.items():
    os.environ.setdefault(name, value)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several workers (`make test`): tests with processes share one of them and its engine; others spread by file."""
    from xdist.scheduler import LoadScopeScheduling

    class ByProcesses(LoadScopeScheduling):  # not xdist_group: xdist 3.8 does not pass groups on under pytest 9.2
        def _split_scope(self, nodeid: str) -> str:
            return "processes" if nodeid.startswith("tests/integration/") else nodeid.partition("::")[0]

    return ByProcesses(config, log)
