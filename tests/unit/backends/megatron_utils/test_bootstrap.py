"""What must be there before Megatron is used."""

from __future__ import annotations

import importlib.util

import pytest

from vime.backends.megatron_utils import bootstrap
from vime.errors import ConfigError


def test_without_psutil_a_checkpoint_would_hang_so_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: None if name == "psutil" else found(name, *args))
    with pytest.raises(ConfigError, match="psutil is not installed: Megatron's checkpoints would wait forever"):
        bootstrap.import_megatron()
