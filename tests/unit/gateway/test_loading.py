"""What a gateway loads before it knows that it needs it."""

from __future__ import annotations

import subprocess
import sys


def test_a_gateway_loads_neither_redis_nor_torch() -> None:
    code = (
        "import services.gateway.service, sys; print(*sorted({'redis', 'torch'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
