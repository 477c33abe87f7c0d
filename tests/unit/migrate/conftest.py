"""What the tests of `vime migrate` share."""

from __future__ import annotations

import pytest

from vime.migrate.megatron import MegatronFlags


@pytest.fixture(scope="session")
def megatron() -> MegatronFlags:
    """Megatron's parser; importing it takes seconds, so that it is made once."""
    return MegatronFlags()
