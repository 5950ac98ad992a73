"""What tests on a device share."""

from __future__ import annotations

from pathlib import Path

import pytest

_HERE = Path(__file__).parent
# The first test that launches a kernel compiles it.
_TIMEOUT_S = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives tests of this folder more time, and shows warnings instead of raising them.

    Which warnings torch's CUDA side, Triton and the driver have depends on the machine; the mode
    that finds waits for the device has one itself.
    """
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(_TIMEOUT_S))
            item.add_marker(pytest.mark.filterwarnings("default"))
