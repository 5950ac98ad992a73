"""What tests of vLLM share: they run where it is installed (`make e2e-vllm`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm_engine import needs_vllm

_HERE = Path(__file__).parent
# Each process of a mesh takes ten seconds to import it.
_TIMEOUT_S = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives tests of this folder more time, shows warnings, and skips them without vLLM."""
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(_TIMEOUT_S))
            item.add_marker(pytest.mark.filterwarnings("default"))
            item.add_marker(pytest.mark.slow)
            item.add_marker(needs_vllm)
