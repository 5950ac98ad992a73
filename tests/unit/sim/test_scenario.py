from __future__ import annotations

import pytest

from kvmesh.core.errors import ConfigError
from kvmesh.sim.scenario import Failure, FailureKind, parse_failures


def test_a_schedule() -> None:
    assert parse_failures("10:kill:0,20.5:restart:0,30:link:0.33") == (
        Failure(10, FailureKind.KILL, index=0),
        Failure(20.5, FailureKind.RESTART, index=0),
        Failure(30, FailureKind.LINK, factor=0.33),
    )
    assert parse_failures("") == ()


@pytest.mark.parametrize(
    "text", ["1:kill", "x:kill:0", "1:burn:0", "1:link:0", "-1:kill:0", "1:kill:-1"]
)
def test_what_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"kill|negative"):
        parse_failures(text)
