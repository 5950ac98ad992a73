"""One request of a trace. Tests: tests/unit/sim/test_trace.py."""

from __future__ import annotations

from dataclasses import dataclass

TRACE_BLOCK = 512
"""Number of prompt tokens per hash id."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request.

    Attributes:
        arrival_s: seconds from the start of the trace.
        hash_ids: one id per block; equal ids mean equal blocks and prefixes. The last block may be
            partial.
        session: name of its session; empty if it has none.
        turn: its number in the session.
        think_s: seconds that the client pauses after the previous answer, for closed-loop replay.
        scenario: its scenario; empty where groups do not matter.
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
    """Returns the number of blocks of a prompt, including a partial last one."""
    return -(-tokens // TRACE_BLOCK)
