from __future__ import annotations

import pytest

from tests.unit.kvmanager.pool_stage import Stage


@pytest.fixture
def stage() -> Stage:
    """Of a test of its own."""
    return Stage()
