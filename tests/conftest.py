"""What every test gets: quiet third parties, no network, one thread per process unless it says otherwise."""

from __future__ import annotations

import os

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


def pytest_itemcollected(item: pytest.Item) -> None:
    """With several workers (`make test`): tests with processes share one of them and its engine; others spread by file."""
    serial = item.get_closest_marker("integration") is not None
    item.add_marker(pytest.mark.xdist_group("processes" if serial else item.path.name))
