"""The tokenizer folder that these tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.rollout.support import make_tokenizer


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer, to give as --hf-checkpoint."""
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Any:
    """Its tokenizer."""
    from vime.data.tokenizer import load_tokenizer

    return load_tokenizer(str(model_dir))
