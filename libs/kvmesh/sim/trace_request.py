"""One request of a trace. Tests: tests/unit/sim/test_trace.py."""

from __future__ import annotations

from dataclasses import dataclass

TRACE_BLOCK = 512
"""Prompt tokens per hash id."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request.

    Attributes:
        arrival_s: from the start.
        hash_ids: equal id means equal block and equal prefix; the last one may be partial.
        session: empty if the request stands alone.
        scenario: whose request it is, where that matters.
        think_s: pause of the client after the answer before, for closed-loop replay.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    session: str = ""
    turn: int = 0
    think_s: float = 0.0
    scenario: str = ""

    @property
    def full_ids(self) -> tuple[int, ...]:
        """Ids of full blocks; only these can be shared."""
        return self.hash_ids[: self.input_tokens // TRACE_BLOCK]


def num_blocks(tokens: int) -> int:
    """Blocks of a prompt, the last of them perhaps partial."""
    return -(-tokens // TRACE_BLOCK)
