"""A piece of a generation's text, separated into thinking and answer.

Pure. Tests: tests/unit/gateway/tools/test_reasoning.py.
"""

from __future__ import annotations

from typing import NamedTuple


class Told(NamedTuple):
    """Thinking and answer in a piece of text, without the white space around each."""

    reasoning: str
    answer: str
