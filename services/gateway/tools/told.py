"""What a piece of a generation says. Pure. Tests: tests/unit/gateway/tools/test_reasoning.py."""

from __future__ import annotations

from typing import NamedTuple


class Told(NamedTuple):
    """What more text says; white space around either part is dropped."""

    reasoning: str
    answer: str
